"""verl's policy losses and its loss aggregation, with their names, arguments and return values.

The per-token losses and the sums come from `rollcorr.core`: loss and gradient are 0 if every token is rejected, and
values at masked positions are never read. Log-probs, advantages and masks are (B, T).
verl passes the arguments of `compute_policy_loss_vanilla` to every loss in its registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

import torch
from torch import Tensor

from rollcorr.config import LossAggMode
from rollcorr.config.checks import check_choice
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.core.aggregation import Denominators
from rollcorr.core.losses import ppo_clip_loss, reinforce_loss
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.correction.denominators import aggregate, count_denominators
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.bypass import warn_if_not_for_bypass, warn_if_vanilla_in_bypass
from rollcorr.integrations.verl.config import RolloutCorrectionConfig

Config = Any  # verl's ActorConfig, or any object with its attributes and `get`

FourTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Loss, share of tokens that the clip stops, KL by k1, share that the dual clip stops; 0-d, as in verl of 2025."""


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Return Σ loss / denominator × dp_size, so that gradients averaged over data-parallel ranks equal one process's.

    Args:
        loss_mat: per-token loss; never read outside the mask.
        loss_mask: tokens in the loss.
        loss_agg_mode: "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean" or
            "seq-mean-token-sum-norm".
        dp_size: data-parallel ranks whose gradients are averaged.
        batch_num_tokens: tokens in the optimizer step, over all ranks; defaults to the mask's count if dp_size is 1.
        global_batch_size: sequences in the optimizer step; defaults to the number of rows with a token in the loss.
        loss_scale_factor: the constant of "seq-mean-token-sum-norm"; defaults to T.

    Returns:
        0-d, connected to the graph; 0 if no token is in the loss.

    Raises:
        ValueError: the mode is unknown, or a count is missing with dp_size > 1.
    """
    check_choice("loss_agg_mode", loss_agg_mode, get_args(LossAggMode))

    # A missing count defaults to this batch's count.
    local = count_denominators(loss_mask)
    denominators = Denominators(
        local.tokens if batch_num_tokens is None else batch_num_tokens,
        local.sequences if global_batch_size is None else global_batch_size,
    )

    # One rank cannot count the tokens of all ranks.
    needed = {"token-mean": ("batch_num_tokens", batch_num_tokens), "token-sum": ("dp_size", dp_size)}
    name, value = needed.get(loss_agg_mode, ("global_batch_size", global_batch_size))
    if dp_size > 1 and value is None:
        raise ValueError(f"{loss_agg_mode} with dp_size {dp_size} needs {name}, counted over the whole optimizer step")

    scale = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    return aggregate(loss_mat, loss_mask, cast("LossAggMode", loss_agg_mode), denominators, scale=scale) * dp_size


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> FourTensors:
    """Compute the PPO-clip loss from clip constants; verl's older signature.

    Args:
        old_log_prob: log π_old, nats.
        log_prob: log π_θ, nats; carries the gradient.
        advantages: per token.
        response_mask: tokens in the loss, after rejection.
        cliprange: ε on both sides; the default of the next two.
        cliprange_low: how far the ratio may fall.
        cliprange_high: how far it may rise.
        clip_ratio_c: c of the dual clip, > 1.
        loss_agg_mode: as in `agg_loss`.

    Returns:
        Loss, share of tokens that the clip stops, KL(π_old‖π_θ) by k1, share that the dual clip stops; all 0-d.

    Raises:
        ValueError: a clip constant is missing or outside its range, or shapes differ.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("give cliprange, or both cliprange_low and cliprange_high")

    per_token, statistics = ppo_clip_loss(
        log_prob, old_log_prob, advantages, response_mask, clip_low=low, clip_high=high, clip_c=clip_ratio_c
    )
    return four_tensors(agg_loss(per_token, response_mask, loss_agg_mode), statistics)


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Config = None,
    rollout_is_weights: Tensor | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Compute −w · min(r A, clip(r) A), aggregated; r = π_θ / π_old.

    Args:
        old_log_prob: log π_old, nats; in bypass mode log μ, because the trainer put it there.
        log_prob: log π_θ, nats; carries the gradient.
        advantages: per token.
        response_mask: tokens in the loss, after rejection; all sampled tokens for a loss that rejects by itself.
        loss_agg_mode: as in `agg_loss`.
        config: the actor's. It has clip_ratio, clip_ratio_low, clip_ratio_high and get("clip_ratio_c", 3.0); for the
            newest losses global_batch_info; for bypass losses policy_loss.get("rollout_correction").
        rollout_is_weights: optional; weights π_old / μ. Bypass losses compute their own and ignore these, as verl does.
        verl_parity: clamp the log-ratio in the reported KL to ±20, as in verl.

    Returns:
        Loss, and "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower".

    Raises:
        ValueError: the config is missing, a clip constant is outside its range, or shapes differ.
    """
    actor = checked_actor(config)
    warn_if_vanilla_in_bypass(actor)

    per_token, statistics = ppo_clip_loss(
        log_prob, old_log_prob, advantages, response_mask, **clip_constants(actor), weights=rollout_is_weights
    )
    loss = agg_loss(per_token, response_mask, loss_agg_mode, **actor.global_batch_info)

    clip_fraction, kl, dual_fraction = clip_statistics(statistics).cpu().tolist()
    if verl_parity:
        log_ratio = (old_log_prob - log_prob.detach()).clamp(-SAFETY_BOUND, SAFETY_BOUND)
        kl = float(parity.token_mean(log_ratio, parity.widened_mask(response_mask)))
    return loss, {"actor/pg_clipfrac": clip_fraction, "actor/ppo_kl": kl, "actor/pg_clipfrac_lower": dual_fraction}


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Config = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute −sg(w) · log π_θ · A, aggregated.

    Args:
        rollout_log_prob: log μ, nats; for the reported KL.
        log_prob: log π_θ, nats; carries the gradient.
        advantages: per token.
        response_mask: tokens in the loss, after rejection.
        loss_agg_mode: as in `agg_loss`.
        config: has global_batch_info.
        rollout_is_weights: optional; weights π_θ / μ.

    Returns:
        Loss, and "actor/ppo_kl".

    Raises:
        ValueError: the config is missing, or shapes differ.
    """
    actor = checked_actor(config)
    per_token, statistics = reinforce_loss(
        log_prob, advantages, response_mask, weights=rollout_is_weights, behavior_log_prob=rollout_log_prob
    )
    loss = agg_loss(per_token, response_mask, loss_agg_mode, **actor.global_batch_info)
    return loss, {"actor/ppo_kl": float(statistics.moment("policy_kl")[1].cpu())}


def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Config = None,
    rollout_is_weights: Tensor | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the bypass loss: π_old is μ; rejection, and for REINFORCE the weights, come from π_θ / μ in this call.

    Args:
        old_log_prob: log μ, nats: the trainer put it there.
        log_prob: as in `compute_policy_loss_vanilla`, like the next two.
        advantages: per token.
        response_mask: tokens that the policy sampled.
        loss_agg_mode: as in `agg_loss`.
        config: the actor's; its policy_loss has rollout_correction.
        rollout_is_weights: ignored, as in verl.
        verl_parity: compute verl 0.9.1's numbers; the correction's own `verl_parity` does the same.

    Returns:
        Loss; the loss's metrics and the correction's.

    Raises:
        ValueError: the config has no correction, an option is outside its limits, or shapes differ.
    """
    correction = actor_correction(config, writer="wire_bypass_mode")
    warn_if_not_for_bypass(correction)
    settings = RolloutCorrectionConfig.read(correction, verl_parity=verl_parity)
    check_choice("loss_type", settings.loss_type, ("ppo_clip", "reinforce"))
    weights, mask, correction_metrics = settings.corrected(log_prob, old_log_prob, response_mask, in_loss=True)

    # Divide the kept loss by the counts of the actor's global_batch_info, which are counts before rejection.
    data = old_log_prob, log_prob, advantages, mask, loss_agg_mode, config
    if settings.loss_type == "reinforce":
        loss, metrics = compute_policy_loss_reinforce(*data, weights)
    else:
        # The clipped ratio π_θ / μ is the importance ratio: weights would apply it twice.
        loss, metrics = compute_policy_loss_vanilla(*data, verl_parity=settings.verl_parity)
    return loss, metrics | correction_metrics


def clip_statistics(statistics: Statistics) -> Tensor:
    """Return (3,): share that the clip stops on either side, KL, share that the dual clip stops."""
    mean = {name: statistics.moment(name)[1] for name in statistics.names["moments"]}
    return torch.stack(
        [mean["clip_fraction_high"] + mean["clip_fraction_low"], mean["policy_kl"], mean["clip_fraction_dual"]]
    )


def four_tensors(loss: Tensor, statistics: Statistics) -> FourTensors:
    """Return a clipped loss with its statistics, in the loss's dtype."""
    clip_fraction, kl, dual_fraction = clip_statistics(statistics).to(loss.dtype)
    return loss, clip_fraction, kl, dual_fraction


def clip_constants(config: Config) -> dict[str, Any]:
    """Return ε_low, ε_high and c of verl's actor config, for `ppo_clip_loss`; clip_ratio is the default of both ε."""
    return {
        "clip_low": config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        "clip_high": config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
        "clip_c": config.get("clip_ratio_c", 3.0),
    }


def checked_actor(config: Config) -> Config:
    """Return the actor's configuration.

    Raises:
        ValueError: it is missing.
    """
    if config is None:
        raise ValueError("config is required: it holds the clip constants and global_batch_info")
    return config


def actor_correction(config: Config, *, writer: str) -> Mapping[str, Any]:
    """Return `policy_loss.rollout_correction` of the actor's configuration, which the function named `writer` sets.

    Raises:
        ValueError: the configuration is missing, or contains no correction.
    """
    policy_loss = getattr(checked_actor(config), "policy_loss", None)
    correction: Mapping[str, Any] | None = None if policy_loss is None else policy_loss.get("rollout_correction", None)
    if correction is None:
        raise ValueError(f"config.policy_loss has no rollout_correction; {writer} puts it there")
    return correction
