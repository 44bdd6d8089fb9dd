"""What a metric is, and the metrics made from a name: of each rejection criterion, and of denoising steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from rollcorr.core.finalizers import Finalizer, complement_share, farthest, highest, lowest, mean, share, std
from rollcorr.core.health_ranges import CRITERION_RANGES, HealthyRange
from rollcorr.core.host_statistics import HostStatistics

MATHS = "Li (2025), rollout correction mathematics"
IS_GUIDE = "rollout importance sampling guide (2025-10)"
PRAXIS = "Fang & Khazi (2025), Mismatch Praxis"
OWN = "rollcorr"

# What is averaged over, by the symbols of docs/reference/notation.md: valid tokens, and sequences with one.
V, R = "tokens", "sequences"


@dataclass(frozen=True)
class Metric:
    """One metric of the registry.

    Attributes:
        name: bare name, without the prefix. For a criterion's metrics, with the criterion's name filled in.
        unit: nats, tokens, sequences, ratio, probability, share or 1.
        sample: what is averaged over: tokens, sequences, unit or batch.
        formula: the definition, in the symbols of docs/reference/notation.md.
        finalizer: how it is computed from merged statistics.
        source: who defined it.
        healthy: the healthy range, where one is known.
    """

    name: str
    unit: str
    sample: str
    formula: str
    finalizer: Finalizer
    source: str
    healthy: HealthyRange | None = None


Line = tuple[str, str, str, str, Finalizer, str]
"""A line of a table of metrics: name, unit, sample, formula, finalizer, source."""


def metric_table(ranges: Mapping[str, HealthyRange], *lines: Line, prefix: str = "") -> dict[str, Metric]:
    """The metrics of a table, by name.

    Args:
        ranges: healthy ranges, by the name on the line.
        lines: the table.
        prefix: goes before every name.
    """
    return {prefix + line[0]: Metric(prefix + line[0], *line[1:], healthy=ranges.get(line[0])) for line in lines}


def criterion_metrics(criterion: str) -> dict[str, Metric]:
    """The metrics of one rejection criterion, e.g. `seq_mean_k3`; the same names for each (spec: one set of keys).

    The statistic is −log ρ for k1, and k2 or k3 in nats, over the criterion's own unit: V for token_*, R for seq_*.
    "high" means ρ above the upper bound for k1, the divergence above its bound for k2 and k3; "low" is 0 for those.
    """
    row = f"rs/{criterion}"
    token_scope = criterion.startswith(("token_", "step_"))
    unit, count = (V, "tokens_counted") if token_scope else (R, "sequences_counted")
    sequence_row = f"{row}/seq" if token_scope else row
    sequence_side = f"{row}/seq_" if token_scope else f"{row}/"
    value = criterion if not token_scope else f"{criterion} averaged over the sequence"
    lines: list[Line] = [
        ("mean", "nats", unit, f"mean({criterion})", mean(row), MATHS),
        ("std", "nats", unit, f"std({criterion})", std(row), MATHS),
        ("min", "nats", unit, f"min({criterion})", lowest(row), MATHS),
        ("max", "nats", unit, f"max({criterion})", highest(row), MATHS),
        ("fraction_high", "share", unit, "share above the upper bound", share(f"{row}/high", count), MATHS),
        ("fraction_low", "share", unit, "share below the lower bound", share(f"{row}/low", count), MATHS),
        ("masked_fraction", "share", V, "tokens it rejects / |V|", share(f"{row}/tokens", V), MATHS),
        (
            "seq_masked_fraction",
            "share",
            R,
            "sequences with a token it rejects / |R|",
            share(f"{row}/sequences", R),
            MATHS,
        ),
        (
            "alone_fraction",
            "share",
            V,
            "tokens that it rejects and nothing else does / |V|",
            share(f"{row}/tokens_alone", V),
            MATHS,
        ),
        (
            "seq_alone_fraction",
            "share",
            R,
            "sequences that it touches and nothing else does / |R|",
            share(f"{row}/sequences_alone", R),
            MATHS,
        ),
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


def _of_steps(finalizer: Finalizer) -> Finalizer:
    """The same, but only where the rows are of denoising steps."""
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
        "rollout_rs_masked_fraction by another name",
        _of_steps(complement_share("tokens_kept", "tokens")),
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


def by_timestep(statistics: HostStatistics) -> dict[str, float]:
    """Mean |Δ log p|, averaged over D, by timestep value: `log_prob_abs_diff/t_VALUE`, for the values that occurred."""
    rows = [name for name in statistics.names[1] if name.startswith(BY_TIMESTEP)]
    return {
        f"log_prob_abs_diff/t_{name.removeprefix(BY_TIMESTEP)}": statistics.moments[name].mean
        for name in rows
        if statistics.moments[name].count
    }
