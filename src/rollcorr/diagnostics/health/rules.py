"""The judgments that need more than one number: each a named function from evidence to a finding or None.

`RULES` is the table that `rollcorr.diagnostics.health.health_check` goes through. Its judgments about the sync of the
weights are in `rollcorr.diagnostics.health.weight_sync_rules`. Limits are named in these two files, once, and
docs/guides/health.md lists them. `log/contradicted_zero_count` is no metric of the registry: `rollcorr check` counts it
in the raw log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rollcorr.config.finding import Finding, Severity
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.weight_sync_rules import (
    above_null,
    changed_at_step,
    frozen_sampler,
    growing_mismatch,
    stale_by_lag,
    token_share_rose,
)

SAFETY_BOUND = 20.0
"""T × KL at which sequence weights are clamped, when no configuration says otherwise."""
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

COMPARISON = ("kl", "k3_kl", "log_ratio_abs_mean", "chi2_token")
"""Metrics of the mismatch: without any of them nothing was compared."""


def identical_policies(evidence: Evidence) -> Finding | None:
    """Every difference is exactly 0. One program that samples and trains may do that; two programs cannot.

    A note, unless something shows that there are two: bypass mode, a null that differs, or earlier steps that did.
    """
    names = [name for name in COMPARISON if name in evidence.current]
    values = [value for name in names for value in (evidence.current[name], *evidence.recent(name))]
    if not evidence.measured or not values or any(values):
        return None

    # Equal to the last bit is right for one program alone, so look for a sign that there are two.
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
    return Finding(
        code="identical_policies",
        metric=names[0],
        title="degenerate: both policies agree to the last bit",
        value=0.0,
        limit="not exactly 0, unless one program does both",
        reason=reason,
        fix="in bypass mode measure the current policy against the rollout (log_prob, not old_log_prob); else check "
        "that the trainer recomputes its log-probs, and that the sampler's are its own. If one program does both, no "
        "correction is needed",
        severity="warning" if bypass or noise > 0 or earlier else "note",
        **evidence.when(names[0], lambda value: value == 0),
    )


def horizon(evidence: Evidence) -> Finding | None:
    """T × KL reaches the safety bound: sequence weights are clamped to one value and correct nothing."""
    bound = evidence.config.safety_bound if evidence.config is not None else SAFETY_BOUND
    value = evidence.get("t_times_kl")
    if not value >= bound:
        return None
    viable = evidence.get("max_viable_length")
    longest = "" if math.isnan(viable) else f" (viable up to about {viable:,.0f} tokens)"
    unused = "" if evidence.sequences_in_force else NOT_IN_USE
    return Finding(
        code="horizon",
        metric="t_times_kl",
        title="responses are too long for sequence weights",
        value=value,
        limit=f"below {bound:g}, the safety bound",
        reason="the typical sequence weight is exp(−T × KL); beyond the bound all are clamped to one value"
        f"{longest}{unused}",
        fix="use token weights or a per-token mean criterion (seq_mean_*), shorten responses, or lower the KL at "
        "its source: same sampling settings on both sides, higher rollout precision",
        severity="warning" if evidence.sequences_in_force else "note",
        **evidence.when("t_times_kl", lambda value: value >= bound),
    )


def deceptive_effective_sample_size(evidence: Evidence) -> Finding | None:
    """ESS near 1 while most weights sit at the safety bound: equal because clamped, not because they match."""
    value = evidence.get("rollout_is_eff_sample_size")
    saturated = _saturated(evidence)
    if not (value > ESS_NEAR_ONE and saturated > MOSTLY_SATURATED):
        return None
    return Finding(
        code="deceptive_effective_sample_size",
        metric="rollout_is_eff_sample_size",
        title="the effective sample size only looks healthy",
        value=value,
        limit=f"near 1 only with at most {MOSTLY_SATURATED:.0%} saturated; {saturated:.0%} are",
        reason="most weights are clamped to the same safety bound: they are equal because all are extreme",
        fix="do not trust sequence weights here; compare the sampling settings (temperature, top-p, top-k), shorten "
        "responses, or use token weights",
        severity=_weight_severity(evidence),
        follows_from="saturation",
        **evidence.when("rollout_is_eff_sample_size", lambda value: value > ESS_NEAR_ONE),
    )


def saturation(evidence: Evidence) -> Finding | None:
    """Weights at the safety bound are not weights any more."""
    saturated = _saturated(evidence)
    if not saturated > SATURATED:
        return None
    low, high = evidence.get("saturated_low_fraction"), evidence.get("saturated_high_fraction")
    name = "saturated_high_fraction" if high > low else "saturated_low_fraction"
    return Finding(
        code="saturation",
        metric=name,
        title="weights saturate at the safety bound",
        value=saturated,
        limit=f"at most {SATURATED:g}",
        reason="log weights beyond it are cut there: what they said is lost, and chi-squared understates the mismatch",
        fix="move from sequence to token or geometric level, or reject these sequences (seq_mean_k3, veto)",
        severity=_weight_severity(evidence),
        **evidence.when(name, lambda value: value > SATURATED),
    )


def sustained_rejection(evidence: Evidence) -> Finding | None:
    """Rejection stays above 5 % (drift) or 10 % (the band is too tight) for five consecutive steps."""
    name = "rollout_rs_seq_masked_fraction"
    last = [value for _, value in evidence.series(name)[-SUSTAINED_STEPS:]]
    lowest = min(last, default=0.0)
    if len(last) < SUSTAINED_STEPS or not lowest > SUSTAINED_DRIFT:
        return None

    # A band that rejects this much is too tight; less of it is a drift.
    if lowest > SUSTAINED_REJECTION:
        limit = SUSTAINED_REJECTION
        reason = "the band rejects ordinary samples; where they stay in the denominator, the gradient shrinks"
        fix = "widen the band, e.g. 0.3_3.0 or 0.2_5.0 for a window of two diffusion steps"
    else:
        limit = SUSTAINED_DRIFT
        reason = "the rollout side has drifted from the trainer"
        fix = f"lower the drift (precision, staleness){evidence.or_leave_bypass}"

    return Finding(
        code="sustained_rejection",
        metric=name,
        title=f"much has been rejected for {SUSTAINED_STEPS} consecutive steps",
        value=lowest,
        limit=f"not above {limit:g} for {SUSTAINED_STEPS} consecutive steps",
        reason=reason,
        fix=fix,
        severity=_diffusion_severity(evidence),
        **evidence.when(name, lambda value: value > limit),
    )


def gap_at_start(evidence: Evidence) -> Finding | None:
    """The policies differ by more than 1 nat per sequence within the first fifty steps."""
    name = "log_ppl_abs_diff"
    value = max(_first_steps(evidence, name), default=math.nan)
    if not value > FIRST_STEPS_LOG_PPL_GAP:
        return None
    closed_since = len(evidence.history) > FIRST_STEPS and not evidence.get(name) > FIRST_STEPS_LOG_PPL_GAP
    return Finding(
        code="gap_at_start",
        metric=name,
        title="a large gap between the policies from the start",
        value=value,
        limit=f"at most {FIRST_STEPS_LOG_PPL_GAP:g} in the first {FIRST_STEPS} steps",
        reason="before training has moved the policy, both sides should agree: this is a fault in the setup",
        fix=f"narrow the precision gap, compare sampling settings and alignment{evidence.or_leave_bypass}",
        severity="note" if closed_since else "warning",
        **evidence.when(name, lambda value: value > FIRST_STEPS_LOG_PPL_GAP),
    )


def pinned_at_threshold(evidence: Evidence) -> Finding | None:
    """The largest weight equals the truncation threshold in at least half of the first fifty steps.

    Not asked of the token weights of a language model: one in thousands lies beyond any threshold.
    """
    config, name = evidence.config, "rollout_is_max"
    if config is None or config.is_mode != "truncate" or config.is_upper is None:
        return None
    if config.weighs_tokens and not evidence.diffusion:
        return None

    # A float32 weight truncated at the threshold may lie a rounding error below it.
    threshold = config.is_upper * (1 - 1e-5)
    first = _first_steps(evidence, name)
    if not first or sum(value >= threshold for value in first) < PINNED_SHARE * len(first):
        return None
    return Finding(
        code="pinned_at_threshold",
        metric=name,
        title="the largest weight is pinned at the threshold",
        value=max(first),
        limit=f"below {config.is_upper:g} in most of the first {FIRST_STEPS} steps",
        reason="truncation acts from the start, so the gap between rollout and trainer is larger than it should be",
        fix=f"lower the precision gap{evidence.or_leave_bypass}; rollout_is_ratio_fraction_high is how much is "
        "truncated",
        severity=_diffusion_severity(evidence),
        **evidence.when(name, lambda value: value >= threshold),
    )


def band_narrower_than_mismatch(evidence: Evidence) -> Finding | None:
    """A geometric band (seq_mean_k1) tighter than the mean |log-ratio|: nearly every sequence falls outside."""
    widths = _band_widths(evidence, "seq_mean")
    gap = evidence.get("log_ppl_abs_diff")
    if not widths or not gap > min(widths):
        return None
    return Finding(
        code="band_narrower_than_mismatch",
        metric="log_ppl_abs_diff",
        title="the rejection band is narrower than the mismatch",
        value=gap,
        limit=f"at most {min(widths):.4g} nats, the half-width of the seq_mean_k1 band",
        reason="the mean per-token gap of a typical sequence already lies outside the band, so most are rejected",
        fix="widen the band to a few times the measured gap, or use seq_mean_k3, which grows with its square",
        **evidence.when("log_ppl_abs_diff", lambda value: value > min(widths)),
    )


def length_dependence(evidence: Evidence) -> Finding | None:
    """A band on products, or a sequence weight, that the mean length alone pushes past its bound."""
    config = evidence.config
    widths = _band_widths(evidence, "seq_sum")
    if config is not None and config.rollout_is == "sequence" and config.is_upper is not None and config.is_upper > 1:
        widths.append(math.log(config.is_upper))

    # Past the safety bound `horizon` says more.
    if not widths or not abs(evidence.get("t_times_kl")) > min(widths) or horizon(evidence) is not None:
        return None
    return Finding(
        code="length_dependence",
        metric="t_times_kl",
        title="the bound on products depends on length here",
        value=evidence.get("t_times_kl"),
        limit=f"at most {min(widths):.4g} nats, the log of the bound",
        reason="at the mean length the product of ratios is already past the bound: longer responses are "
        "down-weighted or rejected for being long",
        fix="use a criterion per token mean (seq_mean_k1, seq_mean_k3) or token weights",
        severity="note",
        **evidence.when("t_times_kl", lambda value: abs(value) > min(widths)),
    )


def low_weights(evidence: Evidence) -> Finding | None:
    """Most sequences weigh less than 1/C: a few carry the update."""
    name = "rollout_is_low_weight_fraction"
    value = evidence.get(name)
    if not value > LOW_WEIGHT:
        return None
    applied = evidence.sequences_in_force
    return Finding(
        code="low_weights",
        metric=name,
        title="most sequences would count for almost nothing",
        value=value,
        limit=f"at most {LOW_WEIGHT:g}",
        reason="the sequence weight of most responses is below 1/C" + ("" if applied else NOT_IN_USE),
        fix="stay with or move to token weights; shorten responses; lower the KL",
        severity="warning" if applied else "note",
        **evidence.when(name, lambda value: value > LOW_WEIGHT),
    )


def skipped_updates(evidence: Evidence) -> Finding | None:
    """The trainer skipped updates: the loss or a gradient was not finite, or nothing was kept."""
    name = "actor/skipped_steps"
    skipped = max((value for _, value in evidence.series(name)), default=evidence.get(name))
    if not skipped > 0:
        return None
    return Finding(
        code="skipped_updates",
        metric=name,
        title="updates were skipped",
        value=skipped,
        limit="0",
        reason="the loss or a gradient was not finite, or everything was rejected; the weights were left as they were",
        fix="lower the learning rate, clip gradients, and look at nonfinite_count, rejected shares and the "
        "largest weights then",
        first_step=evidence.when(name, lambda value: value > 0)["first_step"],
        steps=int(skipped) if evidence.history else None,  # The trainer counts them over the whole run.
    )


def contradicted_zeros(evidence: Evidence) -> Finding | None:
    """One side says probability 1 (exactly 0.0) where the other is far from it: filled in, not computed."""
    name = "log/contradicted_zero_count"
    value = evidence.get(name)
    if not value > 0:
        return None
    return Finding(
        code="contradicted_zeros",
        metric=name,
        title="log-probs look filled in with zeros",
        value=value,
        limit="0",
        reason="one policy claims probability exactly 1 for tokens that the other gives less than 1/e",
        fix="store missing log-probs as NaN (null in JSONL), never as 0.0; find out why the engine returned none",
        **evidence.when(name, lambda value: value > 0),
    )


Rule = Callable[[Evidence], Finding | None]

RULES: tuple[Rule, ...] = (
    above_null,
    frozen_sampler,
    stale_by_lag,
    changed_at_step,
    growing_mismatch,
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
)


STEP_RULES: tuple[Rule, ...] = (
    frozen_sampler,
    stale_by_lag,
    changed_at_step,
    growing_mismatch,
    identical_policies,
    sustained_rejection,
    pinned_at_threshold,
    skipped_updates,
)
"""Those that mean the same for denoising steps; the others are about tokens and the length of responses."""


def _saturated(evidence: Evidence) -> float:
    return evidence.get("saturated_low_fraction") + evidence.get("saturated_high_fraction")


def _weight_severity(evidence: Evidence) -> Severity:
    """A limit on weights warns where they reach the loss."""
    return "warning" if evidence.weights_in_force else "note"


def _diffusion_severity(evidence: Evidence) -> Severity:
    return "warning" if evidence.diffusion else "note"


def _first_steps(evidence: Evidence, name: str) -> list[float]:
    """Values within the first fifty steps; without a series, the current value."""
    if not evidence.history:
        return [evidence.current[name]] if name in evidence.current else []
    return [value for step, value in evidence.series(name) if step <= FIRST_STEPS]


def _band_widths(evidence: Evidence, scope: str) -> list[float]:
    """|log bound| of every finite side of the k1 criteria of a scope, nats."""
    criteria = evidence.config.criteria if evidence.config is not None else ()
    bounds = [b for c in criteria if c.scope == scope and c.kind == "k1" for b in (c.lower, c.upper)]
    return [abs(math.log(bound)) for bound in bounds if bound]
