"""What the two older generations of verl share: statistics of a level's ratio, before any truncation.

`measured_ratio` takes them from `rollcorr.correct`; `reference_correction` computes verl's own numbers, for parity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rollcorr.config.correction_options import SAFETY_BOUND
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

    # A sequence's weight overflows long before its log does.
    if "rollout_is_log_max" in metrics and metrics["sequence_count"]:
        found["min"] = math.exp(metrics["rollout_is_log_min"])
        found["max"] = math.exp(min(metrics["rollout_is_log_max"], SAFETY_BOUND))
    return found


def ratio_band(level: str, lower: float, upper: float, *, shares_of_tokens: bool = False) -> parity.Band:
    """A band by which the older releases judged a ratio: std and ESS are of values clipped to both of its ends."""
    return parity.Band(level=level, lower=lower, upper=upper, clip_low=lower, shares_of_tokens=shares_of_tokens)


def reference_correction(
    train: Tensor,
    rollout: Tensor,
    response_mask: Tensor,
    *,
    weighting: parity.Band | None,
    ceiling: float | None,
    rejection: tuple[str, parity.Band] | None,
    veto: float | None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """An older release's own numbers.

    Args:
        train: log π, (B, T), nats.
        rollout: log μ.
        response_mask: non-zero on tokens that the policy sampled.
        weighting: level and bounds of the weights; None computes none.
        ceiling: where weights are cut; None leaves them as they are.
        rejection: the band that a ratio must lie in, after the prefix of its metrics; None for no band.
        veto: reject a sequence with a token of ratio below this; None for no veto.

    Returns:
        Weights or None; the mask in its own dtype; metrics without "rollout_corr/".

    Raises:
        ValueError: shapes that differ, or a batch without a token.
    """
    wide_train, wide_rollout, mask = parity.prepared(train, rollout, response_mask)
    log_ratio = wide_train - wide_rollout
    weights, kept = None, mask != 0
    metrics: parity.Metrics = {}

    if weighting is not None:
        raw, _, own = _reference_ratio(log_ratio, mask, weighting)
        bounded = raw if ceiling is None else raw.clamp(max=ceiling)
        weights = bounded.to(torch.promote_types(train.dtype, response_mask.dtype))
        metrics |= parity.prefixed("rollout_is_", own)

    if rejection is not None:
        prefix, band = rejection
        _, outside, own = _reference_ratio(log_ratio, mask, band)
        kept = kept & ~outside
        metrics |= parity.prefixed(prefix, own | _rejected_shares(outside, mask, level=band.level))

    spared, veto_metrics = parity.veto(log_ratio, mask, veto)
    kept = kept & spared
    metrics |= veto_metrics | parity.policy_gap(wide_train, wide_rollout, mask)
    return weights, kept.to(response_mask.dtype), parity.to_floats(metrics)


def _reference_ratio(log_ratio: Tensor, mask: Tensor, band: parity.Band) -> tuple[Tensor, Tensor, parity.Metrics]:
    """The bounded ratio (B, T), where it is out of the band, (B, T) or (B, 1), and verl's statistics of it."""
    log_weight = parity.level_log_ratio(log_ratio, mask, band.level)
    raw = parity.bounded_ratio(log_weight, mask)
    unit = log_weight.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    outside = (unit < band.lower) | (unit > band.upper)
    return raw, outside, parity.weight_metrics(raw, raw, log_weight, mask, band)


def _rejected_shares(outside: Tensor, mask: Tensor, *, level: str) -> parity.Metrics:
    """verl's shares of rejected tokens and sequences; a row without a token counts as a sequence."""
    touched = (outside & (mask != 0)).any(-1) if level == "token" else outside
    return {"masked_fraction": parity.share(outside, mask), "seq_masked_fraction": parity.mean_of(touched)}


def older_agg_loss(loss: Tensor, loss_mask: Tensor, loss_agg_mode: str) -> Tensor:
    """`agg_loss` over one batch; "seq-mean-token-sum-norm" divided by T alone in 2025."""
    return agg_loss(loss, loss_mask, loss_agg_mode, global_batch_size=1 if loss_agg_mode.endswith("-norm") else None)
