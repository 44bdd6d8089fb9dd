"""The metrics of a log: over all rows, which are judged, and of each step, which are its history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollcorr.core.metric_registry import finalize
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.trend import AGE
from rollcorr.diagnostics.log_check.tally import Part, Tally, merge_parts
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile
from rollcorr.diagnostics.null.null_file import FEW_TOKENS
from rollcorr.diagnostics.null.token_share import TokenSums
from rollcorr.diagnostics.null.version_cells import lag_metrics, lag_rows


@dataclass(frozen=True)
class LogMetrics:
    """The metrics of a log.

    Attributes:
        whole: over all rows, prefixed.
        steps: of each step, with "step", the reward and the age of the weights; empty where no step is recorded.
        ages: step → the mean age of the weights behind its tokens, by metric.
    """

    whole: Mapping[str, float]
    steps: tuple[Mapping[str, float], ...]
    ages: Mapping[int, Mapping[str, float]]

    @property
    def series(self) -> tuple[Mapping[str, float], ...]:
        """The steps; one entry without any."""
        return self.steps or ({"step": 0, **self.whole},)

    @property
    def history(self) -> tuple[Mapping[str, float], ...]:
        """The steps that rules over time read: one step has none."""
        return self.steps if len(self.steps) > 1 else ()


def log_metrics(tally: Tally) -> LogMetrics:
    """The metrics of a tally."""
    measured = metrics_of_parts(tally.parts, tally.profile, _ages(tally))
    lags = tally.versions.by_lag()
    if not lags:
        return measured
    steps = tuple({**step, **lag_metrics(lag_rows({0: lags.get(int(step["step"]), {})}))} for step in measured.steps)
    return replace(measured, whole={**measured.whole, **lag_metrics(lag_rows(lags))}, steps=steps)


def metrics_of_parts(
    parts: Mapping[int | None, Part], profile: MismatchProfile, ages: Mapping[int, Mapping[str, float]]
) -> LogMetrics:
    """The metrics of some rows, from their parts by step, their profile, and the ages of the steps."""
    whole = _metrics(merge_parts(parts.values()))
    whole.pop("log/token_id_share", None)  # of folded ids, as that of a step: limits are of exact ids
    whole |= _id_share(profile.ids)
    steps = sorted(step for step in parts if step is not None)
    return LogMetrics(
        whole, tuple({"step": step, **_metrics(parts[step]), **ages.get(step, {})} for step in steps), ages
    )


def _metrics(part: Part) -> dict[str, float]:
    """The metrics of a part: the registry's, the reward, and what was counted in the raw log-probs."""
    metrics = finalize(part.statistics.read())
    tokens = bare_metrics(metrics).get("token_count", 0.0)
    if part.rewards:
        metrics["reward/mean"] = part.reward / part.rewards
    metrics["log/zero_fraction"] = part.zeros / tokens if tokens else 0.0
    metrics["log/contradicted_zero_count"] = float(part.contradicted)
    metrics["log/positive_count"] = float(part.positive)
    return metrics | _id_share(part.ids)


def _id_share(ids: TokenSums) -> dict[str, float]:
    """The share of the token id; empty where there are no ids, or too few to tell."""
    share = ids.share()
    return {"log/token_id_share": share.share} if share.tokens >= FEW_TOKENS and not ids.repeats else {}


def _ages(tally: Tally) -> dict[int, dict[str, float]]:
    """Step → the mean age in versions of the weights behind its tokens; 0 for fresh ones."""
    return {step: {AGE: age} for step, _, age in tally.versions.by_step()}
