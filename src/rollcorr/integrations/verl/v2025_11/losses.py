"""Policy losses with the names, arguments and return values of verl in November 2025: four 0-d tensors."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from rollcorr.core.losses import ppo_clip_loss, reinforce_loss
from rollcorr.integrations.verl.losses import (
    Config,
    FourTensors,
    actor_correction,
    checked_actor,
    clip_constants,
    four_tensors,
)
from rollcorr.integrations.verl.older import older_agg_loss
from rollcorr.integrations.verl.v2025_11.config import RolloutCorrectionConfig


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Config = None,
    rollout_is_weights: Tensor | None = None,
) -> FourTensors:
    """−w · min(r A, clip(r) A), aggregated over this batch; r = π_θ / π_old.

    Args:
        old_log_prob: as in `rollcorr.integrations.verl.compute_policy_loss_vanilla`, like the next three.
        log_prob: log π_θ, nats.
        advantages: per token.
        response_mask: tokens in the loss, after rejection.
        loss_agg_mode: one of those of `agg_loss`; "seq-mean-token-sum-norm" is Σ / T.
        config: the actor's, with its clip constants.
        rollout_is_weights: weights π_old / μ; None for none.

    Returns:
        Loss, share of tokens that the clip stops, KL(π_old‖π_θ), share that the dual clip stops.

    Raises:
        ValueError: no config, a clip constant outside its range, or shapes that differ.
    """
    data = log_prob, old_log_prob, advantages, response_mask
    per_token, statistics = ppo_clip_loss(*data, **clip_constants(checked_actor(config)), weights=rollout_is_weights)
    return four_tensors(older_agg_loss(per_token, response_mask, loss_agg_mode), statistics)


def compute_policy_loss_with_rollout_correction(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    eos_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    loss_scale_factor: float = 1.0,
    rollout_is: str | None = None,
    rollout_is_threshold: float | None = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | None = None,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    *,
    verl_parity: bool = False,
) -> FourTensors:
    """The pure loss: −sg(w) · log π_θ · A over what is kept, with w and the mask from π_θ / μ.

    Args:
        rollout_log_prob: log μ, nats.
        log_prob: log π_θ, nats; carries the gradient. None flows through the weights.
        advantages: per token.
        eos_mask: non-zero on tokens that the policy sampled.
        loss_agg_mode: as in `compute_policy_loss_vanilla`.
        loss_scale_factor: multiplies the loss.
        rollout_is: as in `RolloutCorrectionConfig`, like the options after it.
        rollout_is_threshold: ceiling of the weights.
        rollout_rs: level of the rejection band.
        rollout_rs_threshold: upper end of the band; None is the ceiling of the weights.
        rollout_rs_threshold_lower: lower end of the band.
        rollout_token_veto_threshold: the veto.
        verl_parity: compute that release's numbers; there the veto counts beside a rejection band only.

    Returns:
        Loss, 0, KL(μ‖π_θ) over what is kept, 0.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option outside its limits, or shapes that differ.
    """
    band = rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower
    settings = RolloutCorrectionConfig(
        rollout_is, rollout_is_threshold, *band, rollout_token_veto_threshold, verl_parity=verl_parity
    )
    data = rollout_log_prob, log_prob, advantages, eos_mask
    return _pure_loss(*data, loss_agg_mode, settings, scale=loss_scale_factor)


def compute_policy_loss_rollout_correction_wrapper(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Config = None,
    rollout_is_weights: Tensor | None = None,
) -> FourTensors:
    """`compute_policy_loss_with_rollout_correction` as the actor calls it: the options are in its config.

    Args:
        old_log_prob: log μ, nats: the trainer put it there.
        log_prob: log π_θ, nats; carries the gradient.
        advantages: per token.
        response_mask: tokens that the policy sampled.
        loss_agg_mode: as in `compute_policy_loss_vanilla`.
        config: the actor's; its policy_loss has rollout_correction.
        rollout_is_weights: ignored, as in verl.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: no correction in the config, an option outside its limits, or shapes that differ.
    """
    settings = RolloutCorrectionConfig.read(actor_correction(config, writer="maybe_apply_rollout_correction"))

    # The trainer has acted on the operating mode already; the loss reads the correction alone.
    alone = dataclasses.replace(settings, bypass_old_logprob_for_rollout=False, use_pure_rollout_correction=False)
    return _pure_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, alone, scale=1.0)


def _pure_loss(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    settings: RolloutCorrectionConfig,
    *,
    scale: float,
) -> FourTensors:
    """REINFORCE with the weights and the mask of π_θ / μ."""
    weights, mask, _ = settings.corrected(log_prob, rollout_log_prob, response_mask, in_loss=True)

    # That release looked at the mask only beside a band, so a veto alone never reached its loss.
    if settings.verl_parity and settings.rollout_rs is None:
        mask = response_mask

    per_token, statistics = reinforce_loss(
        log_prob, advantages, mask, weights=weights, behavior_log_prob=rollout_log_prob
    )
    loss = older_agg_loss(per_token, mask, loss_agg_mode) * scale
    nothing = loss.new_zeros(())
    return loss, nothing, statistics.moment("policy_kl")[1].to(loss.dtype), nothing
