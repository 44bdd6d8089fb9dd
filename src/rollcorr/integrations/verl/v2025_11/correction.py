"""Weights, rejection and metrics with the names, arguments and return values of verl in November 2025.

Tensors are those of `rollcorr.integrations.verl`; the options are those of `RolloutCorrectionConfig` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rollcorr.integrations.verl import correction as newest
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.batch import Batch, weight_batch
from rollcorr.integrations.verl.bypass import take_rollout_log_probs, tell_actor
from rollcorr.integrations.verl.older import ratio_band
from rollcorr.integrations.verl.v2025_11.config import RolloutCorrectionConfig


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
    band = rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower
    settings = RolloutCorrectionConfig(
        rollout_is, rollout_is_threshold, *band, rollout_token_veto_threshold, verl_parity=verl_parity
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
    settings = RolloutCorrectionConfig(rollout_is, rollout_is_threshold, verl_parity=verl_parity)
    return newest.weights_alone(log_ratio, response_mask, settings)


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
    band = ratio_band(rollout_is, 1 / rollout_is_threshold, rollout_is_threshold)
    return parity.metrics_of_given_weights(*weights, response_mask, band)


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
    settings = None if rollout_corr_config is None else RolloutCorrectionConfig.read(rollout_corr_config)
    if settings is None or not settings.bypass_old_logprob_for_rollout:
        return True

    take_rollout_log_probs(batch, option="bypass_old_logprob_for_rollout")
    if settings.use_pure_rollout_correction:
        tell_actor(policy_loss_config, "rollout_correction", rollout_corr_config)
    return False
