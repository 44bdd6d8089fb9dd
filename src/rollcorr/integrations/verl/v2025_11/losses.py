"""Policy losses with the names, arguments and return values of verl in November 2025: four 0-d tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rollcorr.core.losses import ppo_clip_loss, reinforce_loss
from rollcorr.integrations.verl.losses import Config, checked_actor, clip_constants, clip_statistics
from rollcorr.integrations.verl.older import older_agg_loss
from rollcorr.integrations.verl.v2025_11.config import RolloutCorrectionConfig, checked
from rollcorr.integrations.verl.v2025_11.correction import corrected

Losses = tuple[Tensor, Tensor, Tensor, Tensor]


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Config = None,
    rollout_is_weights: Tensor | None = None,
) -> Losses:
    """−w · min(r A, clip(r) A), aggregated over this batch; r = π_θ / π_old.

    Args:
        old_log_prob: log π_old, nats.
        log_prob: log π_θ, nats; carries the gradient.
        advantages: per token.
        response_mask: tokens in the loss, after rejection.
        loss_agg_mode: "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", or "seq-mean-token-sum-norm" (Σ / T).
        config: has clip_ratio, clip_ratio_low, clip_ratio_high and get("clip_ratio_c", 3.0).
        rollout_is_weights: weights π_old / μ; None for none.

    Returns:
        Loss, share of tokens that the clip stops, KL(π_old‖π_θ), share that the dual clip stops.

    Raises:
        ValueError: no config, a clip constant outside its range, or shapes that differ.
    """
    clip_low, clip_high, clip_c = clip_constants(checked_actor(config))
    per_token, statistics = ppo_clip_loss(
        log_prob,
        old_log_prob,
        advantages,
        response_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
        weights=rollout_is_weights,
    )
    loss = older_agg_loss(per_token, response_mask, loss_agg_mode)
    clipped, kl, dual = clip_statistics(statistics).to(loss.dtype)
    return loss, clipped, kl, dual


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
) -> Losses:
    """The pure loss: −sg(w) · log π_θ · A over what is kept, with w and the mask from π_θ / μ.

    Args:
        rollout_log_prob: log μ, nats.
        log_prob: log π_θ, nats; carries the gradient. None flows through the weights.
        advantages: per token.
        eos_mask: non-zero on tokens that the policy sampled.
        loss_agg_mode: as in `compute_policy_loss_vanilla`.
        loss_scale_factor: multiplies the loss.
        rollout_is: level of the weights; None for none.
        rollout_is_threshold: their ceiling.
        rollout_rs: level of the rejection band; None for none.
        rollout_rs_threshold: its upper end; None is that of the weights.
        rollout_rs_threshold_lower: its lower end; None is 1 / upper.
        rollout_token_veto_threshold: reject a sequence with a token of ratio below this.
        verl_parity: compute that release's numbers; there the veto counts beside a rejection band only.

    Returns:
        Loss, 0, KL(μ‖π_θ) over what is kept, 0.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option outside its limits, or shapes that differ.
    """
    config = checked(
        {
            "rollout_is": rollout_is,
            "rollout_is_threshold": rollout_is_threshold,
            "rollout_rs": rollout_rs,
            "rollout_rs_threshold": rollout_rs_threshold,
            "rollout_rs_threshold_lower": rollout_rs_threshold_lower,
            "rollout_token_veto_threshold": rollout_token_veto_threshold,
        }
    )
    weights, mask, _ = corrected(log_prob, rollout_log_prob, eos_mask, config, verl_parity=verl_parity)
    if verl_parity and rollout_rs is None:
        mask = eos_mask
    per_token, statistics = reinforce_loss(
        log_prob, advantages, mask, weights=weights, behavior_log_prob=rollout_log_prob
    )
    loss = older_agg_loss(per_token, mask, loss_agg_mode) * loss_scale_factor
    nothing = loss.new_zeros(())
    return loss, nothing, statistics.moment("policy_kl")[1].to(loss.dtype), nothing


def compute_policy_loss_rollout_correction_wrapper(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Config = None,
    rollout_is_weights: Tensor | None = None,
) -> Losses:
    """`compute_policy_loss_with_rollout_correction` as the actor calls it: the options are in its config.

    Args:
        old_log_prob: log μ, nats: bypass mode put it there.
        log_prob: log π_θ, nats; carries the gradient.
        advantages: per token.
        response_mask: non-zero on tokens that the policy sampled.
        loss_agg_mode: as in `compute_policy_loss_vanilla`.
        config: has policy_loss.get("rollout_correction").
        rollout_is_weights: ignored, as in verl: they are computed here.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: no correction in the config, an option outside its limits, or shapes that differ.
    """
    policy_loss = getattr(checked_actor(config), "policy_loss", None)
    correction: Mapping | None = None if policy_loss is None else policy_loss.get("rollout_correction", None)
    if correction is None:
        raise ValueError("config.policy_loss has no rollout_correction; maybe_apply_rollout_correction puts it there")
    settings = RolloutCorrectionConfig.read(correction)
    return compute_policy_loss_with_rollout_correction(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode=loss_agg_mode,
        rollout_is=settings.rollout_is,
        rollout_is_threshold=settings.rollout_is_threshold,
        rollout_rs=settings.rollout_rs,
        rollout_rs_threshold=settings.rollout_rs_threshold,
        rollout_rs_threshold_lower=settings.rollout_rs_threshold_lower,
        rollout_token_veto_threshold=settings.rollout_token_veto_threshold,
        verl_parity=settings.verl_parity,
    )
