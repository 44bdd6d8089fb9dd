"""The health check: find metrics outside their healthy range, with the reason and a fix for each.

Findings have two sources: the ranges of single metrics in the registry (`rollcorr.core.metric_registry`), and the rules
over several metrics in `rollcorr.diagnostics.health.rules`.

A single dictionary of metrics is judged directly. A series (a dictionary per step) is judged by the median of the last
ten steps with a valid token, so that a spike does not decide the verdict; a metric that has recovered becomes a note.
Limits are exclusive: a value at its limit is healthy; only T × KL warns at its bound. A limit on weights warns if
weights reach the loss, and a limit on rejection warns if a criterion rejects; otherwise they are notes.

Ranges cannot show that the two policies have different weights: a sampler that is never synchronized differs little at
first. The weights are compared with a null, or with the run's first steps; without either the verdict is "not judged".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median
from typing import Literal

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.finding import Finding, HasFindings
from rollcorr.core.health_ranges import HealthyRange
from rollcorr.core.metric_registry import metric
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.diffusion_rules import (
    DIFFUSION_RULES,
    expected_at,
    range_at,
    rises_of_pictures,
    step_range,
)
from rollcorr.diagnostics.health.evidence import (
    Evidence,
    Metrics,
    bare_metrics,
    history_of,
    recent_medians,
)
from rollcorr.diagnostics.health.noise import SIGNED, Noise, expected_from_noise, ranges_from_noise
from rollcorr.diagnostics.health.rules import COMPARISON, RULES, STEP_RULES
from rollcorr.diagnostics.health.trend import AGE, WATCHED, SeriesWatch
from rollcorr.diagnostics.numbers import format_number, label
from rollcorr.diagnostics.resolver import Folded, folded, resolve_findings, unfolded

__all__ = ["Finding", "HealthReport", "health", "healthy_range", "is_broken", "judge", "limit_in_words"]


Verdict = Literal["healthy", "unhealthy", "not judged"]

EXIT_CODES: Mapping[Verdict, int] = {"healthy": 0, "unhealthy": 1, "not judged": 3}

FEWEST_SEQUENCES = 16
"""Fewest sequences that are judged."""
FEWEST_TOKENS = 100
"""Fewest tokens that are judged."""
FIRST_STEPS = 5
"""Number of first steps of a run that serve as the default null."""

_WEIGHT_METRICS = frozenset(
    {
        "rollout_is_mean",
        "rollout_is_std",
        "rollout_is_eff_sample_size",
        "rollout_is_ratio_fraction_high",
        "rollout_is_ratio_fraction_low",
        "rollout_is_seq_max_deviation",
    }
)
"""Metrics of the weights: their ranges warn only if weights reach the loss."""
DRAWS_NOT_JUDGED = (
    "log-probs agree; whether tokens were drawn from them is not judged; record the sampling settings: the column "
    "`sampling` of the log, or Monitor(sampling=SamplingSpec(…))"
)
"""Sentence for policies that agree without a record of the sampling settings."""
_NULL_FIX = "measure a null (`rollcorr null`)"
_RECORD_EXACT_KL = "record the exact KL of each step (prev_sample_mean of both policies)"


@dataclass(frozen=True, kw_only=True)
class HealthReport(HasFindings):
    """Verdict of a health check, with its findings and the expected values.

    Attributes:
        findings: errors and warnings first, then notes.
        values: the numbers that were judged, by bare metric name.
        steps: number of steps of the series with a valid token; defaults to `None`: no series.
        judged_against: the reference of the mismatch, e.g. "null.json" or "steps 1 to 5 of this run"; empty by default:
            no reference.
        not_judged: a sentence with the reason for each part that could not be judged; empty by default. A report with
            such a sentence and without a warning is "not judged", never "healthy".
        expected: metric → its expected value from noise, at this length and these thresholds.
        expected_ranges: signed metric, such as `kl` → the range from noise that contains 95 % of batches of this size;
            these metrics are not in `expected`.
        expected_from: description of that noise; empty by default: not known.
        diffusion: the report is about denoising steps; False by default.
    """

    findings: tuple[Finding, ...]
    values: Mapping[str, float] = field(repr=False)
    steps: int | None = None
    judged_against: str = ""
    not_judged: tuple[str, ...] = ()
    expected: Mapping[str, float] = field(default_factory=dict, repr=False)
    expected_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    expected_from: str = ""
    diffusion: bool = False

    def _repr_html_(self) -> str:
        """Return the verdict as HTML for a notebook."""
        from rollcorr.diagnostics.notebook import verdict_html

        return verdict_html(self)

    @property
    def causes(self) -> tuple[Folded, ...]:
        """Return the findings, warnings first, with their consequences folded under their causes."""
        return folded(self.findings)

    @property
    def healthy(self) -> bool:
        """Return whether everything was judged, without an error or a warning."""
        return self.verdict == "healthy"

    @property
    def verdict(self) -> Verdict:
        """Return "unhealthy" with an error or a warning, "not judged" if a part was not judged, else "healthy"."""
        if self.errors or self.warnings:
            return "unhealthy"
        return "not judged" if self.not_judged else "healthy"

    @property
    def exit_code(self) -> int:
        """Return the exit code of commands that print the verdict; 2 (bad input) and 130 (interrupted) are reserved."""
        return EXIT_CODES[self.verdict]


def health(
    metrics: Metrics | Sequence[Metrics],
    config: RolloutCorrectionConfig | None = None,
    *,
    series: Sequence[Metrics] = (),
    diffusion: bool = False,
    null: Noise | None = None,
    judged_against: str | None = None,
) -> HealthReport:
    """Judge the metrics of a batch, of a run, or of a log against their healthy ranges.

    Args:
        metrics: a dictionary of metrics, or a series with a dictionary per step ("step" is its number; by default they
            count from 1). Names may have the prefix `rollout_corr/`, `actor/rollout_corr/` or `mismatch/`.
        config: the configuration that produced the metrics; the rules about thresholds need it. Defaults to `None`.
        series: the steps behind a single dictionary in `metrics`, for the rules that need a history; empty by default.
        diffusion: judge a diffusion sampler: run its rules, and treat log-probs as densities. Defaults to False.
        null: noise of two equal policies, from a null, as the reference of the weights; defaults to `None`.
        judged_against: reference of the weights if the caller judges them itself, or "" without a reference. By default
            the null or the first steps judge them, and the report lists the parts that were not judged.

    Returns:
        The report. Steps without a valid token (`token_count` 0) are never compared with a range.
    """
    evidence = evidence_of(metrics, config, series=series, diffusion=diffusion, null=null)
    return report_of(evidence, judge(evidence), judged_against)


def evidence_of(
    metrics: Metrics | Sequence[Metrics],
    config: RolloutCorrectionConfig | None = None,
    *,
    series: Sequence[Metrics] = (),
    diffusion: bool = False,
    null: Noise | None = None,
) -> Evidence:
    """Collect the evidence of a verdict; arguments and defaults are as in `health`."""
    if isinstance(metrics, Mapping):
        history, current = history_of(series), bare_metrics(metrics)
    else:
        history = history_of(metrics)
        current = recent_medians(history)
    watch = SeriesWatch()
    for step, values in history:
        watch.add(step, values)
    return Evidence(
        current=current,
        history=history,
        config=config,
        diffusion=diffusion,
        changes=rises_of_pictures(history, watch.changes) if diffusion else watch.changes,
        noise=null,
        first=history[0] if history else None,
    )


def report_of(evidence: Evidence, findings: Sequence[Finding], judged_against: str | None = None) -> HealthReport:
    """Return the report of resolved findings; `judged_against` is as in `health`."""
    against, not_judged = unjudged(evidence, judged_against)
    if any(finding.severity != "note" for finding in findings):
        not_judged = tuple(sentence for sentence in not_judged if sentence != DRAWS_NOT_JUDGED)
    expected, ranges, expected_from = _expected(evidence)
    return HealthReport(
        findings=unfolded(findings),
        values=evidence.current,
        steps=len(evidence.history) if evidence.history else None,
        diffusion=evidence.diffusion,
        judged_against=against,
        not_judged=not_judged,
        expected={name: value for name, value in expected.items() if name not in SIGNED},
        expected_ranges=ranges,
        expected_from=expected_from,
    )


def judge(evidence: Evidence, *, broken: Iterable[str] | None = None) -> tuple[Finding, ...]:
    """Return the resolved findings of the rules and ranges; arguments are as in `measured_findings`."""
    return resolve_findings(metrics=measured_findings(evidence, broken=broken), evidence=evidence)


def measured_findings(evidence: Evidence, *, broken: Iterable[str] | None = None) -> tuple[Finding, ...]:
    """Return the findings of the rules and ranges, before a resolver ranks them.

    Args:
        evidence: the numbers, and their history.
        broken: metrics outside their range, now or in the history, if the caller counts them; the default is to test
            every metric.
    """
    current, history = evidence.current, evidence.history
    rules = (*STEP_RULES, *DIFFUSION_RULES) if evidence.diffusion else RULES
    findings = [finding for rule in rules if (finding := rule(evidence)) is not None]

    # A rule is more specific about its metric than the range. Without a valid token ranges have no meaning.
    if evidence.measured:
        explained = {finding.metric for finding in findings}
        names = broken
        if names is None:
            names = dict.fromkeys([*current, *(name for _, step in history for name in step)])
        ranges = (_range_finding(name, evidence) for name in names if name not in explained)
        findings += [finding for finding in ranges if finding is not None]

    # With a single criterion the batch's rejection is that criterion's: keep the first of the two equal findings.
    distinct: dict[object, Finding] = {}
    for finding in findings:
        distinct.setdefault((finding.reason, finding.limit, finding.value), finding)
    return tuple(distinct.values())


def unjudged(
    evidence: Evidence, judged_against: str | None = None, *, counted: Mapping[str, float] | None = None
) -> tuple[str, tuple[str, ...]]:
    """Determine the reference of the weights, and the parts that could not be judged.

    Args:
        evidence: the numbers, and their history.
        judged_against: as in `health`.
        counted: `token_count` and `sequence_count` of the full run, if the history contains only its first steps;
            defaults to the history's counts.

    Returns:
        The reference, empty without one; and a sentence with the reason for each part that was not judged.
    """
    if not evidence.measured or not any(name in evidence.current for name in COMPARISON):
        what, keep = "token", ", keep response_mask true on sampled tokens"
        if evidence.diffusion:
            what, keep = "denoising step", ""
        return "", (
            f"nothing was measured: no valid {what} has log-probs of both policies; let the engine return log-probs"
            f"{keep}, and ask for a correction (the preset `measure` changes nothing in the loss)",
        )

    # A single step may be small, so count over the full history.
    sentences = []
    needed = [("sequence_count", "sequence", FEWEST_SEQUENCES), ("token_count", "token", FEWEST_TOKENS)]
    if evidence.diffusion:
        needed = [("sequence_count", "picture", FEWEST_SEQUENCES)]
    for name, what, fewest in needed:
        seen = sum(value for _, value in evidence.series(name)) or evidence.current.get(name, math.inf)
        seen = seen if counted is None else counted.get(name, seen)
        if seen < fewest:
            sentences.append(f"too little data: {seen:,.0f} {what}s, and {fewest} are needed")

    draws = () if evidence.sampling or evidence.diffusion else (DRAWS_NOT_JUDGED,)
    if judged_against is not None:
        return judged_against, (*sentences, *(draws if judged_against else ()))
    if evidence.noise is not None and evidence.noise.is_null:
        return evidence.noise.source, (*sentences, *draws)
    against, sentence = _compare_with_first_steps(evidence)
    return against, (*sentences, sentence)


def _compare_with_first_steps(evidence: Evidence) -> tuple[str, str]:
    """Use the first steps as the reference of the weights.

    Returns:
        The reference, empty if the first steps are not usable; and a sentence about the parts that were not judged.
    """
    steps = [step for step, _ in evidence.history]
    fix = _NULL_FIX
    lacking = "there is no null"
    if evidence.noise is not None:
        lacking = f"{evidence.noise.source} {evidence.noise.unusable or 'is no null'}"
    if evidence.diffusion and "exact_kl_mean" not in evidence.current:
        lacking, fix = "the exact KL is not recorded", _RECORD_EXACT_KL
    if not any(name in evidence.current for name in WATCHED):
        return "", f"weights not judged: no metric of the mismatch is there to compare, such as k3_kl; {fix}"
    if not steps:
        return "", f"weights not judged: {lacking}, and no series of steps to compare with; {fix}"
    if len(steps) < 2 * FIRST_STEPS:
        measured = "with a denoising step" if evidence.diffusion else "with a token"
        few = f"{len(steps)} steps {measured}, and {2 * FIRST_STEPS} are needed to compare with the first ones"
        return "", f"weights not judged: {lacking}, and there are {few}; {fix}"
    against = f"steps {steps[0]} to {steps[FIRST_STEPS - 1]} of this run"

    # Stale weights differ more than fresh ones, so first steps with several ages have no common baseline.
    mixed = ages_in_words(metrics[AGE] for _, metrics in evidence.history[:FIRST_STEPS] if AGE in metrics)
    if mixed and not evidence.changes:
        return "", f"weights not judged: {lacking}, and {against} {mixed}; {fix}"
    since = "" if evidence.changes else f"unchanged since steps {steps[0]} to {steps[FIRST_STEPS - 1]}; "
    why = f": {lacking}" if evidence.noise is not None and evidence.noise.unusable and not evidence.diffusion else ""
    return against, f"{since}the start was not judged{why}; {fix}"


def ages_in_words(ages: Iterable[float]) -> str:
    """Return a clause on why steps with these ages, in updates, have no common baseline; empty for equal ages."""
    rounded = {round(age) for age in ages}
    if len(rounded) < 2:
        return ""
    return f"have weights of {min(rounded)} to {max(rounded)} updates of age, so they are no one baseline"


def _expected(evidence: Evidence) -> tuple[dict[str, float], dict[str, tuple[float, float]], str]:
    """Compute the metrics that noise explains.

    Returns:
        Metric → its expected value; signed metric → its 95 % range; and a description of the noise, empty if it is not
        known.
    """
    exact = evidence.get("exact_kl_mean")
    if evidence.diffusion and not math.isnan(exact):
        words = f"an exact KL of {format_number(exact)} nats, at which J averages −KL"
        return expected_at(exact), range_at(exact, evidence.get("token_count")), words
    noise = None if evidence.diffusion else evidence.noise or _own_noise(evidence)
    if noise is None or math.isnan(noise.sigma):
        return {}, {}, ""
    words = f"noise of {format_number(noise.sigma)} nats per token, {noise.source}"
    ranges = ranges_from_noise(noise, evidence.current)
    return expected_from_noise(noise, evidence.current, evidence.config), ranges, words


def _own_noise(evidence: Evidence) -> Noise | None:
    """Return a token's noise from the first steps' log-ratios, else from this batch; `None` without either."""
    first = [spread for _, metrics in evidence.history[:FIRST_STEPS] if (spread := _spread_of(metrics)) is not None]
    if len(evidence.history) >= 2 * FIRST_STEPS and first:
        return Noise(sigma=median(first), source="as in the first steps of this run, which were not judged")
    spread = _spread_of(evidence.current)
    return None if spread is None else Noise(sigma=spread, source="as observed here; the noise itself was not judged")


def _spread_of(metrics: Mapping[str, float]) -> float | None:
    """Return σ of a token's log-ratio, nats: the measured one, else from k3 = σ²/2; `None` without both."""
    if "log_ratio_std" in metrics:
        return metrics["log_ratio_std"]
    k3 = metrics.get("k3_kl", 0.0)
    return math.sqrt(2 * k3) if k3 > 0 else None


@lru_cache(maxsize=1024)
def healthy_range(name: str) -> HealthyRange | None:
    """Return the registry's healthy range of a metric.

    Returns:
        The range; `None` if the metric is not in the registry or has no range.
    """
    try:
        return metric(name).healthy
    except KeyError:
        return None


def limit_in_words(limits: HealthyRange) -> str:
    """Return the warning limits of a range, e.g. "0.5 to 2" or "at most 0.1"; its ideal value if it never warns."""
    low, high = limits.warn_below, limits.warn_above
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if high == 0:
        return "0"
    if high is not None:
        return f"−{high:g} to {high:g}" if limits.absolute else f"at most {high:g}"
    return f"ideally {limits.ideal}" if low is None else f"at least {low:g}"


def is_broken(name: str, value: float) -> bool:
    """Return whether a value of a metric is outside its healthy range; False for a metric without a range."""
    limits = healthy_range(name)
    return limits is not None and limits.breached(value) is not None


def _range_finding(name: str, evidence: Evidence) -> Finding | None:
    """Return a finding if a metric is outside its range: a warning for its current value, a note if it recovered."""
    limits = healthy_range(name)
    if limits is not None and evidence.diffusion:
        unasked = name.endswith("masked_fraction") and not evidence.rejection_in_force
        limits = None if unasked else step_range(name, limits)
    if limits is None:
        return None

    def breaks(value: float) -> bool:
        return limits.breached(value) is not None

    # A limit of zero forbids any occurrence: a single recent step suffices.
    value = evidence.get(name)
    if limits.warn_above == 0:
        value = max([*evidence.recent(name), value])

    # A metric that has recovered is reported with its worst value, and the number of steps outside the range.
    when = evidence.when(name, breaks)
    broken_now = breaks(value)
    verb, since = "is", ""
    if not broken_now:
        earlier = [value for _, value in evidence.series(name) if breaks(value)]
        if not earlier:
            return None
        value = max(earlier, key=lambda x: abs(x - (limits.breached(x) or 0.0)))
        verb, since = "was", f" in {when['steps']} of {len(evidence.series(name))} steps"

    in_force = _in_force(name, evidence)
    side = "low" if limits.warn_below is not None and value < limits.warn_below else "high"
    direction = "too far from 0" if limits.absolute else f"too {side}"
    return replace(
        fault("out_of_range" if broken_now else "recovered").finding,
        metric=name,
        title=f"{label(name)} {verb} {direction}{since}",
        value=value,
        limit=limit_in_words(limits),
        reason=limits.reason if in_force else f"{limits.reason} (measured only: not in force here)",
        fix=limits.fix,
        severity="warning" if broken_now and in_force else "note",
        **when,
    )


def _in_force(name: str, evidence: Evidence) -> bool:
    """Return whether the weights or rejections that a range limits affect the loss; True for every other metric."""
    if name == "rollout_is_seq_max_deviation" and evidence.level in ("token", "horizon"):
        return False
    if name in _WEIGHT_METRICS:
        return evidence.weights_in_force
    if name.endswith("masked_fraction") or name == "rollout_is_veto_fraction":
        return evidence.rejection_in_force
    return True
