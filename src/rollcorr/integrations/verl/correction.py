"""verl's functions for weights, rejection and metrics, with their names, arguments and return values.

They run `rollcorr.correct`; `verl_parity=True` computes verl 0.9.1's own numbers instead (`parity`).
docs/coming_from/verl.md lists the differences. Log-probs and masks are (B, T); every ratio is train / rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig as CheckedConfig
from rollcorr.config.criteria import Threshold
from rollcorr.core.layout import check_layout, sequence_mean
from rollcorr.core.mergeable_statistics import Statistics, extremes_of, moments_of
from rollcorr.core.metric_registry import PREFIX
from rollcorr.core.weights import ratio_above, ratio_below
from rollcorr.correction.rollout_correction import correct
from rollcorr.integrations.verl import parity
from rollcorr.integrations.verl.capture import keep_rollouts
from rollcorr.integrations.verl.config import RawConfig, RolloutCorrectionConfig

WEIGHT_METRICS = (f"{PREFIX}rollout_is_", f"{PREFIX}saturated_")
REJECTION_METRICS = f"{PREFIX}rollout_rs_"

WEIGHTS = "rollout_is_weights"
Batch = Any  # verl's DataProto, or a `TensorBatch`: named tensors under `.batch`, and a `union` method


@dataclass
class TensorBatch:
    """Named tensors under `.batch`, as in verl's DataProto; returned if verl is not installed.

    Attributes:
        batch: name → tensor, all with the same first dimension.
    """

    batch: MutableMapping[str, Tensor] = field(default_factory=dict)

    def union(self, other: TensorBatch) -> TensorBatch:
        """Return this batch with the tensors of `other` added.

        Args:
            other: tensors with the same number of rows, of any shape.

        Raises:
            ValueError: both contain different tensors under one name.
        """
        for name, tensor in other.batch.items():
            if name in self.batch and not self.batch[name].equal(tensor):
                raise ValueError(f"both batches hold {name!r}, with different values")
            self.batch[name] = tensor
        return self


def weight_batch(weights: Tensor) -> Batch:
    """Return weights as `.batch["rollout_is_weights"]` of a DataProto, or of a `TensorBatch` without verl."""
    try:
        from verl.protocol import DataProto
    except ImportError:
        return TensorBatch({WEIGHTS: weights})
    return DataProto.from_dict(tensors={WEIGHTS: weights})


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | Sequence[str] | None = None,
    rollout_rs_threshold: Threshold | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Batch | None, Tensor, dict[str, float]]:
    """Compute weights w(π/μ), the loss mask, and every metric.

    Args:
        old_log_prob: log π of the sampled tokens, nats.
        rollout_log_prob: log μ, nats.
        response_mask: non-zero on tokens that the policy sampled.
        rollout_is: "token", "sequence" or "geometric"; None disables weights.
        rollout_is_threshold: ceiling, or band "lo_hi"; None disables weights, as in verl.
        rollout_is_batch_normalize: divide the weights by their mean, computed over the default process group if that is
            initialized.
        rollout_rs: optional; rejection criteria.
        rollout_rs_threshold: their thresholds; k1 bounds are on the ratio.
        verl_parity: compute verl 0.9.1's numbers.

    Returns:
        `.batch["rollout_is_weights"]` (B, T) without gradient, or None; the mask in the dtype of `response_mask`;
        metrics under "rollout_corr/".

    Raises:
        TypeError: an option's type is invalid.
        ValueError: an option is outside its limits, shapes differ, or, with `verl_parity`, the batch has no token.
    """
    config = RolloutCorrectionConfig(
        rollout_is,
        rollout_is_threshold,
        rollout_is_batch_normalize,
        rollout_rs,
        rollout_rs_threshold,
        verl_parity=verl_parity,
    )
    weights, mask, metrics = config.corrected(old_log_prob, rollout_log_prob, response_mask)
    return None if weights is None else weight_batch(weights), mask, metrics


def weights_alone(log_ratio: Tensor, response_mask: Tensor, settings: RawConfig) -> tuple[Tensor, dict[str, float]]:
    """Return the weights of a log-ratio, and their metrics without prefix."""
    weights, _, metrics = settings.corrected(log_ratio, torch.zeros_like(log_ratio), response_mask)
    assert weights is not None
    return weights, family(metrics, WEIGHT_METRICS)


def mask_alone(log_ratio: Tensor, response_mask: Tensor, settings: RawConfig) -> tuple[Tensor, dict[str, float]]:
    """Return the loss mask of a log-ratio, and its metrics without prefix."""
    _, mask, metrics = settings.corrected(log_ratio, torch.zeros_like(log_ratio), response_mask)
    return mask, family(metrics, REJECTION_METRICS)


def compute_rollout_correction_and_add_to_batch(
    batch: Batch, rollout_corr_config: Mapping[str, Any], *, verl_parity: bool = False
) -> tuple[Batch, dict[str, float]]:
    """Replace the batch's response_mask by the loss mask, and add rollout_is_weights if weights are enabled.

    Args:
        batch: has old_log_probs, rollout_log_probs and response_mask, each (B, T).
        rollout_corr_config: any mapping with verl's keys.
        verl_parity: compute verl 0.9.1's numbers; the config's own `verl_parity` does the same.

    Returns:
        The batch, and every metric under "rollout_corr/".

    Raises:
        TypeError: an option's type is invalid.
        ValueError: a key is unknown, an option is outside its limits, or shapes differ.
    """
    return corrected_batch(batch, RolloutCorrectionConfig.read(rollout_corr_config, verl_parity=verl_parity))


def corrected_batch(batch: Batch, settings: RawConfig) -> tuple[Batch, dict[str, float]]:
    """Return the batch with its loss mask and, if enabled, weights; and the metrics.

    The mask replaces response_mask, which removes rejected tokens from verl's loss.
    """
    keep_rollouts(batch)
    tensors = batch.batch
    weights, tensors["response_mask"], metrics = settings.corrected(
        tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"]
    )
    return batch if weights is None else batch.union(weight_batch(weights)), metrics


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Compute weights: exp of the level's log-ratio, truncated or (with a band) zeroed outside.

    Args:
        log_ratio: log π − log μ, nats.
        response_mask: non-zero on valid tokens.
        rollout_is: "token", "sequence" or "geometric".
        rollout_is_threshold: ceiling, or band "lo_hi".
        rollout_is_batch_normalize: divide the weights by their mean.
        verl_parity: compute verl 0.9.1's numbers.

    Returns:
        (B, T) weights, 0 at padding, without gradient; metrics without prefix.

    Raises:
        TypeError: an option's type is invalid, or the threshold is None.
        ValueError: an option is outside its limits, or shapes differ.
    """
    if rollout_is_threshold is None or rollout_is is None:
        raise TypeError(f"weights need a threshold and a level; got {rollout_is_threshold!r} and {rollout_is!r}")
    config = RolloutCorrectionConfig(
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, verl_parity=verl_parity
    )
    return weights_alone(log_ratio, response_mask, config)


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str | Sequence[str] = "token_k1",
    rollout_rs_threshold: Threshold | None = None,
    *,
    verl_parity: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss mask: response tokens that every criterion keeps.

    Args:
        log_ratio: log π − log μ, nats.
        response_mask: non-zero on valid tokens.
        rollout_rs: criteria, a comma-separated string or a list.
        rollout_rs_threshold: one threshold for all, or one for each; k1 bounds are on the ratio.
        verl_parity: compute verl 0.9.1's numbers.

    Returns:
        The mask in the dtype of `response_mask`; metrics without prefix.

    Raises:
        TypeError: an option's type is invalid.
        ValueError: an option is outside its limits, the threshold is missing, or shapes differ.
    """
    if rollout_rs is None:
        raise ValueError("rollout_rs must name at least one criterion; got None")
    config = RolloutCorrectionConfig(
        rollout_is=None, rollout_rs=rollout_rs, rollout_rs_threshold=rollout_rs_threshold, verl_parity=verl_parity
    )
    return mask_alone(log_ratio, response_mask, config)


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor, *, verl_parity: bool = False
) -> dict[str, float]:
    """Compute metrics of the gap between π and μ, without a prefix; only π's perplexity without μ.

    Args:
        old_log_prob: log π of the sampled tokens, nats, (B, T).
        rollout_log_prob: optional; log μ, nats, (B, T).
        response_mask: non-zero on tokens that the policy sampled, (B, T).
        verl_parity: compute verl 0.9.1's numbers.

    Raises:
        ValueError: shapes differ, or, with `verl_parity`, the batch has no token.
    """
    if verl_parity:
        return parity.to_floats(parity.policy_gap(*parity.prepared(old_log_prob, rollout_log_prob, response_mask)))

    # Without μ, compare π with itself and report only π's own metrics.
    rollout = old_log_prob if rollout_log_prob is None else rollout_log_prob
    metrics = correct(old_log_prob, rollout, response_mask, CheckedConfig(), densities=True).metrics(prefix="")
    if rollout_log_prob is None:
        return {name: metrics[name] for name in ("training_ppl", "training_log_ppl")}
    return {name: value for name, value in metrics.items() if not name.startswith("rollout_rs_")}


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, *, verl_parity: bool = False
) -> dict[str, float]:
    """Return `compute_offpolicy_metrics` of the current policy, under "rollout_corr/".

    Args:
        log_prob: log π_θ of the sampled tokens, nats, (B, T).
        rollout_log_prob: log μ, nats, (B, T).
        response_mask: non-zero on tokens that the policy sampled, (B, T).
        verl_parity: compute verl 0.9.1's numbers.

    Raises:
        ValueError: shapes differ, or, with `verl_parity`, the batch has no token.
    """
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask, verl_parity=verl_parity)
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
    *,
    verl_parity: bool = False,
) -> dict[str, float]:
    """Compute statistics of given weights, without a prefix.

    Args:
        rollout_is_weights: the weights in use, (B, T).
        raw_rollout_is_weights: the same before truncation, (B, T).
        log_ratio_for_metrics: the log weight before any clamp: (B, T) at token level, else (B, 1).
        response_mask: non-zero on valid tokens, (B, T).
        rollout_is: their level.
        rollout_is_threshold: C: weights above it count as high.
        rollout_is_threshold_lower: weights below it count as low; defaults to 1/C.
        verl_parity: compute verl 0.9.1's numbers.

    Raises:
        ValueError: shapes differ, or, with `verl_parity`, the batch has no token.
    """
    high = rollout_is_threshold
    low = 1 / high if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    weights, raw, log_weight = rollout_is_weights, raw_rollout_is_weights, log_ratio_for_metrics
    check_layout(weights=weights, raw_weights=raw, response_mask=response_mask)
    if verl_parity:
        return parity.metrics_of_given_weights(
            weights, raw, log_weight, response_mask, parity.Band(level=rollout_is, lower=low, upper=high, clip_low=0.0)
        )

    # The bounds apply to each token, or to each row that contains a token.
    mask, by_token = response_mask != 0, rollout_is == "token"
    nonempty = mask.any(-1)
    unit = mask if by_token else nonempty.unsqueeze(-1)

    mean_weight = sequence_mean(weights.double(), mask)
    log_mean_raw = sequence_mean(raw.double(), mask).log()
    sums = {
        "units": unit.sum(),
        "is_high": (unit & ratio_above(log_weight, high)).sum(),
        "is_low": (unit & ratio_below(log_weight, low)).sum(),
        "sequences_counted": nonempty.sum(),
        "is_seq_high": (nonempty & ratio_above(log_mean_raw, high)).sum(),
        "is_seq_low": (nonempty & ratio_below(log_mean_raw, low)).sum(),
    }
    measured = {"weight": (weights, mask), "weight_raw": (raw, mask), "sequence_weight": (mean_weight, nonempty)}
    moments = {name: moments_of(values, where) for name, (values, where) in measured.items()}
    extremes = {name: extremes_of(values, where) for name, (values, where) in measured.items()}

    # ESS and the spread are over the level's unit; min and max of a sequence's weight come from its log.
    moments["unit_weight"] = moments["weight" if by_token else "sequence_weight"]
    if not by_token:
        extremes["log_weight"] = extremes_of(log_weight, unit)
    return Statistics.of(sums=sums, moments=moments, extremes=extremes).metrics(prefix="")


def family(metrics: dict[str, float], prefixes: str | tuple[str, ...]) -> dict[str, float]:
    """Return the metrics of one family, without "rollout_corr/"."""
    return {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(prefixes)}
