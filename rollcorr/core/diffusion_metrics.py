"""Metrics that denoising steps have beside those of the registry, and all of them together under one prefix."""

from __future__ import annotations

from rollcorr.core.criterion_metrics import criterion_metrics
from rollcorr.core.finalizers import Finalizer, complement_share, highest, mean
from rollcorr.core.metric import OWN, Metric
from rollcorr.core.metrics import PREFIX, finalize
from rollcorr.core.statistics import HostStatistics

BY_TIMESTEP = "abs_log_ratio_per_dimension/t_"
"""Rows of |Δ log p| by timestep value; the value follows."""


def _table(*rows: tuple[str, str, str, str, Finalizer]) -> dict[str, Metric]:
    return {
        name: Metric(name=name, unit=unit, sample=sample, formula=formula, finalizer=finalizer, source=OWN)
        for name, unit, sample, formula, finalizer in rows
    }


DIFFUSION_METRICS: dict[str, Metric] = _table(
    ("kl_per_dimension", "nats", "steps", "−mean(J / D)", mean("log_ratio_per_dimension", scale=-1.0)),
    ("kl_joint", "nats", "steps", "−mean(J), estimates KL(μ‖π)", mean("joint_log_ratio", scale=-1.0)),
    ("k3_kl_joint", "nats", "steps", "mean(expm1(J) − J), J up to +20", mean("joint_k3")),
    ("exact_kl_mean", "nats", "steps", "mean of Σ_D (m − m_μ)² / 2s²", mean("exact_kl")),
    ("exact_kl_max", "nats", "steps", "max of Σ_D (m − m_μ)² / 2s²", highest("exact_kl")),
    ("rejected_ratio", "share", "steps", "rollout_rs_masked_fraction", complement_share("tokens_kept", "tokens")),
    (
        "zeroed_fraction_positive",
        "share",
        "kept steps, A > 0",
        "share whose gradient the clip or mask zeroes",
        mean("zeroed_fraction_positive"),
    ),
    (
        "zeroed_fraction_negative",
        "share",
        "kept steps, A < 0",
        "share whose gradient the clip or mask zeroes",
        mean("zeroed_fraction_negative"),
    ),
)


def finalize_diffusion(statistics: HostStatistics, *, prefix: str = PREFIX) -> dict[str, float]:
    """Every metric whose rows the statistics have: the registry's, those of step_kl, those above, those by timestep."""
    rows = DIFFUSION_METRICS | criterion_metrics("step_kl")
    found = {
        name: row.finalizer.compute(statistics) for name, row in rows.items() if row.finalizer.available(statistics)
    }
    by_timestep = {
        f"log_prob_abs_diff/t_{name.removeprefix(BY_TIMESTEP)}": moments.mean
        for name, moments in statistics.moments.items()
        if name.startswith(BY_TIMESTEP) and moments.count
    }
    return finalize(statistics, prefix=prefix) | {f"{prefix}{name}": x for name, x in (found | by_timestep).items()}
