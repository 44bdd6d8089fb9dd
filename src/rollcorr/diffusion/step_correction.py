"""`correct()` for denoising steps: at a configurable power of the likelihood, with the exact KL as a criterion."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollcorr.core.diffusion import power_of
from rollcorr.core.divergence import k3
from rollcorr.core.mergeable_statistics import Statistics, extremes_of, moments_of
from rollcorr.core.metric_tables import BY_TIMESTEP
from rollcorr.core.weights import exceeds, normalization_factor
from rollcorr.correction.process_groups import gather_statistics
from rollcorr.correction.result import Correction
from rollcorr.correction.rollout_correction import correct

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollcorr.diffusion.actor_config import DiffusionActorConfig

STEP_KL = "step_kl"
"""The criterion that bounds the exact KL of a step."""

# A density is unbounded, so its exponential has no meaning and may overflow.
_PROBABILITY_ROWS = ("train_ppl", "rollout_ppl", "ppl_ratio", "prob_diff_abs")
# Rows that step_kl changes are recomputed with it. The criterion that rejected a step by itself is then unknown.
_RECOUNTED_ROWS = ("tokens_kept", "sequences_kept", "sequences_touched", "kept_weight", "kept_sequence_weight")
_REJECTED_BY_SEVERAL_ROWS = ("rejected_by_several", "sequences_rejected_by_several")

SAME_TIMESTEP = 1e-5
"""Two timestep values are the same if they differ by this share of the largest, or less."""


def step_kl(mean_p: Tensor | None, mean_q: Tensor | None, std: Tensor | None) -> Tensor | None:
    """Compute KL(p‖q) = Σ_D (m_p − m_q)² / 2s² of each step, (b, w), nats, no gradient; None if an argument is None.

    Args:
        mean_p: (b, w, …).
        mean_q: same shape.
        std: (b, w).
    """
    if mean_p is None or mean_q is None or std is None:
        return None
    scaled = (mean_p.detach() - mean_q.detach()).flatten(2) / std.detach().unsqueeze(-1)
    return scaled.square().sum(-1, dtype=torch.float64) / 2


def correct_steps(
    train: Tensor,
    rollout: Tensor,
    config: DiffusionActorConfig,
    *,
    exact_kl: Tensor | None = None,
    timesteps: Tensor | None = None,
    dimensions: int | None = None,
    schedule: Sequence[float] | None = None,
    group: ProcessGroup | None = None,
) -> Correction:
    """Compute weights, keep mask and statistics of steps: `correct()` on p · D · (log π − log μ), plus the exact KL.

    A non-finite log-prob is missing: a density is never 0.

    Args:
        train: log π averaged over D, (b, w), nats.
        rollout: log μ averaged over D, same shape.
        config: the actor's configuration; contains a correction.
        exact_kl: KL of each step over all D, (b, w), nats; None without the means.
        timesteps: timestep value of each step, (b, w); None disables the breakdown.
        dimensions: D; None if unknown.
        schedule: timestep values for the breakdown of the mismatch; optional, no breakdown by default.
        group: data-parallel group: statistics are then computed over the group.

    Returns:
        A `Correction`, whose statistics also contain the rows of `rollcorr.core.metric_tables`.

    Raises:
        ValueError: D is needed and not known, or `step_kl` is set without the means.
    """
    bound = config.step_kl
    if bound is not None and exact_kl is None:
        raise ValueError(
            "rollout_rs 'step_kl' needs the mean of each step from both policies (prev_sample_mean, and that of the "
            "trainer) and std; have the rollout ship them, or use a criterion of log-probs"
        )

    # If either log-prob is missing, so is the ratio; the `nonfinite` option handles it.
    train, rollout = train.detach().double(), rollout.detach().double()
    finite = train.isfinite() & rollout.isfinite()
    train = train.masked_fill(~finite, torch.nan)

    # Everything except the exact KL is the correction of tokens, at the configured power of the likelihood.
    scale = _log_prob_factor(config, dimensions)
    every = torch.ones_like(finite)
    correction = correct(scale * train, scale * rollout, every, config.log_prob_correction, group=group, densities=True)
    keep, statistics = correction.loss_mask, correction.statistics
    assert statistics is not None, "there is no rollout_correction to compute"
    own = _compute_step_statistics(train - rollout, finite, exact_kl, timesteps, dimensions, schedule)
    replaced = list(_PROBABILITY_ROWS)

    # The exact KL judges each step separately, in addition to the token criteria. Recompute the rows it changes.
    if bound is not None and exact_kl is not None:
        rejects = exceeds(exact_kl, bound) | ~exact_kl.isfinite()
        keep = keep & ~rejects
        own = own | _recount_rows(correction, keep) | _step_kl_statistics(exact_kl, correction, rejects, bound)
        alone_rows = [name for name in statistics.names["sums"] if name.endswith("_alone")]
        replaced += [*_RECOUNTED_ROWS, *_REJECTED_BY_SEVERAL_ROWS, *alone_rows]

    statistics = statistics.without(*replaced) | gather_statistics(own, group)
    return dataclasses.replace(correction, loss_mask=keep, sequence_kept=keep.any(1), statistics=statistics)


def _log_prob_factor(config: DiffusionActorConfig, dimensions: int | None) -> float:
    """Return the factor that converts a log-prob averaged over D into one to the power p: p D."""
    if config.reduction == "mean":
        return 1.0
    if dimensions is None:
        raise ValueError(
            f"reduction={config.reduction!r} needs D, the number of latent dimensions: put latents or prev_sample_mean "
            "in the batch, or set reduction='mean'"
        )
    return dimensions * power_of(config.reduction, dimensions)


def _compute_step_statistics(
    log_ratio: Tensor,
    finite: Tensor,
    exact_kl: Tensor | None,
    timesteps: Tensor | None,
    dimensions: int | None,
    schedule: Sequence[float] | None,
) -> Statistics:
    """Return the rows specific to denoising steps: both units, the exact KL, and the mismatch by timestep."""
    moments = {"log_ratio_per_dimension": moments_of(log_ratio, finite)}
    extremes = {}

    if dimensions is not None:
        joint = dimensions * log_ratio.masked_fill(~finite, 0.0)
        moments["joint_log_ratio"] = moments_of(joint, finite)
        moments["joint_k3"] = moments_of(k3(joint), finite)
    if exact_kl is not None:
        measured = exact_kl.isfinite()
        moments["exact_kl"] = moments_of(exact_kl, measured)
        extremes["exact_kl"] = extremes_of(exact_kl, measured)
    if timesteps is not None:
        values = tuple(schedule or ())
        limit = SAME_TIMESTEP * max(map(abs, values), default=0.0)
        for value in values:
            at = finite & ((timesteps.double() - value).abs() <= limit)
            moments[f"{BY_TIMESTEP}{value:g}"] = moments_of(log_ratio.abs(), at)
    return Statistics.of(moments=moments, extremes=extremes)


def _recount_rows(correction: Correction, keep: Tensor) -> Statistics:
    """Recompute the statistics of the steps in the loss, after all criteria."""
    count = keep.sum(1)
    sums = {
        "tokens_kept": keep.sum(),
        "sequences_kept": (count > 0).sum(),
        "sequences_touched": (~keep).any(1).sum(),
    }
    if correction.weights is not None and correction.statistics is not None:
        kept = correction.weights.double().masked_fill(~keep, 0.0)

        # These rows contain weights before normalization.
        if "norm_weight" in correction.statistics.names["sums"]:
            of = correction.statistics.sum
            kept = kept * normalization_factor(of("norm_weight"), of("norm_units"))

        sums["kept_weight"] = kept.sum()
        sums["kept_sequence_weight"] = (kept.sum(1) / count.clamp(min=1)).sum()
    return Statistics.of(sums=sums)


def _step_kl_statistics(kl: Tensor, correction: Correction, rejects: Tensor, bound: float) -> Statistics:
    """Return the rows of step_kl, named like the rows of each criterion."""
    row = f"rs/{STEP_KL}"
    measured = kl.isfinite()
    is_judged = measured.any(1)
    per_sample = kl.masked_fill(~measured, 0.0).sum(1) / measured.sum(1).clamp(min=1)

    # The loss mask is that of the other criteria: these steps are rejected by step_kl only.
    rejected_alone = rejects & correction.loss_mask
    zero = torch.zeros_like(rejects.sum())  # a KL has no lower bound
    sums = {
        f"{row}/high": (rejects & measured).sum(),
        f"{row}/low": zero,
        f"{row}/seq_high": (is_judged & exceeds(per_sample, bound)).sum(),
        f"{row}/seq_low": zero,
        f"{row}/tokens": rejects.sum(),
        f"{row}/sequences": rejects.any(1).sum(),
        f"{row}/tokens_alone": rejected_alone.sum(),
        f"{row}/sequences_alone": (rejects.any(1) & correction.loss_mask.all(1)).sum(),
    }
    return Statistics.of(
        sums=sums,
        moments={row: moments_of(kl, measured), f"{row}/seq": moments_of(per_sample, is_judged)},
        extremes={row: extremes_of(kl, measured), f"{row}/seq": extremes_of(per_sample, is_judged)},
    )
