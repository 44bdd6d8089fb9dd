"""The judgments that need more than one number: each a named function from evidence to a finding or None.

`RULES` is the table that `rollcorr.diagnostics.health.health_check` goes through. Limits are named here, once, and
docs/guides/health.md lists them. `log/contradicted_zero_count` is no metric of the registry: `rollcorr check` counts it
in the raw log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rollcorr.config.finding import Finding, Severity
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.trend import AGE, FACTOR, Change
from rollcorr.diagnostics.numbers import format_number

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

ABOVE_NULL = 3.0
"""k3 over that of a null, above which the weights are not the same."""

FIRST_STEP = 1
"""Largest number of a step that no update came before: trainers count from 0 or from 1."""
SAME_ORDER = 0.1
"""Share of today's k3 that the first step must have had, for the same cause to make both."""
LEAST_K3 = 1e-9
"""k3 in nats that float32 rounding of the log-probs alone may cause."""

RISES = ("k3_kl", "log_ratio_std")
"""The metrics of which a lasting rise is one of the mismatch; the first one that rose is shown."""
NEGLIGIBLE = {"k3_kl": 1e-4, "log_ratio_std": 1.4e-2}
"""Below these a rise over many steps is only noted: docs/guides/choosing.md calls that size negligible, and in bf16 a
right sampler reaches 6e-5, because rounding grows with the logits as the policy sharpens."""
NEGLIGIBLE_STEP = {"k3_kl": 1e-5, "log_ratio_std": 4.5e-3}
"""The same of a rise within one step, which no policy makes: below these it is rounding at most."""
NOTHING_TO_DO = "nothing to do while k3 is that small"
_RISE_WORDS = {
    "frozen_sampler": (
        "the mismatch has grown since the first steps: the sampler seems not to be synchronized",
        "it grows with every update, as where the sampler keeps the weights of the start",
        "check that the weight sync runs, reaches the process that samples, and covers every parameter",
        "compare a checksum of one parameter on both sides after a sync, or sync by hand: k3 falls back to its start",
    ),
    "stale_by_lag": (
        "the mismatch has grown with the age of the weights, now {age} updates",
        "the recorded age of the weights that sampled has grown with it, and at one age it does not grow",
        "sync the weights more often, limit the age of what is trained on, or correct with the recorded log-probs",
        "limit the age to one version: the mismatch falls to that of the null",
    ),
    "changed_at_step": (
        "the mismatch rose at step {onset} to {factor} times its start, and stayed",
        "a rise within one step is a change of the setup, not of the policy",
        "look at what happened at that step: a sync that failed or stopped, a restarted engine, another setting, a "
        "checkpoint that one side did not load",
        "compare a checksum of one parameter on both sides after a sync, or sync by hand: k3 falls back to its start",
    ),
    "growing_mismatch": (
        "the mismatch has been growing since step {onset}",
        "it grows with the steps, as where a sync has stopped, or where the engine gets worse with its age",
        "check the weight sync from that step on; then restart the engine, and look at the learning rate",
        "sync by hand, and restart the engine: which of the two brings k3 back to its start tells the cause",
    ),
}
"""Code of a rise → its title, reason, fix, and what would confirm it."""
_FROM_EXCESS_WORDS = (
    "the mismatch has grown since the first step, where it was in excess already",
    "what both sides differ by from the first step on shows more as the policy sharpens; a sampler that keeps its "
    "weights does not differ there",
    "find what differs at the first step; look at the weight sync if the mismatch still grows then",
    "with that fixed, k3 is the null's at the first step, and stays there",
)
"""A rise from a first step that was in excess already: no update had come before, so none was missed."""
_NEGLIGIBLE_WORDS = (
    "the mismatch has grown since step {onset}, by no more than rounding explains",
    "rounding grows with the logits of a young policy as it sharpens, and explains all of it",
    NOTHING_TO_DO,
    "",
)
"""The same of a rise that is still negligible: a note on rounding must not ask for a repair."""

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
    if config.rollout_is == "token" and not evidence.diffusion:
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


def frozen_sampler(evidence: Evidence) -> Finding | None:
    """The mismatch grows from the first steps on, as where the sampler keeps its first weights."""
    finding = _rise(evidence, "frozen_sampler", lambda change: _rise_code(change, evidence) == "frozen_sampler")
    if finding is None or not (_starts_in_excess(evidence) and _is_fresh_on_record(evidence)):
        return finding

    # What a frozen sampler reports as its version is often the one that it should have.
    reason = f"{finding.reason}; the recorded age of its weights is 0 throughout, and that may be wrong"
    return replace(finding, reason=reason, follows_from="above_null" if _is_judged_by_null(evidence) else None)


def stale_by_lag(evidence: Evidence) -> Finding | None:
    """The mismatch grew from the first steps on, and so did the recorded age of the weights."""
    return _rise(evidence, "stale_by_lag", lambda change: _rise_code(change, evidence) == "stale_by_lag")


def changed_at_step(evidence: Evidence) -> Finding | None:
    """The mismatch rose within a step, and stayed."""
    return _rise(evidence, "changed_at_step", lambda change: not change.from_start and change.shape == "step")


def growing_mismatch(evidence: Evidence) -> Finding | None:
    """The mismatch has grown since some step of the run."""
    finding = _rise(evidence, "growing_mismatch", lambda change: _rise_code(change, evidence) == "growing_mismatch")
    if finding is None or not _differs_from_start(evidence):
        return finding
    return replace(finding, follows_from="above_null" if _is_judged_by_null(evidence) else None)


def token_share_rose(evidence: Evidence) -> Finding | None:
    """The token id explains more of the mismatch than at the start: rounding does not become systematic by itself."""
    name = "log/token_id_share"
    change = evidence.changes.get(name)
    if change is None:
        return None
    beside = next((metric for metric in RISES if metric in evidence.changes), None)
    negligible = evidence.get("k3_kl") < NEGLIGIBLE_STEP["k3_kl"]
    return Finding(
        code="token_share_rose",
        metric=name,
        title=f"the token id explains more of the difference since step {change.onset}",
        value=change.value,
        limit=f"about {format_number(change.baseline)}, as before (within a step, with ids modulo 1,024)",
        reason="rounding differs from token to token by chance; where the token itself decides, the weights differ",
        fix=NOTHING_TO_DO if negligible else _RISE_WORDS["changed_at_step"][2],
        severity="note" if change.is_over or negligible else "warning",
        first_step=change.onset,
        steps=change.lasted,
        confidence=change.z**2 / (1 + change.z**2),
        evidence=_rise_evidence(change),
        follows_from=None if beside is None else _rise_code(evidence.changes[beside], evidence),
    )


def above_null(evidence: Evidence) -> Finding | None:
    """k3 is several times that of a null."""
    value, noise = evidence.get("k3_kl"), evidence.noise
    if noise is None or not noise.is_null:
        return None
    expected = noise.sigma**2 / 2 if noise.k3 is None else noise.k3
    limit = ABOVE_NULL * _null_k3(noise)
    if not value >= limit:
        return None
    times, start = format_number(value / _null_k3(noise)), _start_k3(evidence)
    finding = Finding(
        code="above_null",
        metric="k3_kl",
        title=f"the mismatch is {times} times that of {noise.source}",
        value=value,
        limit=f"below {ABOVE_NULL:g} times {format_number(expected)}",
        reason="two policies with the same weights differ by less on this engine",
        fix="check the weight sync: every parameter (output head, tied and renamed ones, adapters), its version at the "
        "time of sampling, and a quantization of the sampler",
        confirm="score a few of these rows with the sampler's own weights: the excess vanishes",
        evidence={"k3": value, "expected_k3": expected, "ratio": value / _null_k3(noise)},
        **evidence.when("k3_kl", lambda value: value >= limit),
    )
    from_start = _starts_in_excess(evidence) and (_differs_from_start(evidence) or _is_fresh_on_record(evidence))
    if evidence.first is None or not from_start:
        return finding

    # Before the first update both sides have the same weights, unless they loaded others.
    return replace(
        finding,
        title=f"the two sides differ from the first step on: the mismatch is {times} times that of {noise.source}",
        reason=f"it was {format_number(start / _null_k3(noise))} times that at step {evidence.first[0]}, before any "
        "update that a sampler could miss",
        fix="compare what each side was set up with: the temperature and the other sampling settings, whether the "
        "engine's log-probs are of the processed logits, the tokens and their positions, the checkpoint that it loaded "
        "and its precision",
        confirm="log rollouts and give them to `rollcorr check` with this null: the tokens tell these apart",
        evidence={**finding.evidence, "k3_at_first_step": start},
        first_step=evidence.first[0],
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


def _rise(evidence: Evidence, code: str, applies: Callable[[Change], bool]) -> Finding | None:
    """The finding of a lasting rise: of k3, else of the spread of the log-ratio."""
    name = next((metric for metric in RISES if metric in evidence.changes), None)
    if name is None or not applies(evidence.changes[name]):
        return None
    change = evidence.changes[name]

    # The logits of a policy grow as it sharpens, and the rounding of a right sampler with them.
    floor = NEGLIGIBLE_STEP if change.shape == "step" and not change.from_start else NEGLIGIBLE
    negligible = change.ended is None and change.value < floor[name]
    title, cause, fix, confirm = _RISE_WORDS[code]
    if negligible:
        title, cause, fix, confirm = _NEGLIGIBLE_WORDS
    elif code == "growing_mismatch" and _differs_from_start(evidence):
        title, cause, fix, confirm = _FROM_EXCESS_WORDS
    until = ""
    if change.ended is not None:
        until = f"; it was back at its start from step {change.ended} on"
    return Finding(
        code=code,
        metric=name,
        title=title.format(
            onset=change.onset, factor=format_number(change.factor), age=format_number(change.age or 0.0)
        ),
        value=change.value,
        limit=f"at most {FACTOR:g} times {format_number(change.baseline)}, its start",
        reason=f"it reached {format_number(change.factor)} times its start in {change.lasted} steps{until}; {cause}",
        fix=fix,
        confirm=confirm,
        severity="note" if change.is_over or negligible else "warning",
        first_step=change.onset,
        steps=change.lasted,
        confidence=change.z**2 / (1 + change.z**2),
        evidence=_rise_evidence(change),
    )


def _rise_code(change: Change, evidence: Evidence) -> str:
    if change.from_start and change.age is not None:
        return "stale_by_lag"
    if change.from_start:
        return "growing_mismatch" if _differs_from_start(evidence) else "frozen_sampler"
    return "changed_at_step" if change.shape == "step" else "growing_mismatch"


def _null_k3(noise: Noise) -> float:
    """k3 of a null, nats; at least what rounding makes."""
    return max(noise.sigma**2 / 2 if noise.k3 is None else noise.k3, LEAST_K3)


def _is_judged_by_null(evidence: Evidence) -> bool:
    """Whether `above_null` speaks: elsewhere the caller compares with the null."""
    return evidence.noise is not None and evidence.noise.is_null


def _start_k3(evidence: Evidence) -> float:
    """k3 of the step that no update came before, nats; NaN where that step is not recorded."""
    if evidence.first is None or evidence.first[0] > FIRST_STEP:
        return math.nan
    return evidence.first[1].get("k3_kl", math.nan)


def _starts_in_excess(evidence: Evidence) -> bool:
    """Whether k3 was several times the null's before the first update: no weight sync can have failed by then."""
    return evidence.noise is not None and _start_k3(evidence) >= ABOVE_NULL * _null_k3(evidence.noise)


def _differs_from_start(evidence: Evidence) -> bool:
    """Whether what made that excess makes that of now as well: it is of the same order."""
    return _starts_in_excess(evidence) and _start_k3(evidence) >= SAME_ORDER * evidence.get("k3_kl")


def _is_fresh_on_record(evidence: Evidence) -> bool:
    """Whether an age of the weights is recorded, and is 0 at every step."""
    ages = [age for _, age in evidence.series(AGE)]
    return bool(ages) and not any(ages)


def _rise_evidence(change: Change) -> dict[str, float]:
    return {
        "baseline": change.baseline,
        "factor": change.factor,
        "onset": float(change.onset),
        "found_at_step": float(change.found),
    }


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
