"""Rollout correction for diffusion models (Flow-GRPO): denoising steps in place of tokens.

apply_bypass_mode_to_diffusion_batch           bypass: π_old := μ, no recomputed log-probs
apply_rollout_correction_to_diffusion_batch    decoupled: weights and keep mask, once per batch
diffusion_loss                                 both modes: the loss of a micro-batch of steps

`rollcorr.TrainingStep` scales these losses in an optimizer step of micro-batches, denoising steps and ranks.
"""

from rollcorr.diffusion.actor_config import DiffusionActorConfig
from rollcorr.diffusion.batch_checks import check_diffusion_batch, check_schedule
from rollcorr.diffusion.batch_correction import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    loss_step_metrics,
)
from rollcorr.diffusion.denoising_loss import diffusion_loss

__all__ = [
    "DiffusionActorConfig",
    "apply_bypass_mode_to_diffusion_batch",
    "apply_rollout_correction_to_diffusion_batch",
    "check_diffusion_batch",
    "check_schedule",
    "diffusion_loss",
    "loss_step_metrics",
]
