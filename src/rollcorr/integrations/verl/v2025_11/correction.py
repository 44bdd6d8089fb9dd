"""Weights, rejection and metrics with the names, arguments and return values of verl in November 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import Level
from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.core.metric_registry import PREFIX
from rollcorr.correction.rollout_correction import correct
from rollcorr.integrations.verl import correction as newest
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.batch import Batch, new_keys_allowed, weight_batch
from rollcorr.integrations.verl.bypass import warn_if_set_too_late
from rollcorr.integrations.verl.older import measured_ratio, reference_ratio, rejected_shares
from rollcorr.integrations.verl.v2025_11.config import RolloutCorrectionConfig, checked

_LEVELS: dict[str, Level] = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}


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
    """Weights w(π/μ), the mask of what stays in the loss, and every metric.

    Args:
        old_log_prob: log π of the sampled tokens, nats.
        rollout_log_prob: log μ, nats.
        response_mask: non-zero on tokens that the policy sampled.
        rollout_is: level of the weights; None for none.
        rollout_is_threshold: their ceiling; None computes none.
        rollout_rs: level of the rejection band; None for none.
        rollout_rs_threshold: its upper end.
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
    weights, mask, metrics = corrected(old_log_prob, rollout_log_prob, response_mask, config, verl_parity=verl_parity)
    return None if weights is None else weight_batch(weights), mask, metrics


def corrected(
    train: Tensor, rollout: Tensor, response_mask: Tensor, config: CheckedConfig, *, verl_parity: bool
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights or None, the mask in its own dtype, and prefixed metrics: what the public functions wrap."""
    if verl_parity:
        return _reference(train, rollout, response_mask, config)
    correction = correct(train, rollout, response_mask, config)
    metrics = {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}
    metrics |= correction.metrics(prefix="")
    for criterion in config.criteria:
        ratio = CheckedConfig(
            rollout_is=_LEVELS[criterion.scope],
            rollout_is_threshold=None,
            rollout_rs=config.rollout_rs,
            rollout_rs_threshold=config.rollout_rs_threshold,
        )
        ratio_metrics = correct(train, rollout, response_mask, ratio).metrics(prefix="")
        metrics |= {f"rollout_rs_{name}": value for name, value in measured_ratio(ratio_metrics).items()}
    named = {f"{PREFIX}{name}": value for name, value in metrics.items()}
    return correction.weights, correction.loss_mask.to(response_mask.dtype), named


def _reference(
    train: Tensor, rollout: Tensor, response_mask: Tensor, config: CheckedConfig
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """The same with that release's own numbers."""
    wide_train, wide_rollout, mask = parity.prepared(train, rollout, response_mask)
    log_ratio = wide_train - wide_rollout
    weights, kept = None, mask != 0
    metrics: parity.Metrics = {}
    if config.rollout_is is not None and config.is_upper is not None:
        upper = config.is_upper
        raw, _, own = reference_ratio(log_ratio, mask, level=config.rollout_is, lower=1 / upper, upper=upper)
        weights = raw.clamp(max=upper).to(torch.promote_types(train.dtype, response_mask.dtype))
        metrics |= parity.prefixed("rollout_is_", own)
    for criterion in config.criteria:
        level, band = _LEVELS[criterion.scope], (criterion.lower or 0.0, criterion.upper or float("inf"))
        _, outside, own = reference_ratio(log_ratio, mask, level=level, lower=band[0], upper=band[1])
        kept = kept & ~outside
        metrics |= parity.prefixed("rollout_rs_", own | rejected_shares(outside, mask, level=level))
    spared, veto_metrics = parity.veto(log_ratio, mask, config.rollout_token_veto_threshold)
    metrics |= veto_metrics | parity.policy_gap(wide_train, wide_rollout, mask)
    return weights, (kept & spared).to(response_mask.dtype), parity.to_floats(metrics, prefix=PREFIX)


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float = 2.0,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights alone: min(exp ℓ, threshold), 0 at padding; metrics without prefix.

    Args:
        log_ratio: log π − log μ, nats.
        response_mask: non-zero on valid tokens.
        rollout_is: "token", "sequence" or "geometric".
        rollout_is_threshold: the ceiling.
        verl_parity: compute that release's numbers.

    Raises:
        TypeError: an option of the wrong type; None is one.
        ValueError: an option outside its limits, or shapes that differ.
    """
    if rollout_is is None or rollout_is_threshold is None:
        raise TypeError(f"a level and a ceiling are needed; got {rollout_is!r} and {rollout_is_threshold!r}")
    config = checked({"rollout_is": rollout_is, "rollout_is_threshold": rollout_is_threshold})
    zeros = torch.zeros_like(log_ratio)
    weights, _, metrics = corrected(log_ratio, zeros, response_mask, config, verl_parity=verl_parity)
    assert weights is not None
    return weights, newest.family(metrics, newest.WEIGHT_METRICS)


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

    Args:
        log_ratio: log π − log μ, nats.
        response_mask: non-zero on valid tokens.
        rollout_rs: "token", "sequence" or "geometric".
        rollout_rs_threshold: upper end of the band; needed.
        rollout_rs_threshold_lower: lower end; None is 1 / upper.
        verl_parity: compute that release's numbers.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option outside its limits, no threshold, or shapes that differ.
    """
    if rollout_rs is None or rollout_rs_threshold is None:
        raise ValueError(f"a level and an upper end are needed; got {rollout_rs!r} and {rollout_rs_threshold!r}")
    config = checked(
        {
            "rollout_is": None,
            "rollout_rs": rollout_rs,
            "rollout_rs_threshold": rollout_rs_threshold,
            "rollout_rs_threshold_lower": rollout_rs_threshold_lower,
        }
    )
    zeros = torch.zeros_like(log_ratio)
    _, mask, metrics = corrected(log_ratio, zeros, response_mask, config, verl_parity=verl_parity)
    return mask, newest.family(metrics, newest.REJECTION_METRICS)


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
        log_ratio_for_metrics: the log weight before any clamp: (B, T) at token level, else (B, 1).
        response_mask: non-zero on valid tokens, (B, T).
        rollout_is: their level.
        rollout_is_threshold: C: above it counts as high, below 1/C as low.
        verl_parity: compute that release's numbers.

    Raises:
        ValueError: shapes that differ, or, with `verl_parity`, a batch without a token.
    """
    if not verl_parity:
        raw = rollout_is_weights
        return newest.compute_is_metrics(
            raw, raw, log_ratio_for_metrics, response_mask, rollout_is, rollout_is_threshold
        )
    parity.check_tokens(response_mask)
    lower, mask = 1 / rollout_is_threshold, parity.widened_mask(response_mask)
    band = parity.Band(level=rollout_is, lower=lower, upper=rollout_is_threshold, clip_low=lower)
    metrics = parity.weight_metrics(rollout_is_weights, rollout_is_weights, log_ratio_for_metrics, mask, band)
    return parity.to_floats(metrics, prefix="rollout_is_")


def compute_rollout_correction_and_add_to_batch(
    batch: Batch, rollout_corr_config: Mapping[str, Any], *, verl_parity: bool = False
) -> tuple[Batch, dict[str, float]]:
    """Replace the batch's response_mask by the loss mask, and add rollout_is_weights when weights are asked for.

    Args:
        batch: has old_log_probs, rollout_log_probs and response_mask, each (B, T).
        rollout_corr_config: any mapping with the keys of November 2025.
        verl_parity: compute that release's numbers; the config's own `verl_parity` does the same.

    Returns:
        The batch, and every metric under "rollout_corr/".

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an unknown key, an option outside its limits, or shapes that differ.
    """
    settings = RolloutCorrectionConfig.read(rollout_corr_config)
    tensors = batch.batch
    weights, tensors["response_mask"], metrics = corrected(
        tensors["old_log_probs"],
        tensors["rollout_log_probs"],
        tensors["response_mask"],
        settings.to_config(),
        verl_parity=verl_parity or settings.verl_parity,
    )
    return batch if weights is None else batch.union(weight_batch(weights)), metrics


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
    if "rollout_log_probs" not in batch.batch:
        raise ValueError(
            "bypass_old_logprob_for_rollout=True needs rollout_log_probs in the batch; set "
            "rollout.calculate_log_probs=true"
        )
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    if settings.use_pure_rollout_correction:
        warn_if_set_too_late(policy_loss_config, "rollout_correction")
        with new_keys_allowed(policy_loss_config):
            policy_loss_config["loss_mode"] = "rollout_correction"
            policy_loss_config["rollout_correction"] = rollout_corr_config
    return False
