"""Interface of every correction kernel: input batch, decisions at bounds, results and output buffers.

Bounds limit weights or set them to 0, and they accept or reject statistics. Each criterion is decided on the valid
tokens only, and the decisions are AND-ed, so their order never matters. Bounds are inclusive (`rollcorr.core.weights`).
`reference` and `torch` decide by the functions below; C and Triton repeat them in their languages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.core.boundary import TRACED, why_no_address
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.core.weights import between, divergence_bound, exceeds, log_band, masked_weights, ratio_above, ratio_below

_MATCHING_SCOPE = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}

Out = tuple["Tensor | None", Tensor]
"""Buffers for the weights (None where there are none) and the loss mask."""


class Batch(NamedTuple):
    """Batch to correct, with all tokens of each sequence: (B, T) when padded, (N,) when packed.

    Attributes:
        train: log π, nats.
        rollout: log μ, nats. Same shape.
        mask: non-zero on response tokens. Same shape; bool for `reference` and `torch`.
        cu_seqlens: (B + 1,) token offsets; required when packed.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None = None

    @property
    def named(self) -> dict[str, Tensor]:
        """Return the tensors by the names that error messages use."""
        return {"train_log_prob": self.train, "rollout_log_prob": self.rollout, "response_mask": self.mask}


class CorrectionOutput(NamedTuple):
    """One batch, corrected; weights are not normalized yet.

    Attributes:
        weights: optional; float32, 0 outside the mask, in the inputs' shape. Absent without importance sampling.
        loss_mask: bool, in the inputs' shape.
        sequence_kept: (B,) bool; true if a token remains in the loss, or if the sequence had no response token.
        statistics: rows for the metric registry, on the device.
        policy_sums: (4, B) float64: valid and measured tokens, and Σ log π and Σ log μ over the measured ones. A loss
            compares its own policies with these.
    """

    weights: Tensor | None
    loss_mask: Tensor
    sequence_kept: Tensor
    statistics: Statistics
    policy_sums: Tensor


def outputs(mask: Tensor, config: RolloutCorrectionConfig, out: Out | None) -> Out:
    """Return the output buffers: the caller's, checked by `check_out`, or new ones in the mask's shape."""
    if out is not None:
        return out
    weights = None if config.rollout_is is None else torch.empty(mask.shape, dtype=torch.float32, device=mask.device)
    return weights, torch.empty(mask.shape, dtype=torch.bool, device=mask.device)


def check_out(out: Out, config: RolloutCorrectionConfig | None, **inputs: Tensor) -> None:
    """Check that the caller's buffers, which passed `check_tensors`, fit the batch and are not part of it.

    Args:
        out: (weights, loss_mask).
        config: configuration of the correction.
        inputs: tensors of the batch, by name.

    Raises:
        ValueError: a buffer is missing or unused, has an invalid dtype or shape, is not contiguous, or shares memory
            with an input.
    """
    needed = config is not None and config.rollout_is is not None
    if needed and out[0] is None:
        raise ValueError("out needs a weights buffer: out=(weights, loss_mask)")
    if not needed and out[0] is not None:
        raise ValueError(
            "out has a weights buffer, but rollout_is=None computes no weights; give out=(None, loss_mask)"
        )
    if out[1] is None:
        raise ValueError("out needs a loss_mask buffer: out=(weights, loss_mask)")
    name, like = next(iter(inputs.items()))
    types = {"out weights": torch.float32, "out loss_mask": torch.bool}
    buffers = {kind: buffer for kind, buffer in zip(types, out, strict=True) if buffer is not None}
    for kind, buffer in buffers.items():
        if buffer.dtype != types[kind]:
            raise ValueError(f"{kind} must have dtype {types[kind]}, got {buffer.dtype}")
        if buffer.shape != like.shape:
            raise ValueError(f"{kind} must have the shape of {name}, {tuple(like.shape)}, got {tuple(buffer.shape)}")
        if not buffer.is_contiguous():
            raise ValueError(f"{kind} must be contiguous, got strides {buffer.stride()}; make it with torch.empty")

    # Traced tensors have no address to compare.
    reason = why_no_address(**buffers)
    if reason == TRACED:
        return
    if reason is not None:
        raise ValueError(reason)
    spans = [(other, *_address_range(tensor)) for other, tensor in inputs.items()]
    for kind, buffer in buffers.items():
        start, end = _address_range(buffer)
        for other, first, last in spans:
            if start < last and first < end:
                raise ValueError(f"{kind} and {other} share memory; give a buffer of its own")
        spans.append((kind, start, end))


def copied_to(out: Out | None, output: CorrectionOutput) -> CorrectionOutput:
    """Return the output, copied into the caller's buffers if there are any."""
    if out is None:
        return output
    weights, loss_mask = out
    if weights is not None and output.weights is not None:
        weights.copy_(output.weights)
    return output._replace(weights=weights, loss_mask=loss_mask.copy_(output.loss_mask))


def exceedance_band(config: RolloutCorrectionConfig) -> tuple[float | None, float | None]:
    """Return (lower, upper) on the ratio: (1/C, C) when truncating, IcePop's band, or that of the level's k1 criterion.

    A floor replaces 1/C. (`None`, `None`) without such a band: no exceedances are then counted.
    """
    if config.is_mode == "truncate":
        floor, ceiling = config.rollout_is_floor, config.is_upper
        return (1.0 / ceiling if floor is None and ceiling is not None else floor), ceiling
    if config.is_mode == "icepop":
        return config.is_lower, config.is_upper
    for criterion in config.criteria:
        if criterion.kind == "k1" and criterion.scope == _MATCHING_SCOPE.get(config.rollout_is or ""):
            return criterion.lower, criterion.upper
    return None, None


def zeroing_band(config: RolloutCorrectionConfig) -> tuple[float, float]:
    """Return the log weights that IcePop keeps, ends included, nats; infinite ends for other modes.

    The safety bound is applied first, and IcePop judges the clamped log weight. So an end of the band outside of the
    clamp's range has no effect, and a band entirely outside of it is empty: (inf, −inf).
    """
    if config.is_mode != "icepop":
        return -math.inf, math.inf
    low, high = log_band(config.is_lower, config.is_upper)
    bound = config.safety_bound
    if low > bound or high < -bound:
        return math.inf, -math.inf
    return (low if low > -bound else -math.inf), (high if high < bound else math.inf)


def accepted_band(criterion: Criterion) -> tuple[float, float]:
    """Return the values that a criterion accepts, ends included, nats: log-ratios (k1) or divergences (k2, k3)."""
    if criterion.kind == "k1":
        return log_band(criterion.lower, criterion.upper)
    return -math.inf, divergence_bound(criterion.upper)


def applied_weights(raw: Tensor, log_weight: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """Return the weights limited by the threshold; without a threshold return `raw`, the bounded weights."""
    if config.is_mode == "icepop":
        lower, upper = config.is_lower, config.is_upper
        return masked_weights(log_weight, lower=lower, upper=upper, safety_bound=config.safety_bound)
    return between(raw, config.rollout_is_floor, config.is_upper)


def beyond_bounds(statistic: Tensor, criterion: Criterion) -> tuple[Tensor, Tensor]:
    """Return where a statistic exceeds a criterion's upper bound, and where it is below its lower bound.

    Args:
        statistic: −log ρ (k1), with ρ the ratio of the token, the product of the sequence or its geometric mean; or the
            divergence (k2, k3), nats. Any shape.
        criterion: the kind of statistic, and its bounds. A k1 criterion bounds the ratio ρ.
    """
    # The band of a k1 criterion is on the ratio itself. On −log ρ, a band that is not reciprocal would be inverted.
    if criterion.kind == "k1":
        return ratio_above(-statistic, criterion.upper), ratio_below(-statistic, criterion.lower)
    return exceeds(statistic, criterion.upper), torch.zeros_like(statistic, dtype=torch.bool)


def _address_range(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and of the end of the last; (0, 0) without memory to compare."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start and start + x.nbytes
    reach = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return start, start and start + x.element_size() * (reach + 1)
