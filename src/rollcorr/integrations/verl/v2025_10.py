"""verl's rollout importance sampling of October 2025, on this library: one level, one threshold, one mode.

Metrics have the prefix mismatch/ and keep the names and definitions of that release's guide: minima and maxima of the
weights are computed before truncation, and mask mode never truncates. `rollcorr.integrations.verl` contains the newest
functions; docs/coming_from/verl.md describes the switch. Log-probs and masks are (B, T).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollcorr.config.conversion import convert
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.core.layout import sequence_mean
from rollcorr.correction.rollout_correction import correct
from rollcorr.integrations.verl import correction as newest
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.correction import Batch, weight_batch
from rollcorr.integrations.verl.losses import compute_policy_loss
from rollcorr.integrations.verl.older import measured_ratio, ratio_band, reference_correction
from rollcorr.integrations.verl.v2025_11 import compute_policy_loss_vanilla

__all__ = [
    "compute_is_metrics",
    "compute_mismatch_metrics",
    "compute_policy_loss",
    "compute_policy_loss_vanilla",
    "compute_rollout_importance_weights",
]

PREFIX = "mismatch/"
# The guide reports the true maximum of a sequence's ratio; 709 nats is the limit of float64.
LARGEST_LOG = 709.0
VETO_METRICS = ("rollout_is_veto_fraction", "rollout_is_catastrophic_token_fraction")
_GAP_METRICS = (
    "training_ppl",
    "training_log_ppl",
    "kl",
    "k3_kl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
)


def compute_rollout_importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float | None = None,
    rollout_is_threshold_lower: float | None = None,
    rollout_is_veto_threshold: float | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Batch | None, Tensor, dict[str, float]]:
    """Compute weights w(π/μ), the loss mask, and every metric.

    Tensors are as in `rollcorr.integrations.verl.compute_rollout_correction_and_rejection_mask`.

    Args:
        old_log_prob: log π of the sampled tokens, nats, (B, T).
        rollout_log_prob: log μ, nats, (B, T).
        response_mask: non-zero on tokens that the policy sampled, (B, T).
        rollout_is_level: "token", "sequence" or "geometric".
        rollout_is_mode: "truncate" clips weights at the threshold; "mask" keeps the weights and rejects tokens or
            sequences outside the band.
        rollout_is_threshold: the ceiling, or upper end of the band. None disables all corrections.
        rollout_is_threshold_lower: lower end of the band; defaults to 1 / threshold.
        rollout_is_veto_threshold: reject a sequence with a token of ratio below this.
        verl_parity: compute that release's numbers.

    Returns:
        `.batch["rollout_is_weights"]` (B, T), None if disabled; the mask in its own dtype; metrics under "mismatch/".

    Raises:
        TypeError: an option's type is invalid.
        ValueError: an option is outside its limits, shapes differ, or, with `verl_parity`, the batch has no token.
    """
    options = {
        "rollout_is": True,
        "rollout_is_level": rollout_is_level,
        "rollout_is_mode": rollout_is_mode,
        "rollout_is_threshold": rollout_is_threshold,
        "rollout_is_threshold_lower": rollout_is_threshold_lower,
        "rollout_is_veto_threshold": rollout_is_veto_threshold,
    }
    config = convert(options, schema="2025-10").config
    if config is None or rollout_is_threshold is None:
        return None, response_mask, {}

    data = old_log_prob, rollout_log_prob, response_mask
    if verl_parity:
        lower = 1 / rollout_is_threshold if rollout_is_threshold_lower is None else rollout_is_threshold_lower
        band = ratio_band(
            rollout_is_level, lower, rollout_is_threshold, shares_of_tokens=rollout_is_level == "geometric"
        )
        weights, mask, found = reference_correction(*data, config, weighting=band, rejection_prefix="rollout_is_")
        metrics = {name: value for name, value in found.items() if name.startswith("rollout_is_")}
    else:
        correction = correct(*data, config, densities=True)
        weights, mask = correction.weights, correction.loss_mask.to(response_mask.dtype)
        found = correction.metrics(prefix="")

        # The same metrics under that release's names.
        metrics = {f"rollout_is_{name}": value for name, value in measured_ratio(found, log_bound=LARGEST_LOG).items()}
        metrics |= {name: found.get(name, 0.0) for name in VETO_METRICS}
        for criterion in config.criteria:
            for name in ("masked_fraction", "seq_masked_fraction"):
                metrics[f"rollout_is_{name}"] = found[f"rollout_rs_{criterion.name}_{name}"]

    assert weights is not None  # every level of this generation has weights
    metrics |= _gap_metrics(found)
    return weight_batch(weights), mask, {f"{PREFIX}{name}": value for name, value in metrics.items()}


def compute_mismatch_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor, *, verl_parity: bool = False
) -> dict[str, float]:
    """Compute metrics of the gap between π and μ: mismatch_kl, mismatch_training_ppl, …; only π's perplexity without μ.

    Args:
        old_log_prob: log π of the sampled tokens, nats, (B, T).
        rollout_log_prob: optional; log μ, nats, (B, T).
        response_mask: non-zero on tokens that the policy sampled, (B, T).
        verl_parity: compute that release's numbers.

    Raises:
        ValueError: shapes differ, or, with `verl_parity`, the batch has no token.
    """
    return _gap_metrics(
        newest.compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask, verl_parity=verl_parity)
    )


def compute_is_metrics(
    rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is_level: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float,
    log_threshold_upper: Tensor | None = None,
    log_threshold_lower: Tensor | None = None,
    has_catastrophic: Tensor | None = None,
    catastrophic_tokens: Tensor | None = None,
    SAFETY_BOUND: float = SAFETY_BOUND,
    *,
    verl_parity: bool = False,
) -> dict[str, float]:
    """Compute statistics of given weights before truncation, without a prefix.

    Args:
        rollout_is_weights: the bounded ratio, (B, T).
        log_ratio_for_metrics: the log weight before any clamp: (B, T) at token level, else (B, 1).
        response_mask: non-zero on valid tokens, (B, T).
        rollout_is_level: the level of the weights.
        rollout_is_threshold: weights above it count as high.
        rollout_is_threshold_lower: weights below it count as low.
        log_threshold_upper: unused; kept for call sites.
        log_threshold_lower: unused; kept for call sites.
        has_catastrophic: optional; (B, 1), rows that the veto rejects.
        catastrophic_tokens: optional; (B, T), the tokens that caused it.
        SAFETY_BOUND: unused; kept for call sites.
        verl_parity: compute that release's numbers.

    Raises:
        ValueError: shapes differ, or, with `verl_parity`, the batch has no token.
    """
    # Without the two veto arguments, no row was vetoed.
    valid = response_mask != 0
    no_token, nonempty = torch.zeros_like(valid), valid.any(-1)
    vetoed_tokens = no_token if catastrophic_tokens is None else catastrophic_tokens & valid
    vetoed_rows = no_token[:, :1] if has_catastrophic is None else has_catastrophic
    shares = {
        "veto_fraction": sequence_mean(vetoed_rows[:, 0].double(), nonempty | verl_parity),
        "catastrophic_token_fraction": sequence_mean(vetoed_tokens.double().flatten(), valid.flatten()),
    }

    weights = rollout_is_weights, rollout_is_weights, log_ratio_for_metrics
    level, lower, upper = rollout_is_level, rollout_is_threshold_lower, rollout_is_threshold
    if verl_parity:
        band = ratio_band(level, lower, upper, shares_of_tokens=level == "geometric")
        metrics = parity.metrics_of_given_weights(*weights, response_mask, band)
    else:
        measured = newest.compute_is_metrics(*weights, response_mask, level, upper, lower)
        counted = measured | {"sequence_count": float(nonempty.sum())}
        ratio = measured_ratio(counted, log_bound=LARGEST_LOG)
        metrics = {f"rollout_is_{name}": value for name, value in ratio.items()}
    return metrics | parity.to_floats(shares, prefix="rollout_is_")


def _gap_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return mismatch_ metrics as the guide defines them; those of the release, for parity, stay as they are.

    The guide's differences are rollout − train, and its ppl_ratio is the exponential of a mean.
    """
    if "ppl_ratio_geo" in metrics:
        metrics = {
            **metrics,
            "ppl_ratio": metrics["ppl_ratio_geo"],
            "log_ppl_diff": -metrics["log_ppl_diff"],
            "log_ppl_diff_max": -metrics["log_ppl_diff_min"],
            "log_ppl_diff_min": -metrics["log_ppl_diff_max"],
        }
    return {f"mismatch_{name}": metrics[name] for name in _GAP_METRICS if name in metrics}
