"""What is done to a batch once, before it is trained on: bypass or decoupled correction."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.config import PresetName, RolloutCorrectionConfig
from rollcorr.diffusion.actor_config import DiffusionActorConfig
from rollcorr.diffusion.batch_checks import Batch, check_diffusion_batch, check_shapes, dimensions_of, require
from rollcorr.diffusion.reported_metrics import diffusion_metrics
from rollcorr.diffusion.step_correction import StepPair, correct_steps, step_kl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def apply_bypass_mode_to_diffusion_batch(
    batch: MutableMapping[str, Tensor], *, schedule: Sequence[float] | None = None
) -> MutableMapping[str, Tensor]:
    """old_log_probs := rollout_log_probs, and old_prev_sample_mean := prev_sample_mean where there is one.

    No log-probs are recomputed, and there is nothing to correct before the loss: `diffusion_loss` corrects each step,
    against π_θ.

    Args:
        batch: tensors of shape (B, W), see `rollcorr.diffusion.batch_checks`; changed in place.
        schedule: the trainer's timestep values; the batch's must be among them, one after another.

    Returns:
        The same batch.

    Raises:
        KeyError: the rollout recorded no log-probs.
        ValueError: as `check_diffusion_batch`.
    """
    require(batch, "rollout_log_probs", reason="bypass mode takes for π_old")
    check_diffusion_batch(batch, schedule=schedule)
    batch["old_log_probs"] = batch["rollout_log_probs"]
    if "prev_sample_mean" in batch:
        batch["old_prev_sample_mean"] = batch["prev_sample_mean"]
    return batch


def apply_rollout_correction_to_diffusion_batch(
    batch: MutableMapping[str, Tensor],
    config: DiffusionActorConfig | RolloutCorrectionConfig | Mapping[str, Any] | PresetName,
    *,
    schedule: Sequence[float] | None = None,
    group: ProcessGroup | None = None,
) -> tuple[MutableMapping[str, Tensor], dict[str, float]]:
    """Weights and keep mask of a whole batch in decoupled mode, from π_old / μ: (B, W), once.

    Written are `rollout_keep_mask`, the steps that stay in the loss, and `rollout_is_weights`: what multiplies the loss
    of a kept step (1 without importance weights), and 0 where it was rejected. A weight can be 0 in a kept step
    (IcePop), which is why there are two.

    Args:
        batch: see `rollcorr.diffusion.batch_checks`; changed in place.
        config: the actor's; or a correction alone, for the actor's defaults.
        schedule: the trainer's timestep values, in order; without it, the breakdown is by the values in this batch.
        group: data-parallel group: statistics, and a batch mean of weights, are then those of the group.

    Returns:
        The same batch, and the metrics under `rollout_corr/`; none without a correction.

    Raises:
        KeyError: a tensor is missing.
        ValueError: the configuration is one of bypass mode, or as `check_diffusion_batch`.
    """
    actor = config if isinstance(config, DiffusionActorConfig) else DiffusionActorConfig(rollout_correction=config)
    if actor.bypass_mode:
        raise ValueError(
            "bypass_mode=True takes μ for π_old, so there is nothing to correct before the loss: call "
            "apply_bypass_mode_to_diffusion_batch, or set bypass_mode=False"
        )

    old, rollout = require(batch, "old_log_probs", "rollout_log_probs", reason="the decoupled correction compares")
    check_diffusion_batch(batch, schedule=schedule)
    ones = torch.ones_like(rollout, dtype=torch.float32)
    if actor.correction is None:
        batch["rollout_keep_mask"] = torch.ones_like(rollout, dtype=torch.bool)
        batch["rollout_is_weights"] = ones
        return batch, {}
    if old is rollout:
        raise ValueError(
            "old_log_probs and rollout_log_probs are one tensor, so π_old/μ = 1 and the correction would do nothing: "
            "recompute old_log_probs with the trainer, or set bypass_mode=True"
        )

    # Every rank of a group must break the mismatch down by the same values, and each knows only those of its batch.
    values = _values(batch) if schedule is None and group is None else schedule
    pair = StepPair(old, rollout, _exact_kl(batch), batch.get("timesteps"), dimensions_of(batch))
    correction = correct_steps(pair, actor, schedule=values, group=group)

    weights = ones if correction.loss_weights is None else correction.loss_weights
    batch["rollout_keep_mask"] = correction.loss_mask
    batch["rollout_is_weights"] = weights.masked_fill(~correction.loss_mask, 0.0)
    statistics = correction.statistics
    return batch, {} if statistics is None else diffusion_metrics(statistics, actor)


def _exact_kl(batch: Batch) -> Tensor | None:
    """KL of each step between π_old and μ; None without the means of both."""
    if not all(key in batch for key in ("prev_sample_mean", "old_prev_sample_mean", "std")):
        return None
    check_shapes(batch)
    return step_kl(batch["prev_sample_mean"], batch["old_prev_sample_mean"], batch["std"])


def _values(batch: Batch) -> list[float] | None:
    """The timestep values that a batch has, from noise to data."""
    if "timesteps" not in batch:
        return None
    return sorted(batch["timesteps"].detach().float().unique().tolist(), reverse=True)
