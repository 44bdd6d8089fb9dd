"""Finalizers: how merged rows of statistics become one number. For an empty sample each gives 0, never a NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rollcorr.core.histograms import quantile
from rollcorr.core.mergeable_statistics import HostStatistics


@dataclass(frozen=True)
class Finalizer:
    """A number made from rows of merged statistics.

    Attributes:
        rows: the rows it reads, each as "kind:name" with kind sums, moments, extremes, histograms or tops.
        compute: rows → number.
        description: the arithmetic in words, e.g. "mean of log_ratio".
    """

    rows: tuple[str, ...]
    compute: Callable[[HostStatistics], float]
    description: str


def total(name: str) -> Finalizer:
    """The sum itself."""
    return Finalizer((f"sums:{name}",), lambda s: s.sums[name], f"sum {name}")


def share(numerator: str, denominator: str, *, scale: float = 1.0) -> Finalizer:
    """sums[numerator] / sums[denominator]; 0 when there is nothing to divide by."""
    return Finalizer(
        (f"sums:{numerator}", f"sums:{denominator}"),
        lambda s: scale * s.sums[numerator] / s.sums[denominator] if s.sums[denominator] else 0.0,
        f"sum {numerator} / sum {denominator}",
    )


def complement_share(numerator: str, denominator: str) -> Finalizer:
    """1 − sums[numerator] / sums[denominator]; 0 when there is nothing to divide by."""
    return Finalizer(
        (f"sums:{numerator}", f"sums:{denominator}"),
        lambda s: (s.sums[denominator] - s.sums[numerator]) / s.sums[denominator] if s.sums[denominator] else 0.0,
        f"1 − sum {numerator} / sum {denominator}",
    )


def exp_share(numerator: str, denominator: str) -> Finalizer:
    """exp(sums[numerator] / sums[denominator]): a geometric mean; 0 when there is nothing to average."""
    inner = share(numerator, denominator)
    return Finalizer(
        inner.rows,
        lambda s: _exp(inner.compute(s)) if s.sums[denominator] else 0.0,
        f"exp({inner.description})",
    )


def mean(name: str, *, scale: float = 1.0) -> Finalizer:
    """The mean of a sample."""
    return Finalizer((f"moments:{name}",), lambda s: scale * s.moments[name].mean or 0.0, f"mean of {name}")


def std(name: str) -> Finalizer:
    """The population standard deviation of a sample."""
    return Finalizer((f"moments:{name}",), lambda s: s.moments[name].std, f"population std of {name}")


def effective_sample_size(name: str) -> Finalizer:
    """(Σ w)² / (n Σ w²)."""
    return Finalizer(
        (f"moments:{name}",), lambda s: s.moments[name].effective_sample_size, f"(Σ w)² / (n Σ w²) of {name}"
    )


def lowest(name: str) -> Finalizer:
    """The minimum of a sample."""
    return Finalizer((f"extremes:{name}",), lambda s: _seen(s, name, s.extremes[name].min), f"min of {name}")


def highest(name: str) -> Finalizer:
    """The maximum of a sample."""
    return Finalizer((f"extremes:{name}",), lambda s: _seen(s, name, s.extremes[name].max), f"max of {name}")


def farthest(name: str, *, center: float = 0.0) -> Finalizer:
    """max |x − center| of a sample, from its two extremes."""
    return Finalizer(
        (f"extremes:{name}",),
        lambda s: _seen(s, name, max(abs(end - center) for end in (s.extremes[name].min, s.extremes[name].max))),
        f"max |{name} − {center:g}|" if center else f"max |{name}|",
    )


def quantile_of(name: str, q: float, *, absolute: bool = False) -> Finalizer:
    """A quantile of a sample, or of its absolute values, off by at most 1/65 of itself."""
    of = f"|{name}|" if absolute else name
    return Finalizer(
        (f"histograms:{name}",),
        lambda s: quantile(s.histograms[name], q, absolute=absolute),
        f"{q:g} quantile of {of}",
    )


def length_times_kl() -> Finalizer:
    """Mean response length × KL: the typical −log of a sequence weight (T × KL)."""

    def compute(s: HostStatistics) -> float:
        sequences = s.sums["sequences"]
        return -s.moments["log_ratio"].mean * s.sums["tokens"] / sequences if sequences else 0.0

    return Finalizer(("moments:log_ratio", "sums:tokens", "sums:sequences"), compute, "mean length × kl")


LONGEST = 1e9
"""Tokens: what `max_viable_length` says where no length is too long. JSON has no infinity."""


def viable_length() -> Finalizer:
    """min(safety_bound / KL, 1e9), in tokens; 1e9 when KL ≤ 0. The bound travels as an extreme: it merges to itself."""

    def compute(s: HostStatistics) -> float:
        kl = -s.moments["log_ratio"].mean
        if not s.moments["log_ratio"].count:
            return 0.0
        bound = s.extremes["safety_bound"].max
        return bound / kl if kl > bound / LONGEST else LONGEST

    return Finalizer(("moments:log_ratio", "extremes:safety_bound"), compute, "safety_bound / kl")


def _seen(statistics: HostStatistics, name: str, value: float) -> float:
    extremes = statistics.extremes[name]
    return value if extremes.min <= extremes.max else 0.0


def _exp(x: float) -> float:
    return math.exp(x) if x < 709.0 else math.inf
