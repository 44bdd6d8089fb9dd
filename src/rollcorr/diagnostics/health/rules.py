"""Rules of the health check that combine several numbers: each is a function that returns a finding or `None`.

The table `RULES` contains the rules that `rollcorr.diagnostics.health.health_check` runs by default; the rules about
the weight sync are defined in `rollcorr.diagnostics.health.weight_sync_rules`. The limits are constants of these two
files, and docs/guides/health.md lists them. `log/contradicted_zero_count` is not in the metric registry: `rollcorr
check` counts it in the raw log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import median

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.weight_sync_rules import (
    above_null,
    lasting_rise,
    loss_pass_differs,
    token_share_rose,
)
from rollcorr.diagnostics.numbers import format_number

SAFETY_BOUND = 20.0
"""Default T × KL, nats, at which sequence weights are clamped, without a configuration."""
ESS_NEAR_ONE = 0.9
MOSTLY_SATURATED = 0.5
SATURATED = 0.01
SUSTAINED_STEPS = 5
SUSTAINED_DRIFT = 0.05
SUSTAINED_REJECTION = 0.1
FIRST_STEPS = 50
FIRST_STEPS_LOG_PPL_GAP = 1.0
PINNED_SHARE = 0.5
NOT_IN_USE = " (sequence weights are not in use)"
LOW_WEIGHT = 0.5
SURPRISE = "rollout_log_ppl"
BEFORE, AFTER = 5, 3
"""Number of steps before and after a jump whose medians are its two levels."""
JUMP, SCATTER, AT_ONCE = 0.3, 5.0, 0.8
"""Smallest jump relative to the level before it; relative to the largest difference of neighboring steps on either
side; and the smallest share of it between two adjacent steps. Learning also changes the surprisal, but over several
steps."""
LEAST = 0.05
"""The smallest jump, nats."""

COMPARISON = ("kl", "k3_kl", "log_ratio_abs_mean", "chi2_token")
"""Metrics of the mismatch; without any of them the policies were not compared."""


def identical_policies(evidence: Evidence) -> Finding | None:
    """Return a finding if every difference is exactly 0: possible for a single program, not for engine and trainer.

    The finding is a warning if there is evidence of two programs: bypass mode, a null with noise, or earlier steps
    that differed. By default it is a note.
    """
    names = [name for name in COMPARISON if name in evidence.current]
    values = [value for name in names for value in (evidence.current[name], *evidence.recent(name))]
    if not evidence.measured or not values or any(values):
        return None

    # Bit-identical log-probs are correct only for a single program, so look for evidence of two.
    bypass = evidence.config is not None and evidence.config.bypass_mode
    noise = 0.0 if evidence.noise is None else evidence.noise.sigma
    earlier = evidence.differed or any(value for name in names for _, value in evidence.series(name))
    reason = (
        "fine if one program samples and trains; if two do, the log-probs of one side were logged as the other's too"
    )
    if bypass:
        reason = "bypass mode sets old_log_prob to rollout_log_prob; every metric is then empty"
    elif noise > 0 and evidence.noise is not None:
        reason = f"{evidence.noise.source} shows two computations that differ, so one side is a copy of the other here"
    elif earlier:
        reason = "they differed in earlier steps: unless the weights arrive at once since then, one side is now a copy"
    return fault("identical_policies").broken(
        evidence,
        names[0],
        lambda value: value == 0,
        value=0.0,
        limit="not exactly 0, unless one program does both",
        reason=reason,
        severity="warning" if bypass or noise > 0 or earlier else "note",
    )


def horizon(evidence: Evidence) -> Finding | None:
    """Return a finding if T × KL reaches the safety bound: clamped sequence weights are equal and correct nothing."""
    bound = evidence.config.safety_bound if evidence.config is not None else SAFETY_BOUND
    viable = evidence.get("max_viable_length")
    longest = "" if math.isnan(viable) else f" (viable up to about {viable:,.0f} tokens)"
    unused = "" if evidence.sequences_in_force else NOT_IN_USE
    return fault("horizon").broken(
        evidence,
        "t_times_kl",
        lambda value: value >= bound,
        limit=f"below {bound:g}, the safety bound",
        reason="the typical sequence weight is exp(−T × KL); beyond the bound all are clamped to one value"
        f"{longest}{unused}",
        fix="use token weights or a per-token mean criterion (seq_mean_*), shorten responses, or lower the KL at "
        "its source: same sampling settings on both sides, higher rollout precision",
        severity="warning" if evidence.sequences_in_force else "note",
    )


def deceptive_effective_sample_size(evidence: Evidence) -> Finding | None:
    """Return a finding if the ESS is near 1 only because most weights are clamped to the safety bound."""
    saturated = evidence.get("saturated_low_fraction") + evidence.get("saturated_high_fraction")
    if not saturated > MOSTLY_SATURATED:
        return None
    return fault("deceptive_effective_sample_size").above(
        evidence,
        "rollout_is_eff_sample_size",
        ESS_NEAR_ONE,
        limit=f"near 1 only with at most {MOSTLY_SATURATED:.0%} saturated; {saturated:.0%} are",
        severity="warning" if evidence.weights_in_force else "note",
    )


def saturation(evidence: Evidence) -> Finding | None:
    """Return a finding if more than `SATURATED` of the weights are clamped to the safety bound."""
    low, high = evidence.get("saturated_low_fraction"), evidence.get("saturated_high_fraction")

    # The value is the sum of both fractions; the metric names the larger one.
    return fault("saturation").above(
        evidence,
        "saturated_high_fraction" if high > low else "saturated_low_fraction",
        SATURATED,
        value=low + high,
        limit=f"at most {SATURATED:g}",
        severity="warning" if evidence.weights_in_force else "note",
    )


def sustained_rejection(evidence: Evidence) -> Finding | None:
    """Return a finding if rejection stays above 5 % (drift) or 10 % (a narrow band) for five consecutive steps."""
    name = "rollout_rs_seq_masked_fraction"
    last = [value for _, value in evidence.series(name)[-SUSTAINED_STEPS:]]
    lowest = min(last, default=0.0)

    # A veto that is only measured rejects no sample, so there is no band to widen.
    if len(last) < SUSTAINED_STEPS or (evidence.diffusion and not evidence.rejection_in_force):
        return None

    # A larger share means that the band is narrow; a smaller share indicates a drift.
    limit = SUSTAINED_DRIFT
    reason = "the rollout side has drifted from the trainer"
    fix = f"lower the drift (precision, staleness){evidence.or_leave_bypass}"
    if lowest > SUSTAINED_REJECTION:
        limit = SUSTAINED_REJECTION
        reason = "the band rejects ordinary samples; where they stay in the denominator, the gradient shrinks"
        fix = "widen the band, e.g. 0.3_3.0 or 0.2_5.0 for a window of two diffusion steps"
    return fault("sustained_rejection").above(
        evidence,
        name,
        limit,
        value=lowest,
        title=f"much has been rejected for {SUSTAINED_STEPS} consecutive steps",
        limit=f"not above {limit:g} for {SUSTAINED_STEPS} consecutive steps",
        reason=reason,
        fix=fix,
        severity="warning" if evidence.diffusion else "note",
    )


def gap_at_start(evidence: Evidence) -> Finding | None:
    """Return a finding if |Δ log ppl| per sequence exceeds 1 nat from the first step on."""
    name = "log_ppl_abs_diff"
    value = max(_early_values(evidence, name), default=math.nan)

    # If the first step was in range, the setup is correct, and a later step caused the gap.
    measured = [step[name] for _, step in (*filter(None, [evidence.first]), *evidence.history) if name in step]
    if measured and measured[0] <= FIRST_STEPS_LOG_PPL_GAP:
        return None
    closed_since = len(evidence.history) > FIRST_STEPS and not evidence.get(name) > FIRST_STEPS_LOG_PPL_GAP
    return fault("gap_at_start").above(
        evidence,
        name,
        FIRST_STEPS_LOG_PPL_GAP,
        value=value,
        limit=f"at most {FIRST_STEPS_LOG_PPL_GAP:g} in the first {FIRST_STEPS} steps",
        fix=f"narrow the precision gap, compare sampling settings and alignment{evidence.or_leave_bypass}",
        severity="note" if closed_since else "warning",
    )


def pinned_at_threshold(evidence: Evidence) -> Finding | None:
    """Return a finding if the largest weight is at the truncation threshold in half of the first fifty steps or more.

    Token weights of language models are not tested: among thousands of tokens some exceed any threshold.
    """
    config, name = evidence.config, "rollout_is_max"
    if config is None or config.is_mode != "truncate" or config.is_upper is None:
        return None
    of_tokens = config.weighs_tokens and not evidence.diffusion

    # A float32 weight truncated at the threshold may lie a rounding error below it.
    threshold = config.is_upper * (1 - 1e-5)
    first = _early_values(evidence, name)
    if of_tokens or not first or sum(value >= threshold for value in first) < PINNED_SHARE * len(first):
        return None
    return fault("pinned_at_threshold").broken(
        evidence,
        name,
        lambda value: value >= threshold,
        value=max(first),
        limit=f"below {config.is_upper:g} in most of the first {FIRST_STEPS} steps",
        fix=f"lower the precision gap{evidence.or_leave_bypass}; rollout_is_ratio_fraction_high is how much is "
        "truncated",
        severity="warning" if evidence.diffusion and evidence.weights_in_force else "note",
    )


def band_narrower_than_mismatch(evidence: Evidence) -> Finding | None:
    """Return a finding if a geometric band (seq_mean_k1) is narrower, in nats, than the mean |Δ log ppl|."""
    width = min(_collect_k1_bounds(evidence, "seq_mean"), default=math.inf)
    limit = f"at most {width:.4g} nats, the half-width of the seq_mean_k1 band"
    return fault("band_narrower_than_mismatch").above(evidence, "log_ppl_abs_diff", width, limit=limit)


def length_dependence(evidence: Evidence) -> Finding | None:
    """Return a finding if T × KL at the mean length exceeds the bound of a seq_sum band or of a sequence weight."""
    config = evidence.config
    widths = _collect_k1_bounds(evidence, "seq_sum")
    if config is not None and config.rollout_is == "sequence" and config.is_upper is not None and config.is_upper > 1:
        widths.append(math.log(config.is_upper))

    # Beyond the safety bound `horizon` is the more specific finding.
    if not widths or horizon(evidence) is not None:
        return None
    width = min(widths)
    limit = f"at most {width:.4g} nats, the log of the bound"
    return fault("length_dependence").broken(
        evidence, "t_times_kl", lambda value: abs(value) > width, limit=limit, severity="note"
    )


def low_weights(evidence: Evidence) -> Finding | None:
    """Return a finding if most sequences weigh less than 1/C, so few sequences dominate the update."""
    applied = evidence.sequences_in_force
    return fault("low_weights").above(
        evidence,
        "rollout_is_low_weight_fraction",
        LOW_WEIGHT,
        limit=f"at most {LOW_WEIGHT:g}",
        reason="the sequence weight of most responses is below 1/C" + ("" if applied else NOT_IN_USE),
        severity="warning" if applied else "note",
    )


def skipped_updates(evidence: Evidence) -> Finding | None:
    """Return a finding if the trainer skipped updates: loss or gradient was not finite, or no sample was kept."""
    name = "actor/skipped_steps"
    skipped = max((value for _, value in evidence.series(name)), default=evidence.get(name))
    finding = fault("skipped_updates").above(evidence, name, 0, value=skipped, limit="0")

    # The trainer counts skipped updates over the full run, so the count is the number of steps.
    return finding and replace(finding, steps=int(skipped) if evidence.history else None)


def contradicted_zeros(evidence: Evidence) -> Finding | None:
    """Return a finding if a side has probability 1 (exactly 0.0) far from the other side's: filled in, not computed."""
    return fault("contradicted_zeros").above(evidence, "log/contradicted_zero_count", 0, limit="0")


def surprise_jumped(evidence: Evidence) -> Finding | None:
    """Return a finding if the sampled tokens became more or less probable within a step, and stayed so.

    Log-probs computed before the sampling settings are applied agree on both sides for every sampler. But the mean of
    −log μ, nats, jumps at the step from which tokens are drawn with a changed temperature or top-p.
    """
    steps = evidence.series(SURPRISE)
    for place in range(BEFORE, len(steps) - AFTER + 1):
        before = [value for _, value in steps[place - BEFORE : place]]
        after = [value for _, value in steps[place : place + AFTER]]
        jump = median(after) - median(before)
        scatter = max(abs(b - a) for part in (before, after) for a, b in pairwise(part))
        at_once = (after[0] - before[-1]) / jump if jump else 0.0
        if abs(jump) >= max(LEAST, JUMP * median(before), SCATTER * scatter) and at_once >= AT_ONCE:
            onset = steps[place][0]
            return replace(
                fault("surprise_jumped").finding,
                title=f"the sampled tokens became {'more' if jump < 0 else 'less'} probable at step {onset}, at once",
                metric=SURPRISE,
                value=median(after),
                limit=f"about {format_number(median(before))}, as before",
                first_step=onset,
                steps=len(steps) - place,
            )
    return None


Rule = Callable[[Evidence], Finding | None]

RULES: tuple[Rule, ...] = (
    above_null,
    lasting_rise,
    token_share_rose,
    identical_policies,
    deceptive_effective_sample_size,
    horizon,
    saturation,
    gap_at_start,
    sustained_rejection,
    pinned_at_threshold,
    band_narrower_than_mismatch,
    length_dependence,
    low_weights,
    skipped_updates,
    contradicted_zeros,
    loss_pass_differs,
    surprise_jumped,
)


STEP_RULES: tuple[Rule, ...] = (
    lasting_rise,
    identical_policies,
    sustained_rejection,
    pinned_at_threshold,
    skipped_updates,
)
"""Rules that also apply to denoising steps; the remaining rules are about tokens and the length of responses."""


def _early_values(evidence: Evidence, name: str) -> list[float]:
    """Return a metric's values within the first fifty steps; without a series, the current value."""
    if not evidence.history:
        return [evidence.current[name]] if name in evidence.current else []
    return [value for step, value in evidence.series(name) if step <= FIRST_STEPS]


def _collect_k1_bounds(evidence: Evidence, scope: str) -> list[float]:
    """Return |log bound|, nats, of every bound of the k1 criteria of a scope."""
    criteria = evidence.config.criteria if evidence.config is not None else ()
    bounds = [b for c in criteria if c.scope == scope and c.kind == "k1" for b in (c.lower, c.upper)]
    return [abs(math.log(bound)) for bound in bounds if bound]
