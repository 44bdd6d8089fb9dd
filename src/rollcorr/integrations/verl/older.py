"""What the two older generations of verl share: statistics of a level's ratio, before any truncation.

`measured_ratio` takes them from `rollcorr.correct`; `reference_correction` computes verl's own numbers, for parity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.generations import OLDER_CRITERIA
from rollcorr.integrations.verl import parity

LEVELS: dict[object, Any] = {criterion: level for level, criterion in OLDER_CRITERIA.items()}
"""The level of a rejection band, by the criterion that it becomes."""

SUMMARY = (
    *("mean", "std", "min", "max", "ratio_fraction_high", "ratio_fraction_low", "eff_sample_size"),
    *("seq_mean", "seq_std", "seq_min", "seq_max", "seq_max_deviation", "seq_fraction_high", "seq_fraction_low"),
)


def measured_ratio(metrics: Mapping[str, float]) -> dict[str, float]:
    """The weights' statistics of the registry under their bare names, min and max before truncation.

    Args:
        metrics: of a correction with weights, without a prefix.

    Returns:
        "mean", …, "seq_fraction_low". At sequence levels min and max come from the log weight that was never clamped,
        the maximum capped at e^20.
    """
    found = {name: metrics[f"rollout_is_{name}"] for name in SUMMARY if f"rollout_is_{name}" in metrics}
    found |= {"min": metrics["rollout_is_raw_min"], "max": metrics["rollout_is_raw_max"]}

    # A sequence's weight overflows long before its log does.
    if "rollout_is_log_max" in metrics and metrics["sequence_count"]:
        found["min"] = math.exp(metrics["rollout_is_log_min"])
        found["max"] = math.exp(min(metrics["rollout_is_log_max"], parity.SAFETY_BOUND))
    return found


def ratio_band(level: str, lower: float, upper: float, *, shares_of_tokens: bool = False) -> parity.Band:
    """A band by which the older releases judged a ratio: std and ESS are of values clipped to both of its ends."""
    return parity.Band(level=level, lower=lower, upper=upper, clip_low=lower, shares_of_tokens=shares_of_tokens)


def reference_correction(
    train: Tensor,
    rollout: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    *,
    weighting: parity.Band | None,
    rejection_prefix: str,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """An older release's own numbers.

    Args:
        train: log π, (B, T), nats.
        rollout: log μ.
        response_mask: non-zero on tokens that the policy sampled.
        config: its ceiling cuts weights, its criteria are bands that a ratio must lie in, and its veto rejects.
        weighting: level and bounds that describe the weights; None computes none.
        rejection_prefix: stands before the names of a band's metrics.

    Returns:
        Weights or None; the mask in its own dtype; metrics without "rollout_corr/".

    Raises:
        ValueError: shapes that differ, or a batch without a token.
    """
    wide_train, wide_rollout, mask = parity.prepared(train, rollout, response_mask)
    log_ratio = wide_train - wide_rollout
    weights, kept = None, mask != 0
    metrics: parity.Metrics = {}

    for criterion in config.criteria:
        band = ratio_band(LEVELS[criterion.name], criterion.lower or 0.0, criterion.upper or math.inf)
        _, outside, own = _reference_ratio(log_ratio, mask, band)
        kept = kept & ~outside

        # A row without a token counts as a sequence.
        touched = (outside & (mask != 0)).any(-1) if band.level == "token" else outside
        own["masked_fraction"] = parity.token_mean(outside.double(), mask)
        own["seq_masked_fraction"] = touched.double().mean()
        metrics |= parity.prefixed(rejection_prefix, own)

    if weighting is not None:
        raw, _, own = _reference_ratio(log_ratio, mask, weighting)
        bounded = raw if config.is_upper is None else raw.clamp(max=config.is_upper)
        weights = bounded.to(torch.promote_types(train.dtype, response_mask.dtype))
        metrics |= parity.prefixed("rollout_is_", own)

    spared, veto_metrics = parity.veto(log_ratio, mask, config.rollout_token_veto_threshold)
    kept = kept & spared
    metrics |= veto_metrics | parity.policy_gap(wide_train, wide_rollout, mask)
    return weights, kept.to(response_mask.dtype), parity.to_floats(metrics)


def _reference_ratio(log_ratio: Tensor, mask: Tensor, band: parity.Band) -> tuple[Tensor, Tensor, parity.Metrics]:
    """The bounded ratio (B, T), where it is out of the band, (B, T) or (B, 1), and verl's statistics of it."""
    log_weight, raw = parity.level_ratio(log_ratio, mask, band.level)
    unit = log_weight.clamp(-parity.SAFETY_BOUND, parity.SAFETY_BOUND).exp()
    outside = (unit < band.lower) | (unit > band.upper)
    return raw, outside, parity.weight_metrics(raw, raw, log_weight, mask, band)
