"""`correct()` on denoising steps: at the chosen power of the likelihood, with the exact KL as one more criterion."""

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

# A density may be anything, so its exponential means nothing and may overflow.
_OF_PROBABILITIES = ("train_ppl", "rollout_ppl", "ppl_ratio", "prob_diff_abs")
# What step_kl changes is counted again with it. Which criterion rejected a step alone is not known any more.
_RECOUNTED = ("tokens_kept", "sequences_kept", "sequences_touched", "kept_weight", "kept_sequence_weight")
_OF_SEVERAL = ("rejected_by_several", "sequences_rejected_by_several")

SAME_TIMESTEP = 1e-5
"""Two timestep values are the same if they differ by this share of the largest, or less."""


def step_kl(mean_p: Tensor | None, mean_q: Tensor | None, std: Tensor | None) -> Tensor | None:
    """KL(p‖q) = Σ_D (m_p − m_q)² / 2s² of each step, without gradient: (b, w), nats; None if one of the three is.

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
    """Weights, keep mask and statistics of steps: `correct()` on p · D · (log π − log μ), and the exact KL beside it.

    A log-prob that is not finite is missing: a density is never 0.

    Args:
        train: log π averaged over D, (b, w), nats.
        rollout: log μ averaged over D, same shape.
        config: with a correction.
        exact_kl: KL of each step over all D, (b, w), nats; None without the means.
        timesteps: timestep value of each step, (b, w); None leaves the breakdown out.
        dimensions: D; None when nothing tells.
        schedule: timestep values to break the mismatch down by; None leaves that out.
        group: data-parallel group; statistics are then those of the group.

    Returns:
        A `Correction`, whose statistics also hold the rows of `rollcorr.core.metric_tables`.

    Raises:
        ValueError: D is needed and not known, or `step_kl` is asked for without the means.
    """
    bound = config.step_kl
    if bound is not None and exact_kl is None:
        raise ValueError(
            "rollout_rs 'step_kl' needs the mean of each step from both policies (prev_sample_mean, and that of the "
            "trainer) and std; have the rollout ship them, or use a criterion of log-probs"
        )

    # Either log-prob missing makes the ratio missing; `nonfinite` says what that does.
    train, rollout = train.detach().double(), rollout.detach().double()
    finite = train.isfinite() & rollout.isfinite()
    train = train.masked_fill(~finite, torch.nan)

    # Everything but the exact KL is the correction of tokens, at the chosen power of the likelihood.
    scale = _scale(config, dimensions)
    every = torch.ones_like(finite)
    correction = correct(scale * train, scale * rollout, every, config.log_prob_correction, group=group, densities=True)
    keep, statistics = correction.loss_mask, correction.statistics
    assert statistics is not None, "there is no rollout_correction to compute"
    own = _rows(train - rollout, finite, exact_kl, timesteps, dimensions, schedule)
    replaced = list(_OF_PROBABILITIES)

    # The exact KL judges every step by itself, beside the other criteria. What it changes is counted again.
    if bound is not None and exact_kl is not None:
        rejects = exceeds(exact_kl, bound) | ~exact_kl.isfinite()
        keep = keep & ~rejects
        own = own | _recounted(correction, keep) | _criterion_rows(exact_kl, correction, rejects, bound)
        alone = [name for name in statistics.names["sums"] if name.endswith("_alone")]
        replaced += [*_RECOUNTED, *_OF_SEVERAL, *alone]

    statistics = statistics.without(*replaced) | gather_statistics(own, group)
    return dataclasses.replace(correction, loss_mask=keep, sequence_kept=keep.any(1), statistics=statistics)


def _scale(config: DiffusionActorConfig, dimensions: int | None) -> float:
    """What turns a log-prob averaged over D into one to the power p: p D."""
    if config.reduction == "mean":
        return 1.0
    if dimensions is None:
        raise ValueError(
            f"reduction={config.reduction!r} needs D, the number of latent dimensions: put latents or prev_sample_mean "
            "in the batch, or set reduction='mean'"
        )
    return dimensions * power_of(config.reduction, dimensions)


def _rows(
    log_ratio: Tensor,
    finite: Tensor,
    exact_kl: Tensor | None,
    timesteps: Tensor | None,
    dimensions: int | None,
    schedule: Sequence[float] | None,
) -> Statistics:
    """What denoising steps have beside the rows of tokens: both units, the exact KL, and the mismatch by timestep."""
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


def _recounted(correction: Correction, keep: Tensor) -> Statistics:
    """What stays in the loss, with everything that rejects taken together."""
    count = keep.sum(1)
    sums = {
        "tokens_kept": keep.sum(),
        "sequences_kept": (count > 0).sum(),
        "sequences_touched": (~keep).any(1).sum(),
    }
    if correction.weights is not None and correction.statistics is not None:
        kept = correction.weights.double().masked_fill(~keep, 0.0)

        # These rows are of weights before they were normalized.
        if "norm_weight" in correction.statistics.names["sums"]:
            of = correction.statistics.sum
            kept = kept * normalization_factor(of("norm_weight"), of("norm_units"))

        sums["kept_weight"] = kept.sum()
        sums["kept_sequence_weight"] = (kept.sum(1) / count.clamp(min=1)).sum()
    return Statistics.of(sums=sums)


def _criterion_rows(kl: Tensor, correction: Correction, rejects: Tensor, bound: float) -> Statistics:
    """Rows of step_kl, named as those of the other criteria."""
    row = f"rs/{STEP_KL}"
    measured = kl.isfinite()
    seen = measured.any(1)
    per_sample = kl.masked_fill(~measured, 0.0).sum(1) / measured.sum(1).clamp(min=1)

    alone = rejects & correction.loss_mask
    none = torch.zeros_like(rejects.sum())  # a KL has no lower bound
    sums = {
        f"{row}/high": (rejects & measured).sum(),
        f"{row}/low": none,
        f"{row}/seq_high": (seen & exceeds(per_sample, bound)).sum(),
        f"{row}/seq_low": none,
        f"{row}/tokens": rejects.sum(),
        f"{row}/sequences": rejects.any(1).sum(),
        f"{row}/tokens_alone": alone.sum(),
        f"{row}/sequences_alone": (rejects.any(1) & correction.loss_mask.all(1)).sum(),
    }
    return Statistics.of(
        sums=sums,
        moments={row: moments_of(kl, measured), f"{row}/seq": moments_of(per_sample, seen)},
        extremes={row: extremes_of(kl, measured), f"{row}/seq": extremes_of(per_sample, seen)},
    )
