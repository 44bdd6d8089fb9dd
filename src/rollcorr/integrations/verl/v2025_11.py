"""verl's rollout-correction functions of November 2025, on this library.

One band for rejection, at token, sequence or geometric level, and a veto; the pure loss has a function of its own, and
losses return four 0-d tensors. `rollcorr.integrations.verl` has the newest; docs/coming_from/verl.md says how to
switch. The options are those of `RolloutCorrectionConfig` here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rollcorr.core.losses import ppo_clip_loss, reinforce_loss
from rollcorr.integrations.verl import correction as newest
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.bypass import take_rollout_log_probs, tell_actor
from rollcorr.integrations.verl.correction import (
    Batch,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    weight_batch,
)
from rollcorr.integrations.verl.losses import (
    Config,
    FourTensors,
    actor_correction,
    agg_loss,
    checked_actor,
    clip_constants,
    compute_policy_loss,
    four_tensors,
)
from rollcorr.integrations.verl.older import RolloutCorrectionConfig, ratio_band

__all__ = [
    "RolloutCorrectionConfig",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_policy_loss",
    "compute_policy_loss_rollout_correction_wrapper",
    "compute_policy_loss_vanilla",
    "compute_policy_loss_with_rollout_correction",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "maybe_apply_rollout_correction",
]


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | None = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | None = 2.0,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Batch | None, Tensor, dict[str, float]]:
    """Weights w(π/μ), the mask of what stays in the loss, and every metric. Arguments: see the module.

    Args:
        old_log_prob: log π of the sampled tokens, nats, (B, T).
        rollout_log_prob: log μ, nats, (B, T).
        response_mask: non-zero on tokens that the policy sampled, (B, T).
        rollout_is: level of the weights, "token" or "sequence"; None for none.
        rollout_is_threshold: their ceiling; None computes no weights.
        rollout_rs: level of the rejection band, "token", "sequence" or "geometric"; None for none.
        rollout_rs_threshold: upper end of the band, on the ratio.
        rollout_rs_threshold_lower: its lower end; None is 1 / upper.
        rollout_token_veto_threshold: reject a sequence with a token of ratio below this.
        verl_parity: compute that release's numbers.

    Returns:
        `.batch["rollout_is_weights"]`, or None; the mask in its own dtype; metrics under "rollout_corr/", with the
        statistics of the rejection level's ratio as rollout_rs_mean, rollout_rs_std, ….

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option outside its limits, shapes that differ, or, with `verl_parity`, a batch without a token.
    """
    settings = RolloutCorrectionConfig(
        rollout_is,
        rollout_is_threshold,
        rollout_rs,
        rollout_rs_threshold,
        rollout_rs_threshold_lower,
        rollout_token_veto_threshold,
        verl_parity=verl_parity,
    )
    weights, mask, metrics = settings.corrected(old_log_prob, rollout_log_prob, response_mask)
    return None if weights is None else weight_batch(weights), mask, metrics


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float = 2.0,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights alone: min(exp ℓ, threshold), 0 at padding; metrics without prefix. `log_ratio` is log π − log μ, nats.

    Args:
        log_ratio: log π − log μ, nats, (B, T).
        response_mask: non-zero on valid tokens, (B, T).
        rollout_is: level of the weights, "token" or "sequence".
        rollout_is_threshold: their ceiling.
        verl_parity: compute that release's numbers.

    Raises:
        TypeError: an option of the wrong type; None is one.
        ValueError: an option outside its limits, or shapes that differ.
    """
    if rollout_is is None or rollout_is_threshold is None:
        raise TypeError(f"a level and a ceiling are needed; got {rollout_is!r} and {rollout_is_threshold!r}")
    return newest.weights_alone(
        log_ratio,
        response_mask,
        RolloutCorrectionConfig(rollout_is, rollout_is_threshold, verl_parity=verl_parity),
    )


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token",
    rollout_rs_threshold: float | None = None,
    rollout_rs_threshold_lower: float | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The mask alone: response tokens whose ratio, at the level, lies inside the band; metrics without prefix.

    `log_ratio` is log π − log μ, nats.

    Args:
        log_ratio: log π − log μ, nats, (B, T).
        response_mask: non-zero on valid tokens, (B, T).
        rollout_rs: level of the rejection band, "token", "sequence" or "geometric"; None for none.
        rollout_rs_threshold: upper end of the band, on the ratio.
        rollout_rs_threshold_lower: its lower end; None is 1 / upper.
        verl_parity: compute that release's numbers.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option outside its limits, no threshold, or shapes that differ.
    """
    if rollout_rs is None or rollout_rs_threshold is None:
        raise ValueError(f"a level and an upper end are needed; got {rollout_rs!r} and {rollout_rs_threshold!r}")
    settings = RolloutCorrectionConfig(
        rollout_is=None,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_rs_threshold_lower=rollout_rs_threshold_lower,
        verl_parity=verl_parity,
    )
    return newest.mask_alone(log_ratio, response_mask, settings)


def compute_is_metrics(
    rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    *,
    verl_parity: bool = False,
) -> dict[str, float]:
    """Statistics of weights before truncation, computed elsewhere; without a prefix.

    Args:
        rollout_is_weights: the bounded ratio, (B, T), 0 at padding.
        log_ratio_for_metrics: as in `rollcorr.integrations.verl.compute_is_metrics`, like the next two.
        response_mask: non-zero on valid tokens.
        rollout_is: their level.
        rollout_is_threshold: C: above it counts as high, below 1/C as low.
        verl_parity: compute that release's numbers.

    Raises:
        ValueError: shapes that differ, or, with `verl_parity`, a batch without a token.
    """
    weights = rollout_is_weights, rollout_is_weights, log_ratio_for_metrics
    if not verl_parity:
        return newest.compute_is_metrics(*weights, response_mask, rollout_is, rollout_is_threshold)
    return parity.metrics_of_given_weights(
        *weights, response_mask, ratio_band(rollout_is, 1 / rollout_is_threshold, rollout_is_threshold)
    )


def compute_rollout_correction_and_add_to_batch(
    batch: Batch, rollout_corr_config: Mapping[str, Any], *, verl_parity: bool = False
) -> tuple[Batch, dict[str, float]]:
    """The same as that of `rollcorr.integrations.verl`, with the options of November 2025.

    Args:
        batch: with old_log_probs, rollout_log_probs and response_mask, each (B, T).
        rollout_corr_config: the options, as `RolloutCorrectionConfig` here has them.
        verl_parity: compute that release's numbers.
    """
    return newest.corrected_batch(batch, RolloutCorrectionConfig.read(rollout_corr_config, verl_parity=verl_parity))


def maybe_apply_rollout_correction(
    batch: Batch,
    rollout_corr_config: Mapping[str, Any] | None = None,
    policy_loss_config: Any = None,  # noqa: ANN401 (an OmegaConf node or a dictionary)
) -> bool:
    """In bypass mode, take the rollout log-probs as old log-probs; say whether old log-probs must be computed.

    Args:
        batch: has rollout_log_probs; gets old_log_probs.
        rollout_corr_config: any mapping with the keys of November 2025; None means no bypass.
        policy_loss_config: for the pure loss, gets loss_mode "rollout_correction" and rollout_correction.

    Raises:
        ValueError: bypass without rollout_log_probs in the batch.
    """
    settings = RolloutCorrectionConfig.read(rollout_corr_config or {})
    if not settings.bypass_old_logprob_for_rollout:
        return True

    take_rollout_log_probs(batch, option="bypass_old_logprob_for_rollout")
    if settings.use_pure_rollout_correction:
        tell_actor(policy_loss_config, "rollout_correction", rollout_corr_config)
    return False


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
    per_token, statistics = ppo_clip_loss(
        log_prob,
        old_log_prob,
        advantages,
        response_mask,
        **clip_constants(checked_actor(config)),
        weights=rollout_is_weights,
    )
    return four_tensors(_agg_loss(per_token, response_mask, loss_agg_mode), statistics)


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
    settings = RolloutCorrectionConfig(
        rollout_is,
        rollout_is_threshold,
        rollout_rs,
        rollout_rs_threshold,
        rollout_rs_threshold_lower,
        rollout_token_veto_threshold,
        verl_parity=verl_parity,
    )
    return _pure_loss(
        rollout_log_prob, log_prob, advantages, eos_mask, loss_agg_mode, settings, scale=loss_scale_factor
    )


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
    loss = _agg_loss(per_token, mask, loss_agg_mode) * scale
    nothing = loss.new_zeros(())
    return loss, nothing, statistics.moment("policy_kl")[1].to(loss.dtype), nothing


def _agg_loss(loss: Tensor, loss_mask: Tensor, loss_agg_mode: str) -> Tensor:
    """`agg_loss` over one batch; "seq-mean-token-sum-norm" divided by T alone in that release."""
    return agg_loss(loss, loss_mask, loss_agg_mode, global_batch_size=1 if loss_agg_mode.endswith("-norm") else None)
