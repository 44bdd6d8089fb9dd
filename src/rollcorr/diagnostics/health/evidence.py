"""What a health check reads: metrics now, metrics over time, and the configuration behind them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rollcorr.config import Level, RolloutCorrectionConfig
from rollcorr.config.finding import Severity
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.trend import AGE, Change, SeriesWatch
from rollcorr.run_directory.metrics_file import StepStore

RECENT_STEPS = 10
"""Steps at the end of a series that decide its verdict."""
RISES = ("exact_kl_mean", "k3_kl", "log_ratio_std")
"""The metrics of which a lasting rise is one of the mismatch; the first one that rose is shown."""
ABOVE_NULL = 3.0
"""k3 over that of a null, above which the weights are not the same."""
FIRST_STEP = 1
"""Largest number of a step that no update came before: trainers count from 0 or from 1."""
SAME_ORDER = 0.1
"""Share of today's k3 that the first step must have had, for the same cause to make both."""
LEAST_K3 = 1e-9
"""k3 in nats that float32 rounding of the log-probs alone may cause."""

Metrics = Mapping[str, Any]

_PREFIXES = ("actor/rollout_corr/", "rollout_corr/", "mismatch/mismatch_", "mismatch/")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers to judge, their history, and the configuration behind them.

    Attributes:
        current: the numbers to judge, by bare name. NaN is left out.
        history: (step, numbers by bare name) of every step that measured anything; empty without a series.
        config: the correction's configuration, when known.
        diffusion: the log-probs are densities of a diffusion sampler, not probabilities of tokens.
        changes: metric → its latest lasting rise, of those that were watched and had one.
        noise: the noise of a token, measured where both policies were the same; None without such a null.
        differed: the policies differed in an earlier step, which the history may no longer hold.
        sampling: the sampler's settings are recorded. Without them, log-probs may agree on tokens that were drawn from
            another distribution.
        first: (step, numbers by bare name) of the first step that measured anything; None without a series.
    """

    current: Mapping[str, float]
    history: Sequence[tuple[int, Mapping[str, float]]] = ()
    config: RolloutCorrectionConfig | None = None
    diffusion: bool = False
    changes: Mapping[str, Change] = field(default_factory=dict)
    noise: Noise | None = None
    differed: bool = False
    first: tuple[int, Mapping[str, float]] | None = None
    sampling: bool = True

    @property
    def level(self) -> Level | None:
        """The level of the weights. Without a configuration, a metric of theirs tells weights of sequences."""
        if self.config is not None:
            return self.config.rollout_is
        return "sequence" if "rollout_is_log_max" in self.current else None

    @property
    def weights_in_force(self) -> bool:
        """Whether weights reach the loss; without a configuration they may."""
        return self.config is None or self.config.weights_reach_loss

    @property
    def severity_of_weights(self) -> Severity:
        """A limit on weights warns where they reach the loss."""
        return "warning" if self.weights_in_force else "note"

    @property
    def sequences_in_force(self) -> bool:
        """Whether weights of whole sequences reach the loss."""
        return self.level == "sequence" and self.weights_in_force

    @property
    def rejection_in_force(self) -> bool:
        """Whether anything rejects. A veto beside weights that are only measured is only measured too."""
        if self.config is None or self.config.criteria:
            return True
        measured_only = self.config.rollout_is is not None and not self.config.apply_is
        return self.config.rollout_token_veto_threshold is not None and not measured_only

    @property
    def or_leave_bypass(self) -> str:
        """What ends a fix that leaving bypass mode would be too: nothing where that mode is off."""
        if self.config is None:
            return ", or leave bypass mode if it is on"
        return ", or leave bypass mode" if self.config.bypass_mode else ""

    @property
    def measured(self) -> bool:
        """Whether there was any valid token: without one no number means anything."""
        return self.current.get("token_count", 1.0) > 0

    @property
    def rise(self) -> Change | None:
        """The latest lasting rise of the mismatch; None without one."""
        return None if self.risen is None else self.changes[self.risen]

    @property
    def risen(self) -> str | None:
        """The metric of that rise; the exact KL of pictures counts only where they are judged as such."""
        names = RISES if self.diffusion else RISES[1:]
        return next((name for name in names if name in self.changes), None)

    @property
    def null_k3(self) -> float:
        """k3 of the null, nats, at least that of rounding; NaN without a null."""
        return math.nan if self.noise is None else max(self.noise.mean_k3, LEAST_K3)

    @property
    def start_k3(self) -> float:
        """k3 of the step that no update came before, nats; NaN if that step is not recorded."""
        if self.first is None or self.first[0] > FIRST_STEP:
            return math.nan
        return self.first[1].get("k3_kl", math.nan)

    @property
    def starts_in_excess(self) -> bool:
        """Whether k3 was several times the null's before the first update: no weight sync can have failed by then."""
        return self.start_k3 >= ABOVE_NULL * self.null_k3

    @property
    def differs_from_start(self) -> bool:
        """Whether the cause of that excess makes today's as well: it is of the same order."""
        return self.starts_in_excess and self.start_k3 >= SAME_ORDER * self.get("k3_kl")

    @property
    def is_fresh_on_record(self) -> bool:
        """Whether an age of the weights is recorded, and is 0 at every step."""
        ages = [age for _, age in self.series(AGE)]
        return bool(ages) and not any(ages)

    def get(self, name: str) -> float:
        """The current value; NaN, which breaks no limit, when it was not measured."""
        return self.current.get(name, math.nan)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that measured it."""
        return [(step, metrics[name]) for step, metrics in self.history if name in metrics]

    def recent(self, name: str) -> list[float]:
        """Its values in the recent steps; without a series, the current value alone."""
        recent_steps = self.history[-RECENT_STEPS:] or [(0, self.current)]
        return [metrics[name] for _, metrics in recent_steps if name in metrics]

    def when(self, name: str, breaks: Callable[[float], bool]) -> dict[str, Any]:
        """When the metric first broke a rule, and in how many steps: fields of a finding."""
        if not self.history:
            return {"first_step": None, "steps": None}
        broken = [step for step, value in self.series(name) if breaks(value)]
        return {"first_step": broken[0] if broken else None, "steps": len(broken)}


def bare_metrics(metrics: Metrics) -> dict[str, float]:
    """Metrics by bare name: prefixes cut, NaN and what is not a number left out."""
    return {
        _bare_name(key): float(value)
        for key, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    }


@lru_cache(maxsize=4096)
def _bare_name(name: str) -> str:
    return name.removeprefix(next((prefix for prefix in _PREFIXES if name.startswith(prefix)), ""))


def history_of(series: Sequence[Metrics]) -> list[tuple[int, Mapping[str, float]]]:
    """(step, bare metrics) of the steps that measured a token; steps without a number count from 1."""
    store, history = StepStore(), list[tuple[int, Mapping[str, float]]]()
    for index, metrics in enumerate(series, start=1):
        bare = bare_metrics(metrics)
        if bare.get("token_count", 1.0) > 0:
            history.append((int(metrics.get("step", index)), store.add(bare)))
    return history


def changes_in(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Change]:
    """Metric → its latest lasting rise over a series."""
    watch = SeriesWatch()
    for step, metrics in history:
        watch.add(step, metrics)
    return watch.changes


def recent_medians(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The median of each metric over the recent steps."""
    recent = [metrics for _, metrics in history[-RECENT_STEPS:]]
    names = dict.fromkeys(name for metrics in recent for name in metrics if name != "step")
    return {name: statistics.median(m[name] for m in recent if name in m) for name in names}
