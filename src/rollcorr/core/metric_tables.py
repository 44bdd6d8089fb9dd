"""Definition of a metric: its arithmetic and its type, and the metrics of rejection criteria and denoising steps.

A finalizer computes one number from merged rows of statistics. For an empty sample it returns 0, never NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollcorr.core.detail_rows import BINS, quantile
from rollcorr.core.health_ranges import CRITERION_RANGES, HealthyRange
from rollcorr.core.host_statistics import HostStatistics, kish_sample_size, population_std

Numbers = list[float]
"""The numbers of all rows, one after the other: `HostStatistics.numbers`."""

MEAN, M2, HIGHEST = 1, 2, 1
"""Places in a row of moments, which begins with the count, and in a row of extremes, which begins with the lowest."""


@dataclass(frozen=True)
class Finalizer:
    """Computation of one number from rows of merged statistics.

    The positions of its rows are the same at every step of a run, so `at` binds them once.

    Attributes:
        rows: the rows it reads, each as "kind:name" with kind sums, moments, extremes, histograms or tops.
        at: start positions of these rows → a function that computes the metric from the numbers of all rows.
        description: the arithmetic in words, e.g. "mean of log_ratio".
    """

    rows: tuple[str, ...]
    at: Callable[..., Callable[[Numbers], float]]
    description: str


def total(name: str) -> Finalizer:
    """Return the sum itself."""
    return Finalizer((f"sums:{name}",), lambda row: lambda x: x[row], f"sum {name}")


def share(numerator: str, denominator: str) -> Finalizer:
    """Compute sums[numerator] / sums[denominator]; 0 if the denominator is 0."""
    return Finalizer(
        (f"sums:{numerator}", f"sums:{denominator}"),
        lambda above, below: lambda x: x[above] / x[below] if x[below] else 0.0,
        f"sum {numerator} / sum {denominator}",
    )


def complement_share(numerator: str, denominator: str) -> Finalizer:
    """Compute 1 − sums[numerator] / sums[denominator]; 0 if the denominator is 0."""
    return Finalizer(
        (f"sums:{numerator}", f"sums:{denominator}"),
        lambda above, below: lambda x: (x[below] - x[above]) / x[below] if x[below] else 0.0,
        f"1 − sum {numerator} / sum {denominator}",
    )


def exp_share(numerator: str, denominator: str) -> Finalizer:
    """Compute exp(sums[numerator] / sums[denominator]): a geometric mean; 0 if the denominator is 0."""
    inner = share(numerator, denominator)
    return Finalizer(
        inner.rows,
        lambda above, below: lambda x: _exp_or_inf(x[above] / x[below]) if x[below] else 0.0,
        f"exp({inner.description})",
    )


def mean(name: str, *, scale: float = 1.0) -> Finalizer:
    """Return the mean of a sample."""
    return Finalizer((f"moments:{name}",), lambda row: lambda x: scale * x[row + MEAN] or 0.0, f"mean of {name}")


def std(name: str) -> Finalizer:
    """Return the population standard deviation of a sample."""
    return Finalizer(
        (f"moments:{name}",),
        lambda row: lambda x: population_std(x[row], x[row + M2]),
        f"population std of {name}",
    )


def effective_sample_size(name: str) -> Finalizer:
    """Compute (Σ w)² / (n Σ w²)."""
    return Finalizer(
        (f"moments:{name}",),
        lambda row: lambda x: kish_sample_size(*x[row : row + 3]),
        f"(Σ w)² / (n Σ w²) of {name}",
    )


def lowest(name: str) -> Finalizer:
    """Return the minimum of a sample; 0 for an empty sample, whose minimum is above its maximum."""
    return Finalizer(
        (f"extremes:{name}",), lambda low: lambda x: x[low] if x[low] <= x[low + 1] else 0.0, f"min of {name}"
    )


def highest(name: str) -> Finalizer:
    """Return the maximum of a sample."""
    return Finalizer(
        (f"extremes:{name}",), lambda low: lambda x: x[low + 1] if x[low] <= x[low + 1] else 0.0, f"max of {name}"
    )


def farthest(name: str, *, center: float = 0.0) -> Finalizer:
    """Compute max |x − center| of a sample, from its two extremes."""
    return Finalizer(
        (f"extremes:{name}",),
        lambda low: lambda x: max(center - x[low], x[low + 1] - center) if x[low] <= x[low + 1] else 0.0,
        f"max |{name} − {center:g}|" if center else f"max |{name}|",
    )


def quantile_of(name: str, q: float, *, absolute: bool = False) -> Finalizer:
    """Return a quantile of a sample, or of its absolute values, with a relative error of at most 1/65."""
    of = f"|{name}|" if absolute else name
    return Finalizer(
        (f"histograms:{name}",),
        lambda row: lambda x: quantile(x[row : row + BINS], q, absolute=absolute),
        f"{q:g} quantile of {of}",
    )


def length_times_kl() -> Finalizer:
    """Compute mean response length × KL: the typical −log of a sequence weight (T × KL)."""
    return Finalizer(
        ("moments:log_ratio", "sums:tokens", "sums:sequences"),
        lambda log_ratio, tokens, sequences: (
            lambda x: -x[log_ratio + MEAN] * x[tokens] / x[sequences] if x[sequences] else 0.0
        ),
        "mean length × kl",
    )


LONGEST = 1e9
"""Tokens: the value of `max_viable_length` if the length is unlimited. JSON has no infinity."""


def viable_length() -> Finalizer:
    """Compute min(safety_bound / KL, 1e9), in tokens; 1e9 if KL ≤ 0. The bound is stored as an extreme."""

    def at(log_ratio: int, safety_bound: int) -> Callable[[Numbers], float]:
        def compute(x: Numbers) -> float:
            if not x[log_ratio]:
                return 0.0
            kl, bound = -x[log_ratio + MEAN], x[safety_bound + HIGHEST]
            return bound / kl if kl > bound / LONGEST else LONGEST

        return compute

    return Finalizer(("moments:log_ratio", "extremes:safety_bound"), at, "safety_bound / kl")


def _exp_or_inf(x: float) -> float:
    return math.exp(x) if x < 709.0 else math.inf


MATHS = "Li (2025), rollout correction mathematics"
IS_GUIDE = "rollout importance sampling guide (2025-10)"
PRAXIS = "Fang & Khazi (2025), Mismatch Praxis"
OWN = "rollcorr"

# Samples to average over, by the symbols of docs/reference/notation.md: valid tokens, and sequences with one.
V, R = "tokens", "sequences"


@dataclass(frozen=True)
class Metric:
    """One metric of the registry.

    Attributes:
        name: bare name, without the prefix. For a criterion's metrics, it includes the criterion's name.
        unit: nats, tokens, sequences, ratio, probability, share or 1.
        sample: the averaged items: tokens, sequences, unit or batch.
        formula: the definition, in the symbols of docs/reference/notation.md.
        finalizer: its computation from merged statistics.
        source: origin of the definition.
        healthy: the healthy range; optional.
    """

    name: str
    unit: str
    sample: str
    formula: str
    finalizer: Finalizer
    source: str
    healthy: HealthyRange | None = None


MetricRow = tuple[str, str, str, str, Finalizer, str]
"""A line of a table of metrics: name, unit, sample, formula, finalizer, source."""


def metric_table(ranges: Mapping[str, HealthyRange], *lines: MetricRow, prefix: str = "") -> dict[str, Metric]:
    """Return the metrics of a table, by name.

    Args:
        ranges: healthy ranges, by the name on the line.
        lines: the table.
        prefix: prepended to every name.
    """
    return {prefix + line[0]: Metric(prefix + line[0], *line[1:], healthy=ranges.get(line[0])) for line in lines}


def criterion_metrics(criterion: str) -> dict[str, Metric]:
    """Return the metrics of one rejection criterion, e.g. `seq_mean_k3`; each criterion has the same set of keys.

    The statistic is −log ρ for k1, and k2 or k3 in nats, over the criterion's own unit: V for token_*, R for seq_*.
    "high" means ρ above the upper bound for k1, the divergence above its bound for k2 and k3; "low" is 0 for those.
    """
    row = f"rs/{criterion}"
    token_scope = criterion.startswith(("token_", "step_"))
    unit, count = (V, "tokens_counted") if token_scope else (R, "sequences_counted")
    sequence_row = f"{row}/seq" if token_scope else row
    sequence_side = f"{row}/seq_" if token_scope else f"{row}/"
    value = criterion if not token_scope else f"{criterion} averaged over the sequence"
    # A token criterion also has each sequence's mean, under names with "seq_".
    lines: list[MetricRow] = [
        ("mean", "nats", unit, f"mean({criterion})", mean(row), MATHS),
        ("std", "nats", unit, f"std({criterion})", std(row), MATHS),
        ("min", "nats", unit, f"min({criterion})", lowest(row), MATHS),
        ("max", "nats", unit, f"max({criterion})", highest(row), MATHS),
        ("fraction_high", "share", unit, "share above the upper bound", share(f"{row}/high", count), MATHS),
        ("fraction_low", "share", unit, "share below the lower bound", share(f"{row}/low", count), MATHS),
        ("masked_fraction", "share", V, "tokens that the criterion rejects / |V|", share(f"{row}/tokens", V), MATHS),
        (
            "seq_masked_fraction",
            "share",
            R,
            "sequences with a token that the criterion rejects / |R|",
            share(f"{row}/sequences", R),
            MATHS,
        ),
        (
            "alone_fraction",
            "share",
            V,
            "tokens that only this filter rejects / |V|",
            share(f"{row}/tokens_alone", V),
            MATHS,
        ),
        (
            "seq_alone_fraction",
            "share",
            R,
            "sequences in which only this filter rejects tokens / |R|",
            share(f"{row}/sequences_alone", R),
            MATHS,
        ),
        # The same metrics over sequences.
        ("seq_mean", "nats", R, f"mean_R({value})", mean(sequence_row), MATHS),
        ("seq_std", "nats", R, f"std_R({value})", std(sequence_row), MATHS),
        ("seq_min", "nats", R, f"min_R({value})", lowest(sequence_row), MATHS),
        ("seq_max", "nats", R, f"max_R({value})", highest(sequence_row), MATHS),
        ("seq_max_deviation", "nats", R, f"max_R |{value}|", farthest(sequence_row), MATHS),
        (
            "seq_fraction_high",
            "share",
            R,
            "share of R above the upper bound",
            share(f"{sequence_side}high", "sequences_counted"),
            MATHS,
        ),
        (
            "seq_fraction_low",
            "share",
            R,
            "share of R below the lower bound",
            share(f"{sequence_side}low", "sequences_counted"),
            MATHS,
        ),
    ]
    return metric_table(CRITERION_RANGES, *lines, prefix=f"rollout_rs_{criterion}_")


BY_TIMESTEP = "abs_log_ratio_per_dimension/t_"
"""Rows of |Δ log p| by timestep value; the value follows."""


def _limit_to_denoising(finalizer: Finalizer) -> Finalizer:
    """Return the same finalizer, restricted to rows of denoising steps."""
    return dataclasses.replace(
        finalizer,
        rows=(*finalizer.rows, "moments:log_ratio_per_dimension"),
        at=lambda *places: finalizer.at(*places[:-1]),
    )


DIFFUSION_METRICS: dict[str, Metric] = metric_table(
    {},
    ("kl_per_dimension", "nats", "steps", "−mean(J / D)", mean("log_ratio_per_dimension", scale=-1.0), OWN),
    ("kl_joint", "nats", "steps", "−mean(J), estimates KL(μ‖π)", mean("joint_log_ratio", scale=-1.0), OWN),
    ("k3_kl_joint", "nats", "steps", "mean(expm1(J) − J), J up to +20", mean("joint_k3"), OWN),
    ("exact_kl_mean", "nats", "steps", "mean of Σ_D (m − m_μ)² / 2s²", mean("exact_kl"), OWN),
    ("exact_kl_max", "nats", "steps", "max of Σ_D (m − m_μ)² / 2s²", highest("exact_kl"), OWN),
    (
        "rejected_ratio",
        "share",
        "steps",
        "equals rollout_rs_masked_fraction",
        _limit_to_denoising(complement_share("tokens_kept", "tokens")),
        OWN,
    ),
    (
        "zeroed_fraction_positive",
        "share",
        "kept steps, A > 0",
        "share whose gradient the clip or mask zeroes",
        mean("zeroed_fraction_positive"),
        OWN,
    ),
    (
        "zeroed_fraction_negative",
        "share",
        "kept steps, A < 0",
        "share whose gradient the clip or mask zeroes",
        mean("zeroed_fraction_negative"),
        OWN,
    ),
)

STEP_KL_METRICS: dict[str, Metric] = criterion_metrics("step_kl")


def added_by_lag(denominator: str) -> Finalizer:
    """Compute (Σ k3 − n · k3 of a token at lag 0) / sums[denominator]; NaN if that is 0 or no token has lag 0."""
    rows = ("k3", "tokens", "fresh_k3", "fresh_tokens")

    def at(k3: int, tokens: int, fresh_k3: int, fresh: int, below: int) -> Callable[[Numbers], float]:
        def compute(x: Numbers) -> float:
            if not (x[fresh] and x[below]):
                return math.nan
            return (x[k3] - x[tokens] * x[fresh_k3] / x[fresh]) / x[below]

        return compute

    names = (*(f"sums:lag/{row}" for row in rows), f"sums:lag/{denominator}")
    return Finalizer(names, at, f"(Σ k3 − tokens · k3 at lag 0) / sum lag/{denominator}")


_FRESH = Finalizer(
    ("sums:lag/fresh_k3", "sums:lag/fresh_tokens"),
    lambda above, below: lambda x: x[above] / x[below] if x[below] else math.nan,
    "k3 per token of lag 0",
)
LAG_METRICS: dict[str, Metric] = metric_table(
    {},
    ("k3_kl_lag0", "nats", V, "tm(k3) at lag 0: the engine's mismatch", _FRESH, OWN),
    ("k3_kl_staleness", "nats", V, "tm(k3) − k3_kl_lag0: what old weights add", added_by_lag("tokens"), OWN),
    ("k3_kl_per_version", "nats", V, "k3_kl_staleness / tm(lag)", added_by_lag("versions"), OWN),
)
"""Metrics of tokens with a known version of the weights (`lag_statistics`)."""


def by_timestep(statistics: HostStatistics) -> dict[str, float]:
    """Return mean |Δ log p|, averaged over D, by timestep: `log_prob_abs_diff/t_VALUE`, for the values in the data."""
    rows = [name for name in statistics.names[1] if name.startswith(BY_TIMESTEP)]
    return {
        f"log_prob_abs_diff/t_{name.removeprefix(BY_TIMESTEP)}": statistics.moments[name].mean
        for name in rows
        if statistics.moments[name].count
    }
