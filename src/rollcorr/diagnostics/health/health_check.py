"""The health check: which metrics left their healthy range, why that matters and what to do.

Findings come from two places. The ranges of single metrics are the registry's (`rollcorr.core.metric_registry`).
Judgments that need more than one number are the named functions of `rollcorr.diagnostics.health.rules`.

One dictionary of metrics is judged as it stands. A series (one dictionary per step) is judged by its recent steps: the
median of the last ten that measured anything, so that one spike is not a verdict; what was wrong earlier and is no
longer becomes a note. Limits are exclusive: a value at its limit is healthy (T × KL alone warns at the bound itself).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.finding import Finding, HasFindings
from rollcorr.core.health_ranges import HealthyRange
from rollcorr.core.metric_registry import metric
from rollcorr.diagnostics.health.diffusion_rules import DIFFUSION_RULES
from rollcorr.diagnostics.health.evidence import Evidence, Metrics, bare_metrics, history_of, recent_medians
from rollcorr.diagnostics.health.rules import RULES
from rollcorr.diagnostics.numbers import label

__all__ = ["Finding", "HealthReport", "health", "healthy_range", "is_broken", "judge", "limit_in_words"]


Verdict = Literal["healthy", "unhealthy", "not judged"]

EXIT_CODES: Mapping[Verdict, int] = {"healthy": 0, "unhealthy": 1, "not judged": 3}


@dataclass(frozen=True, kw_only=True)
class HealthReport(HasFindings):
    """The verdict and everything that led to it.

    Attributes:
        findings: warnings first, then notes.
        values: the numbers that were judged, by bare metric name.
        steps: how many steps of a series were measured; None when there was no series.
        judged_against: what the mismatch was compared with, e.g. "null.json" or "steps 1 to 5 of this run".
        not_judged: what could not be judged, and why: a sentence each. A report with such a sentence and without a
            warning is "not judged", never "healthy".
    """

    findings: tuple[Finding, ...]
    values: Mapping[str, float] = field(repr=False)
    steps: int | None = None
    judged_against: str = ""
    not_judged: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Everything was judged, and no warning was found."""
        return self.verdict == "healthy"

    @property
    def verdict(self) -> Verdict:
        """An error or a warning makes it unhealthy; without one, what could not be judged keeps it from healthy."""
        if self.errors or self.warnings:
            return "unhealthy"
        return "not judged" if self.not_judged else "healthy"

    @property
    def exit_code(self) -> int:
        """The exit code of the commands that print the verdict (2 is bad input, 130 is interrupted)."""
        return EXIT_CODES[self.verdict]


def health(
    metrics: Metrics | Sequence[Metrics],
    config: RolloutCorrectionConfig | None = None,
    *,
    series: Sequence[Metrics] = (),
    diffusion: bool = False,
) -> HealthReport:
    """Judge the metrics of a batch, of a run, or of a log against their healthy ranges.

    Args:
        metrics: one dictionary of metrics, or a series with one per step ("step" in each; else they count from 1).
            Names may carry `rollout_corr/`, `actor/rollout_corr/` or `mismatch/`, or none.
        config: the configuration that made them; the rules about thresholds need it.
        series: with one dictionary in `metrics`: the steps behind it, for the rules that need a history.
        diffusion: judge as a diffusion sampler's: its rules warn, and positive log-probs are densities.

    Returns:
        The report. Steps without a valid token (`token_count` 0) are never held against a range.
    """
    if isinstance(metrics, Mapping):
        history, current = history_of(series), bare_metrics(metrics)
    else:
        history = history_of(metrics)
        current = recent_medians(history)
    return judge(Evidence(current=current, history=history, config=config, diffusion=diffusion))


def judge(evidence: Evidence, *, broken: Iterable[str] | None = None) -> HealthReport:
    """The rules and ranges, over evidence that is collected already: what `health` does with metrics.

    Args:
        evidence: the numbers, and their history.
        broken: the metrics that are outside their range, now or in the history, where the caller keeps count of them.
            None: every metric is looked at.
    """
    current, history = evidence.current, evidence.history
    rules = (*RULES, *DIFFUSION_RULES) if evidence.diffusion else RULES
    findings = [finding for rule in rules if (finding := rule(evidence)) is not None]

    # A rule says more about its metric than the range does. Without a valid token no range means anything.
    if evidence.measured:
        explained = {finding.metric for finding in findings}
        names = broken
        if names is None:
            names = dict.fromkeys([*current, *(name for _, step in history for name in step)])
        ranges = (_range_finding(name, evidence) for name in names if name not in explained)
        findings += [finding for finding in ranges if finding is not None]

    # A batch with one criterion rejects what that criterion rejects: the same finding twice. The first one stays.
    distinct: dict[object, Finding] = {}
    for finding in findings:
        distinct.setdefault((finding.reason, finding.limit, finding.value), finding)
    ordered = sorted(distinct.values(), key=lambda finding: finding.severity == "note")
    return HealthReport(findings=tuple(ordered), values=current, steps=len(history) if history else None)


@lru_cache(maxsize=1024)
def healthy_range(name: str) -> HealthyRange | None:
    """The registry's healthy range of a metric; None when it has none or is no metric of the registry."""
    try:
        return metric(name).healthy
    except KeyError:
        return None


def limit_in_words(limits: HealthyRange) -> str:
    """The warning limits of a range, e.g. "0.5 to 2" or "at most 0.1"; the ideal when it never warns."""
    low, high = limits.warn_below, limits.warn_above
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if high == 0:
        return "0"
    if high is not None:
        return f"−{high:g} to {high:g}" if limits.absolute else f"at most {high:g}"
    if low is not None:
        return f"at least {low:g}"
    return f"ideally {limits.ideal}"


def is_broken(name: str, value: float) -> bool:
    """Whether a value of a metric is outside its healthy range; False where the metric has none."""
    limits = healthy_range(name)
    return limits is not None and _breached(limits, value) is not None


def _range_finding(name: str, evidence: Evidence) -> Finding | None:
    """A metric outside its range: a warning when it is so now, a note when it has recovered."""
    limits = healthy_range(name)
    if limits is None:
        return None

    def breaks(value: float) -> bool:
        return _breached(limits, value) is not None

    # A limit of zero forbids any occurrence: one of the recent steps is enough.
    value = evidence.get(name)
    if limits.warn_above == 0:
        value = max([*evidence.recent(name), value])

    # What has recovered is shown by its worst value, and in how many steps it was wrong.
    when = evidence.when(name, breaks)
    broken_now = breaks(value)
    verb, since = "is", ""
    if not broken_now:
        earlier = [value for _, value in evidence.series(name) if breaks(value)]
        if not earlier:
            return None
        value = max(earlier, key=lambda x: abs(x - (_breached(limits, x) or 0.0)))
        verb, since = "was", f" in {when['steps']} of {len(evidence.series(name))} steps"

    return Finding(
        code="out_of_range",
        metric=name,
        title=f"{label(name)} {verb} {_where(limits, value)}{since}",
        value=value,
        limit=limit_in_words(limits),
        reason=limits.reason,
        fix=limits.fix,
        severity="warning" if broken_now else "note",
        **when,
    )


def _where(limits: HealthyRange, value: float) -> str:
    if limits.absolute:
        return "too far from 0"
    return "too low" if limits.warn_below is not None and value < limits.warn_below else "too high"


def _breached(limits: HealthyRange, value: float) -> float | None:
    """As `HealthyRange.breached`, at six digits: a float32 weight truncated at 2 may read 2.0000002."""
    return limits.breached(float(f"{value:.6g}"))
