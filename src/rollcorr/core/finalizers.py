"""Finalizers: how merged rows of statistics become one number. For an empty sample each gives 0, never a NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rollcorr.core.histograms import BINS, quantile
from rollcorr.core.host_statistics import kish_sample_size, population_std

Numbers = list[float]
"""The numbers of all rows, one after the other: `HostStatistics.numbers`."""

MEAN, M2 = 1, 2
"""Places in a row of moments, which begins with the count."""


@dataclass(frozen=True)
class Finalizer:
    """A number made from rows of merged statistics.

    The places of its rows are the same at every step of a run, so it is told them once, and then reads numbers.

    Attributes:
        rows: the rows it reads, each as "kind:name" with kind sums, moments, extremes, histograms or tops.
        at: where each of these rows begins → a function that makes the metric from the numbers of all rows.
        description: the arithmetic in words, e.g. "mean of log_ratio".
    """

    rows: tuple[str, ...]
    at: Callable[..., Callable[[Numbers], float]]
    description: str


def total(name: str) -> Finalizer:
    """The sum itself."""
    return Finalizer((f"sums:{name}",), lambda row: lambda x: x[row], f"sum {name}")


def share(numerator: str, denominator: str) -> Finalizer:
    """sums[numerator] / sums[denominator]; 0 when there is nothing to divide by."""
    return Finalizer(
        (f"sums:{numerator}", f"sums:{denominator}"),
        lambda above, below: lambda x: x[above] / x[below] if x[below] else 0.0,
        f"sum {numerator} / sum {denominator}",
    )


def complement_share(numerator: str, denominator: str) -> Finalizer:
    """1 − sums[numerator] / sums[denominator]; 0 when there is nothing to divide by."""
    return Finalizer(
        (f"sums:{numerator}", f"sums:{denominator}"),
        lambda above, below: lambda x: (x[below] - x[above]) / x[below] if x[below] else 0.0,
        f"1 − sum {numerator} / sum {denominator}",
    )


def exp_share(numerator: str, denominator: str) -> Finalizer:
    """exp(sums[numerator] / sums[denominator]): a geometric mean; 0 when there is nothing to average."""
    inner = share(numerator, denominator)
    return Finalizer(
        inner.rows,
        lambda above, below: lambda x: _exp(x[above] / x[below]) if x[below] else 0.0,
        f"exp({inner.description})",
    )


def mean(name: str, *, scale: float = 1.0) -> Finalizer:
    """The mean of a sample."""
    return Finalizer((f"moments:{name}",), lambda row: lambda x: scale * x[row + MEAN] or 0.0, f"mean of {name}")


def std(name: str) -> Finalizer:
    """The population standard deviation of a sample."""
    return Finalizer(
        (f"moments:{name}",),
        lambda row: lambda x: population_std(x[row], x[row + M2]),
        f"population std of {name}",
    )


def effective_sample_size(name: str) -> Finalizer:
    """(Σ w)² / (n Σ w²)."""
    return Finalizer(
        (f"moments:{name}",),
        lambda row: lambda x: kish_sample_size(*x[row : row + 3]),
        f"(Σ w)² / (n Σ w²) of {name}",
    )


def lowest(name: str) -> Finalizer:
    """The minimum of a sample; of an empty one the minimum is above the maximum."""
    return Finalizer(
        (f"extremes:{name}",), lambda low: lambda x: x[low] if x[low] <= x[low + 1] else 0.0, f"min of {name}"
    )


def highest(name: str) -> Finalizer:
    """The maximum of a sample."""
    return Finalizer(
        (f"extremes:{name}",), lambda low: lambda x: x[low + 1] if x[low] <= x[low + 1] else 0.0, f"max of {name}"
    )


def farthest(name: str, *, center: float = 0.0) -> Finalizer:
    """max |x − center| of a sample, from its two extremes."""
    return Finalizer(
        (f"extremes:{name}",),
        lambda low: lambda x: max(center - x[low], x[low + 1] - center) if x[low] <= x[low + 1] else 0.0,
        f"max |{name} − {center:g}|" if center else f"max |{name}|",
    )


def quantile_of(name: str, q: float, *, absolute: bool = False) -> Finalizer:
    """A quantile of a sample, or of its absolute values, off by at most 1/65 of itself."""
    of = f"|{name}|" if absolute else name
    return Finalizer(
        (f"histograms:{name}",),
        lambda row: lambda x: quantile(x[row : row + BINS], q, absolute=absolute),
        f"{q:g} quantile of {of}",
    )


def length_times_kl() -> Finalizer:
    """Mean response length × KL: the typical −log of a sequence weight (T × KL)."""
    return Finalizer(
        ("moments:log_ratio", "sums:tokens", "sums:sequences"),
        lambda log_ratio, tokens, sequences: (
            lambda x: -x[log_ratio + MEAN] * x[tokens] / x[sequences] if x[sequences] else 0.0
        ),
        "mean length × kl",
    )


LONGEST = 1e9
"""Tokens: what `max_viable_length` says where no length is too long. JSON has no infinity."""


def viable_length() -> Finalizer:
    """min(safety_bound / KL, 1e9), in tokens; 1e9 when KL ≤ 0. The bound travels as an extreme: it merges to itself."""

    def at(log_ratio: int, safety_bound: int) -> Callable[[Numbers], float]:
        def compute(x: Numbers) -> float:
            if not x[log_ratio]:
                return 0.0
            kl, bound = -x[log_ratio + MEAN], x[safety_bound + 1]
            return bound / kl if kl > bound / LONGEST else LONGEST

        return compute

    return Finalizer(("moments:log_ratio", "extremes:safety_bound"), at, "safety_bound / kl")


def _exp(x: float) -> float:
    return math.exp(x) if x < 709.0 else math.inf
