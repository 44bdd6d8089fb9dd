"""The registry's metrics of denoising steps: what a step has beside what a token has."""

from __future__ import annotations

import dataclasses

from rollcorr.core.criterion_metrics import criterion_metrics
from rollcorr.core.finalizers import Finalizer, complement_share, highest, mean
from rollcorr.core.host_statistics import HostStatistics
from rollcorr.core.metric_type import OWN, Metric, metric_table

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
    return {
        f"log_prob_abs_diff/t_{name.removeprefix(BY_TIMESTEP)}": moments.mean
        for name, moments in statistics.moments.items()
        if name.startswith(BY_TIMESTEP) and moments.count
    }
