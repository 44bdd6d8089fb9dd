"""The health check: which metrics left their healthy range, why that matters and what to do.

Findings come from two places. The ranges of single metrics are the registry's (`rollcorr.core.metric_registry`).
Judgments that need more than one number are the named functions of `rollcorr.diagnostics.health.rules`.

One dictionary of metrics is judged as it stands. A series (one dictionary a step) is judged by its recent steps: the
median of the last ten that measured anything, so that one spike is not a verdict; what was wrong earlier and is no
longer becomes a note. Limits are exclusive: a value at its limit is healthy (T × KL alone warns at the bound itself).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rollcorr.core.health_ranges import HealthyRange
from rollcorr.core.metric_registry import metric
from rollcorr.diagnostics.health.evidence import Evidence, Finding, Metrics, bare_metrics, history_of, recent_medians
from rollcorr.diagnostics.health.rules import RULES
from rollcorr.diagnostics.numbers import label

if TYPE_CHECKING:
    from rollcorr.config import RolloutCorrectionConfig

__all__ = ["Finding", "HealthReport", "health", "healthy_range", "limit_in_words"]


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """The verdict and everything that led to it.

    Attributes:
        findings: warnings first, then notes.
        values: the numbers that were judged, by bare metric name.
        steps: how many steps of a series were measured; None when there was no series.
    """

    findings: tuple[Finding, ...]
    values: Mapping[str, float] = field(repr=False)
    steps: int | None = None

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that make the verdict."""
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that do not."""
        return tuple(f for f in self.findings if f.severity == "note")

    @property
    def healthy(self) -> bool:
        """No warning was found."""
        return not self.warnings

    @property
    def verdict(self) -> Literal["healthy", "findings"]:
        """The judgement in one word."""
        return "healthy" if self.healthy else "findings"


def health(
    metrics: Metrics | Sequence[Metrics],
    config: RolloutCorrectionConfig | None = None,
    *,
    series: Sequence[Metrics] = (),
    diffusion: bool = False,
) -> HealthReport:
    """Judge the metrics of a batch, of a run, or of a log against their healthy ranges.

    Args:
        metrics: one dictionary of metrics, or a series with one a step ("step" in each; else they count from 1).
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
    evidence = Evidence(current=current, history=history, config=config, diffusion=diffusion)
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    if evidence.measured:
        explained = {finding.metric for finding in found}
        names = dict.fromkeys([*current, *(name for _, step in history for name in step)])
        ranges = (_range_finding(name, evidence) for name in names if name not in explained)
        found += [finding for finding in ranges if finding is not None]
    # A batch with one criterion rejects what that criterion rejects: the same finding twice.
    found = list({(finding.reason, finding.limit, finding.value): finding for finding in reversed(found)}.values())[
        ::-1
    ]
    found.sort(key=lambda finding: finding.severity == "note")
    return HealthReport(findings=tuple(found), values=current, steps=len(history) if history else None)


def healthy_range(name: str) -> HealthyRange | None:
    """The registry's healthy range of a metric; None when it has none or is no metric of the registry."""
    try:
        return metric(name).healthy
    except KeyError:
        return None


def limit_in_words(limits: HealthyRange) -> str:
    """The warning limits of a range, e.g. "0.5 to 2" or "at most 0.1"; the ideal when it never warns."""
    if limits.warn_below is not None and limits.warn_above is not None:
        return f"{limits.warn_below:g} to {limits.warn_above:g}"
    if limits.warn_above == 0:
        return "0"
    if limits.warn_above is not None:
        return (
            f"−{limits.warn_above:g} to {limits.warn_above:g}" if limits.absolute else f"at most {limits.warn_above:g}"
        )
    if limits.warn_below is not None:
        return f"at least {limits.warn_below:g}"
    return f"ideally {limits.ideal}"


def _range_finding(name: str, evidence: Evidence) -> Finding | None:
    """A metric outside its range: a warning when it is so now, a note when it has recovered."""
    limits = healthy_range(name)
    if limits is None:
        return None

    def breaks(value: float) -> bool:
        return _breached(limits, value) is not None

    value = evidence.get(name)
    if limits.warn_above == 0:  # A limit of zero forbids any occurrence: one of the recent steps is enough.
        value = max([*evidence.recent(name), value])
    broken_now = breaks(value)
    if not broken_now:
        earlier = [value for _, value in evidence.series(name) if breaks(value)]
        if not earlier:
            return None
        value = max(earlier, key=lambda x: abs(x - (_breached(limits, x) or 0.0)))
    when = evidence.when(name, breaks)
    return Finding(
        metric=name,
        title=f"{label(name)} {'is' if broken_now else 'was'} {_where(limits, value)}"
        + ("" if broken_now else f" in {when['steps']} of {len(evidence.series(name))} steps"),
        value=value,
        limit=limit_in_words(limits),
        reason=limits.reason,
        remedy=limits.remedy,
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
