"""Input of a health check: current metrics, their history, and the configuration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rollcorr.config import Level, RolloutCorrectionConfig
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.trend import AGE, Change
from rollcorr.run_directory.metrics_file import StepStore

RECENT_STEPS = 10
"""Number of steps at the end of a series that decide its verdict."""
RISES = ("exact_kl_mean", "k3_kl", "log_ratio_std")
"""Metrics whose lasting rise is a rise of the mismatch; a finding shows the first one that rose."""
ABOVE_NULL = 3.0
"""Ratio of k3 to the null's k3 above which the two sides' weights differ."""
FIRST_STEP = 1
"""Largest number of the step before the first update: trainers count from 0 or from 1."""
SAME_ORDER = 0.1
"""Smallest ratio of the first step's k3 to the current k3 for the same cause to explain both."""
LEAST_K3 = 1e-9
"""k3, nats, that float32 rounding of the log-probs may cause."""

Metrics = Mapping[str, Any]

_PREFIXES = ("actor/rollout_corr/", "rollout_corr/", "mismatch/mismatch_", "mismatch/")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers to judge, their history, and the configuration behind them.

    Attributes:
        current: the numbers to judge, by bare name; NaN is excluded.
        history: (step, numbers by bare name) of every step with a valid token; empty by default: no series.
        config: the correction's configuration; defaults to `None`: not known.
        diffusion: the log-probs are densities of a diffusion sampler, not probabilities of tokens; False by default.
        changes: watched metric → its latest lasting rise; contains only metrics with a rise.
        noise: noise of a token, measured with the same policy on both sides; defaults to `None`: no null.
        differed: the policies differed in an earlier step, which the history may no longer contain.
        sampling: the sampler's settings are recorded; the default is True. Without them, log-probs may agree on tokens
            that were drawn from a different distribution.
        first: (step, numbers by bare name) of the first step with a valid token; defaults to `None`: no series.
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
        """Return the level of the weights; without a configuration, "sequence" if a metric of this level is present."""
        if self.config is not None:
            return self.config.rollout_is
        return "sequence" if "rollout_is_log_max" in self.current else None

    @property
    def weights_in_force(self) -> bool:
        """Return whether weights reach the loss; True without a configuration."""
        return self.config is None or self.config.weights_reach_loss

    @property
    def sequences_in_force(self) -> bool:
        """Return whether sequence weights reach the loss."""
        return self.level == "sequence" and self.weights_in_force

    @property
    def rejection_in_force(self) -> bool:
        """Return whether a criterion or a veto rejects; True without a configuration.

        A veto is only measured if the weights are only measured.
        """
        if self.config is None or self.config.criteria:
            return True
        measured_only = self.config.rollout_is is not None and not self.config.apply_is
        return self.config.rollout_token_veto_threshold is not None and not measured_only

    @property
    def or_leave_bypass(self) -> str:
        """Return the clause of a fix that suggests to leave bypass mode; empty if that mode is off."""
        if self.config is None:
            return ", or leave bypass mode if it is on"
        return ", or leave bypass mode" if self.config.bypass_mode else ""

    @property
    def measured(self) -> bool:
        """Return whether there was any valid token: without one the numbers have no meaning."""
        return self.current.get("token_count", 1.0) > 0

    @property
    def rise(self) -> tuple[str, Change] | None:
        """Return the latest lasting rise of the mismatch with its metric; the exact KL counts only for diffusion."""
        names = RISES if self.diffusion else RISES[1:]
        return next(((name, self.changes[name]) for name in names if name in self.changes), None)

    @property
    def null_k3(self) -> float:
        """Return the null's k3, nats, at least `LEAST_K3`; NaN without a null."""
        return math.nan if self.noise is None else max(self.noise.mean_k3, LEAST_K3)

    @property
    def start_k3(self) -> float:
        """Return k3 of the step before the first update, nats; NaN if that step is not recorded."""
        recorded = self.first[1] if self.first is not None and self.first[0] <= FIRST_STEP else {}
        return recorded.get("k3_kl", math.nan)

    @property
    def starts_in_excess(self) -> bool:
        """Return whether k3 was several times the null's before the first update, so before any weight sync."""
        return self.start_k3 >= ABOVE_NULL * self.null_k3

    @property
    def differs_from_start(self) -> bool:
        """Return whether the first step's excess has the order of the current k3, so the same cause explains both."""
        return self.starts_in_excess and self.start_k3 >= SAME_ORDER * self.get("k3_kl")

    @property
    def is_fresh_on_record(self) -> bool:
        """Return whether an age of the weights is recorded, and is 0 at every step."""
        ages = [age for _, age in self.series(AGE)]
        return bool(ages) and not any(ages)

    def get(self, name: str) -> float:
        """Return the current value of a metric; by default NaN, which breaks no limit."""
        return self.current.get(name, math.nan)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of every step that measured this metric."""
        return [(step, metrics[name]) for step, metrics in self.history if name in metrics]

    def recent(self, name: str) -> list[float]:
        """Return a metric's values in the recent steps; without a series, only the current value."""
        recent_steps = self.history[-RECENT_STEPS:] or [(0, self.current)]
        return [metrics[name] for _, metrics in recent_steps if name in metrics]

    def when(self, name: str, breaks: Callable[[float], bool]) -> dict[str, Any]:
        """Return the first step at which a metric broke a rule, and the number of such steps.

        Args:
            name: bare name of the metric.
            breaks: returns whether a value breaks the rule.

        Returns:
            The fields `first_step` and `steps` of a finding; both are `None` without a series.
        """
        if not self.history:
            return {"first_step": None, "steps": None}
        broken = [step for step, value in self.series(name) if breaks(value)]
        return {"first_step": broken[0] if broken else None, "steps": len(broken)}


def bare_metrics(metrics: Metrics) -> dict[str, float]:
    """Return the metrics by bare name, without prefixes; NaN and values that are not numbers are excluded."""
    return {
        _bare_name(key): float(value)
        for key, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    }


@lru_cache(maxsize=4096)
def _bare_name(name: str) -> str:
    return name.removeprefix(next((prefix for prefix in _PREFIXES if name.startswith(prefix)), ""))


def history_of(series: Sequence[Metrics]) -> list[tuple[int, Mapping[str, float]]]:
    """Return (step, bare metrics) of the steps with a valid token.

    Args:
        series: metrics of each step; "step" is its number, by default its position counted from 1.
    """
    store, history = StepStore(), list[tuple[int, Mapping[str, float]]]()
    for index, metrics in enumerate(series, start=1):
        bare = bare_metrics(metrics)
        if bare.get("token_count", 1.0) > 0:
            history.append((int(metrics.get("step", index)), store.add(bare)))
    return history


def recent_medians(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Compute the median of each metric over the recent steps."""
    recent = [metrics for _, metrics in history[-RECENT_STEPS:]]
    names = dict.fromkeys(name for metrics in recent for name in metrics if name != "step")
    return {name: statistics.median(m[name] for m in recent if name in m) for name in names}
