"""Weights, rejection and metrics with the names, arguments and return values of verl in November 2025.

Tensors are those of `rollcorr.integrations.verl`; the options are those of `RolloutCorrectionConfig` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.core.metric_registry import PREFIX
from rollcorr.correction.rollout_correction import correct
from rollcorr.integrations.verl import correction as newest
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.batch import Batch, weight_batch
from rollcorr.integrations.verl.bypass import take_rollout_log_probs, tell_actor
from rollcorr.integrations.verl.older import measured_ratio, ratio_band, reference_correction
from rollcorr.integrations.verl.trainer import corrected_batch
from rollcorr.integrations.verl.v2025_11.config import BAND_LEVELS, RolloutCorrectionConfig


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
    weights, mask, metrics = corrected(old_log_prob, rollout_log_prob, response_mask, settings)
    return None if weights is None else weight_batch(weights), mask, metrics


def corrected(
    train: Tensor, rollout: Tensor, response_mask: Tensor, settings: RolloutCorrectionConfig, *, in_loss: bool = False
) -> newest.Corrected:
    """Correct, as `rollcorr.integrations.verl.correction.corrected` does."""
    config = settings.to_config()
    if settings.verl_parity:
        weights, mask, metrics = _reference(train, rollout, response_mask, config)
        mask = response_mask if config.only_measures and not in_loss else mask
        return weights, mask, {f"{PREFIX}{name}": value for name, value in metrics.items()}

    correction = correct(train, rollout, response_mask, config, densities=True)
    metrics = {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}
    metrics |= correction.metrics(prefix="")

    # That release also reported the ratio that the band judges. Weights without a ceiling measure it.
    for criterion in config.criteria:
        ratio = CheckedConfig(
            rollout_is=BAND_LEVELS[criterion.scope],
            rollout_is_threshold=None,
            rollout_rs=config.rollout_rs,
            rollout_rs_threshold=config.rollout_rs_threshold,
        )
        ratio_metrics = correct(train, rollout, response_mask, ratio, densities=True).metrics(prefix="")
        metrics |= {f"rollout_rs_{name}": value for name, value in measured_ratio(ratio_metrics).items()}

    named = {f"{PREFIX}{name}": value for name, value in metrics.items()}
    mask = response_mask if config.only_measures and not in_loss else correction.loss_mask.to(response_mask.dtype)
    return correction.weights, mask, named


def _reference(train: Tensor, rollout: Tensor, response_mask: Tensor, config: CheckedConfig) -> newest.Corrected:
    """That release's own numbers. It has one band at the most."""
    weighting = rejection = None
    if config.rollout_is is not None and config.is_upper is not None:
        weighting = ratio_band(config.rollout_is, 1 / config.is_upper, config.is_upper)
    for criterion in config.criteria:
        ends = criterion.lower or 0.0, criterion.upper or float("inf")
        rejection = "rollout_rs_", ratio_band(BAND_LEVELS[criterion.scope], *ends)

    data, veto = (train, rollout, response_mask), config.rollout_token_veto_threshold
    return reference_correction(*data, weighting=weighting, ceiling=config.is_upper, rejection=rejection, veto=veto)


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
    return newest.weights_alone(log_ratio, response_mask, settings, corrected)


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
    return newest.mask_alone(log_ratio, response_mask, settings, corrected)


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
    return parity.to_floats(parity.metrics_of_given_weights(*weights, response_mask, band))


def compute_rollout_correction_and_add_to_batch(
    batch: Batch, rollout_corr_config: Mapping[str, Any], *, verl_parity: bool = False
) -> tuple[Batch, dict[str, float]]:
    """The same as that of `rollcorr.integrations.verl`, with the options of November 2025.

    Args:
        batch: with old_log_probs, rollout_log_probs and response_mask, each (B, T).
        rollout_corr_config: the options, as `RolloutCorrectionConfig` here has them.
        verl_parity: compute that release's numbers.
    """
    return corrected_batch(batch, RolloutCorrectionConfig.read(rollout_corr_config, verl_parity=verl_parity), corrected)


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
