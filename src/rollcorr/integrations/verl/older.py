"""What the two older generations of verl share: statistics of a level's ratio, before any truncation.

`measured_ratio` takes them from `rollcorr.correct`; `reference_ratio` computes verl's own numbers, for parity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.losses import agg_loss

SUMMARY = ("mean", "std", "min", "max", "ratio_fraction_high", "ratio_fraction_low", "eff_sample_size")
SEQUENCE_SUMMARY = ("mean", "std", "min", "max", "max_deviation", "fraction_high", "fraction_low")


def measured_ratio(metrics: Mapping[str, float]) -> dict[str, float]:
    """The weights' statistics of the registry under their bare names, min and max before truncation.

    Args:
        metrics: of a correction with weights, without a prefix.

    Returns:
        "mean", …, "seq_fraction_low". At sequence levels min and max come from the log weight that was never clamped,
        the maximum capped at e^20.
    """
    names = (*SUMMARY, *(f"seq_{name}" for name in SEQUENCE_SUMMARY))
    found = {name: metrics[f"rollout_is_{name}"] for name in names if f"rollout_is_{name}" in metrics}
    found |= {"min": metrics["rollout_is_raw_min"], "max": metrics["rollout_is_raw_max"]}
    if "rollout_is_log_max" in metrics and metrics["sequence_count"]:
        found["min"] = math.exp(metrics["rollout_is_log_min"])
        found["max"] = math.exp(min(metrics["rollout_is_log_max"], parity.SAFETY_BOUND))
    return found


def reference_ratio(
    log_ratio: Tensor, mask: Tensor, *, level: str, lower: float, upper: float, shares_of_tokens: bool = False
) -> tuple[Tensor, Tensor, parity.Metrics]:
    """The bounded ratio (B, T), where it is out of the band, (B, T) or (B, 1), and verl's statistics of it."""
    log_weight = parity.level_log_ratio(log_ratio, mask, level)
    raw = parity.bounded_ratio(log_weight, mask)
    band = parity.Band(level=level, lower=lower, upper=upper, clip_low=lower, shares_of_tokens=shares_of_tokens)
    unit = log_weight.clamp(-parity.SAFETY_BOUND, parity.SAFETY_BOUND).exp()
    return raw, (unit < lower) | (unit > upper), parity.weight_metrics(raw, raw, log_weight, mask, band)


def rejected_shares(outside: Tensor, mask: Tensor, *, level: str) -> parity.Metrics:
    """verl's shares of rejected tokens and sequences; a row without a token counts as a sequence."""
    touched = (outside & (mask != 0)).any(-1) if level == "token" else outside
    return {"masked_fraction": parity.share(outside, mask), "seq_masked_fraction": parity.mean_of(touched)}


def older_agg_loss(loss: Tensor, loss_mask: Tensor, loss_agg_mode: str) -> Tensor:
    """`agg_loss` over one batch; "seq-mean-token-sum-norm" divided by T alone in 2025."""
    return agg_loss(loss, loss_mask, loss_agg_mode, global_batch_size=1 if loss_agg_mode.endswith("-norm") else None)
