"""One call of a correction kernel: what it takes, what it returns, and where it writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.boundary import check_tensors, is_traced, why_no_address
from rollcorr.core.mergeable_statistics import Statistics

Out = tuple["Tensor | None", Tensor]
"""Buffers for the weights (None where there are none) and the loss mask."""


class Batch(NamedTuple):
    """What a kernel corrects: whole sequences, (B, T) when padded, (N,) when packed.

    Attributes:
        train: log π, nats.
        rollout: log μ, nats. Same shape.
        mask: non-zero on response tokens. Same shape; bool for `reference` and `torch`.
        cu_seqlens: (B + 1,) token offsets, only when packed.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None = None

    @property
    def named(self) -> dict[str, Tensor]:
        """The tensors under the names that errors give them."""
        return {"train_log_prob": self.train, "rollout_log_prob": self.rollout, "response_mask": self.mask}


class CorrectionOutput(NamedTuple):
    """One batch, corrected; weights are not normalized yet.

    Attributes:
        weights: float32, 0 outside the mask, in the inputs' shape; None without importance sampling.
        loss_mask: bool, in the inputs' shape.
        sequence_kept: (B,) bool: has a token in the loss, or had none to lose.
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
    """The buffers to write to: the caller's, checked by `check_out`, or fresh ones like the mask."""
    if out is not None:
        return out
    weights = None if config.rollout_is is None else torch.empty(mask.shape, dtype=torch.float32, device=mask.device)
    return weights, torch.empty(mask.shape, dtype=torch.bool, device=mask.device)


def check_out(out: Out, config: RolloutCorrectionConfig | None, **inputs: Tensor) -> None:
    """Check that the caller's buffers fit the batch and are not part of it.

    Args:
        out: (weights, loss_mask).
        config: what will be computed.
        inputs: the batch, by name.

    Raises:
        ValueError: a buffer is missing or of no use, its dtype, shape or device is wrong, or it is not contiguous, or
            shares memory with an input.
    """
    needed = config is not None and config.rollout_is is not None
    if needed != (out[0] is not None):
        raise ValueError(
            "out needs a weights buffer: out=(weights, loss_mask)"
            if needed
            else "out has a weights buffer, but rollout_is=None computes no weights; give out=(None, loss_mask)"
        )
    if out[1] is None:
        raise ValueError("out needs a loss_mask buffer: out=(weights, loss_mask)")
    name, like = next(iter(inputs.items()))
    types = {"out weights": torch.float32, "out loss_mask": torch.bool}
    buffers = {kind: buffer for kind, buffer in zip(types, out, strict=True) if buffer is not None}
    check_tensors(**{name: like}, **buffers)
    for kind, buffer in buffers.items():
        if buffer.dtype != types[kind]:
            raise ValueError(f"{kind} must have dtype {types[kind]}, got {buffer.dtype}")
        if buffer.shape != like.shape:
            raise ValueError(f"{kind} must have the shape of {name}, {tuple(like.shape)}, got {tuple(buffer.shape)}")
        if not buffer.is_contiguous():
            raise ValueError(f"{kind} must be contiguous, got strides {buffer.stride()}; make it with torch.empty")

    # While torch traces, nothing has an address to compare.
    if is_traced():
        return
    if (reason := why_no_address(**buffers)) is not None:
        raise ValueError(reason)
    spans = [(other, *_span(tensor)) for other, tensor in inputs.items()]
    for kind, buffer in buffers.items():
        start, end = _span(buffer)
        for other, first, last in spans:
            if start < last and first < end:
                raise ValueError(f"{kind} and {other} share memory; give a buffer of its own")
        spans.append((kind, start, end))


def copied_to(out: Out | None, output: CorrectionOutput) -> CorrectionOutput:
    """The output in the caller's buffers, if there are any."""
    if out is None:
        return output
    weights, loss_mask = out
    if weights is not None and output.weights is not None:
        weights.copy_(output.weights)
    return output._replace(weights=weights, loss_mask=loss_mask.copy_(output.loss_mask))


def _span(x: Tensor) -> tuple[int, int]:
    """Addresses of the first element, and of the end of the last; (0, 0) where there is no memory to compare."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start and start + x.nbytes
    reach = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return start, start and start + x.element_size() * (reach + 1)
