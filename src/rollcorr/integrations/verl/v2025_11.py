"""verl's rollout-correction functions of November 2025, on this library.

One band for rejection, at token, sequence or geometric level, and a veto; the pure loss is a separate function, and
losses return four 0-d tensors. `rollcorr.integrations.verl` contains the newest functions; docs/coming_from/verl.md
describes the switch. This module's `RolloutCorrectionConfig` lists the options.
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
    """Compute weights w(π/μ), the loss mask, and every metric.

    Args:
        old_log_prob: log π of the sampled tokens, nats, (B, T).
        rollout_log_prob: log μ, nats, (B, T).
        response_mask: non-zero on tokens that the policy sampled, (B, T).
        rollout_is: optional; level of the weights, "token" or "sequence".
        rollout_is_threshold: their ceiling; None disables weights.
        rollout_rs: optional; level of the rejection band, "token", "sequence" or "geometric".
        rollout_rs_threshold: upper end of the band, on the ratio.
        rollout_rs_threshold_lower: its lower end; defaults to 1 / upper.
        rollout_token_veto_threshold: reject a sequence with a token of ratio below this.
        verl_parity: compute that release's numbers.

    Returns:
        `.batch["rollout_is_weights"]`, or None; the mask in its own dtype; metrics under "rollout_corr/", with the
        statistics of the rejection level's ratio as rollout_rs_mean, rollout_rs_std, ….

    Raises:
        TypeError: an option's type is invalid.
        ValueError: an option is outside its limits, shapes differ, or, with `verl_parity`, the batch has no token.
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
    """Compute weights min(exp ℓ, threshold), 0 at padding, and their metrics without prefix.

    Args:
        log_ratio: log π − log μ, nats, (B, T).
        response_mask: non-zero on valid tokens, (B, T).
        rollout_is: level of the weights, "token" or "sequence".
        rollout_is_threshold: their ceiling.
        verl_parity: compute that release's numbers.

    Raises:
        TypeError: an option is None, or its type is invalid.
        ValueError: an option is outside its limits, or shapes differ.
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
    """Compute the mask of response tokens whose ratio, at the level, lies inside the band; metrics without prefix.

    Args:
        log_ratio: log π − log μ, nats, (B, T).
        response_mask: non-zero on valid tokens, (B, T).
        rollout_rs: optional; level of the rejection band, "token", "sequence" or "geometric".
        rollout_rs_threshold: upper end of the band, on the ratio.
        rollout_rs_threshold_lower: its lower end; defaults to 1 / upper.
        verl_parity: compute that release's numbers.

    Raises:
        TypeError: an option's type is invalid.
        ValueError: an option is outside its limits, the threshold is missing, or shapes differ.
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
    """Compute statistics of given weights before truncation, without a prefix.

    Args:
        rollout_is_weights: the bounded ratio, (B, T), 0 at padding.
        log_ratio_for_metrics: as in `rollcorr.integrations.verl.compute_is_metrics`, like the next two.
        response_mask: non-zero on valid tokens.
        rollout_is: their level.
        rollout_is_threshold: C: above it counts as high, below 1/C as low.
        verl_parity: compute that release's numbers.

    Raises:
        ValueError: shapes differ, or, with `verl_parity`, the batch has no token.
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
    """Correct a batch as in `rollcorr.integrations.verl`, with the options of November 2025.

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
    """In bypass mode, use the rollout log-probs as old log-probs; return whether old log-probs must be computed.

    Args:
        batch: has rollout_log_probs; gets old_log_probs.
        rollout_corr_config: any mapping with the keys of November 2025; None disables bypass mode.
        policy_loss_config: for the pure loss, gets loss_mode "rollout_correction" and rollout_correction.

    Raises:
        ValueError: bypass mode is on, and the batch has no rollout_log_probs.
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
    """Compute −w · min(r A, clip(r) A), aggregated over this batch; r = π_θ / π_old.

    Args:
        old_log_prob: as in `rollcorr.integrations.verl.compute_policy_loss_vanilla`, like the next three.
        log_prob: log π_θ, nats.
        advantages: per token.
        response_mask: tokens in the loss, after rejection.
        loss_agg_mode: as in `agg_loss`; "seq-mean-token-sum-norm" is Σ / T.
        config: the actor's, with its clip constants.
        rollout_is_weights: optional; weights π_old / μ.

    Returns:
        Loss, share of tokens that the clip stops, KL(π_old‖π_θ), share that the dual clip stops.

    Raises:
        ValueError: the config is missing, a clip constant is outside its range, or shapes differ.
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
    """Compute the pure loss: −sg(w) · log π_θ · A over kept tokens, with w and the mask from π_θ / μ.

    Args:
        rollout_log_prob: log μ, nats.
        log_prob: log π_θ, nats; carries the gradient. The weights carry no gradient.
        advantages: per token.
        eos_mask: non-zero on tokens that the policy sampled.
        loss_agg_mode: as in `compute_policy_loss_vanilla`.
        loss_scale_factor: multiplies the loss.
        rollout_is: as in `RolloutCorrectionConfig`, like the options after it.
        rollout_is_threshold: ceiling of the weights.
        rollout_rs: level of the rejection band.
        rollout_rs_threshold: upper end of the band; defaults to the ceiling of the weights.
        rollout_rs_threshold_lower: lower end of the band.
        rollout_token_veto_threshold: the veto.
        verl_parity: compute that release's numbers; there the veto counts only with a rejection band.

    Returns:
        Loss, 0, KL(μ‖π_θ) over kept tokens, 0.

    Raises:
        TypeError: an option's type is invalid.
        ValueError: an option is outside its limits, or shapes differ.
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
    return _reinforce_loss(
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
    """Return `compute_policy_loss_with_rollout_correction` for the actor, with the options of its config.

    Args:
        old_log_prob: log μ, nats: the trainer put it there.
        log_prob: log π_θ, nats; carries the gradient.
        advantages: per token.
        response_mask: tokens that the policy sampled.
        loss_agg_mode: as in `compute_policy_loss_vanilla`.
        config: the actor's; its policy_loss has rollout_correction.
        rollout_is_weights: ignored, as in verl.

    Raises:
        TypeError: an option's type is invalid.
        ValueError: the config has no correction, an option is outside its limits, or shapes differ.
    """
    settings = RolloutCorrectionConfig.read(actor_correction(config, writer="maybe_apply_rollout_correction"))

    # The trainer has applied the operating mode already; the loss reads only the correction.
    alone = dataclasses.replace(settings, bypass_old_logprob_for_rollout=False, use_pure_rollout_correction=False)
    return _reinforce_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, alone, scale=1.0)


def _reinforce_loss(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    settings: RolloutCorrectionConfig,
    *,
    scale: float,
) -> FourTensors:
    """Compute the REINFORCE loss with the weights and the mask of π_θ / μ."""
    weights, mask, _ = settings.corrected(log_prob, rollout_log_prob, response_mask, in_loss=True)

    # That release read the mask only with a band, so a veto without a band never reached its loss.
    if settings.verl_parity and settings.rollout_rs is None:
        mask = response_mask

    per_token, statistics = reinforce_loss(
        log_prob, advantages, mask, weights=weights, behavior_log_prob=rollout_log_prob
    )
    loss = _agg_loss(per_token, mask, loss_agg_mode) * scale
    nothing = loss.new_zeros(())
    return loss, nothing, statistics.moment("policy_kl")[1].to(loss.dtype), nothing


def _agg_loss(loss: Tensor, loss_mask: Tensor, loss_agg_mode: str) -> Tensor:
    """Return `agg_loss` over one batch; "seq-mean-token-sum-norm" divided only by T in that release."""
    return agg_loss(loss, loss_mask, loss_agg_mode, global_batch_size=1 if loss_agg_mode.endswith("-norm") else None)
