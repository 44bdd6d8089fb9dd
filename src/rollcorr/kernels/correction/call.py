"""One call of a correction kernel: what it takes, what it returns, and where it writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.boundary import check_tensors, has_storage, is_ordinary, why_no_address, why_no_kernel
from rollcorr.core.layout import sequence_count
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
    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """The tensors under the names that errors give them."""
        return ("train_log_prob", self.train), ("rollout_log_prob", self.rollout), ("response_mask", self.mask)

    @property
    def sequences(self) -> int:
        """B."""
        return sequence_count(self.mask, cu_seqlens=self.cu_seqlens)


def why_no_addresses(batch: Batch) -> str | None:
    """Why a kernel that reads memory by its address must not have this batch, or None when it may."""
    if (tracing := why_no_kernel()) is not None:
        return tracing
    for name, tensor in batch.named:
        if (reason := why_no_address(tensor)) is not None:
            return f"{name} is {reason}"
    return None


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


def check_out(out: Out, config: RolloutCorrectionConfig | None, *, ordinary: bool, **inputs: Tensor) -> None:
    """Check that the caller's buffers fit the batch and are not part of it.

    Args:
        out: (weights, loss_mask).
        config: what will be computed.
        ordinary: whether all of the batch are ordinary tensors, as `check_tensors` has found.
        inputs: the batch, by name.

    Raises:
        ValueError: a buffer is missing or of no use, its dtype, shape or device is wrong, or it is not contiguous, or
            shares memory with an input.
    """
    weights, loss_mask = out
    needed = config is not None and config.rollout_is is not None
    if needed != (weights is not None):
        raise ValueError(
            "out needs a weights buffer: out=(weights, loss_mask)"
            if needed
            else "out has a weights buffer, but rollout_is=None computes no weights; give out=(None, loss_mask)"
        )
    name, like = next(iter(inputs.items()))
    for buffer, kind, dtype in ((weights, "weights", torch.float32), (loss_mask, "loss_mask", torch.bool)):
        if buffer is None or (ordinary and _fits(buffer, like, dtype)):
            continue
        ordinary = False
        check_tensors(**{f"out {kind}": buffer})
        if buffer.dtype != dtype:
            raise ValueError(f"out {kind} must have dtype {dtype}, got {buffer.dtype}")
        if buffer.shape != like.shape:
            raise ValueError(
                f"out {kind} must have the shape of {name}, {tuple(like.shape)}, got {tuple(buffer.shape)}"
            )
        if buffer.device != like.device:
            raise ValueError(f"out {kind} must have the device of {name}, {like.device}, got {buffer.device}")
        if not buffer.is_contiguous():
            raise ValueError(f"out {kind} must be contiguous, got strides {buffer.stride()}; make it with torch.empty")

    # While torch.compile traces, and inside a transform, nothing has an address to compare.
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    spans = [(other, *_span(tensor)) for other, tensor in inputs.items() if ordinary or has_storage(tensor)]
    for buffer, kind in ((weights, "weights"), (loss_mask, "loss_mask")):
        if buffer is None or not (ordinary or has_storage(buffer)):
            continue
        if not ordinary and (reason := why_no_address(buffer)) is not None:
            raise ValueError(f"out {kind} is {reason}")
        start, end = _span(buffer)
        for other, first, last in spans:
            if start < last and first < end:
                raise ValueError(f"out {kind} and {other} share memory; give a buffer of its own")
        spans.append((f"out {kind}", start, end))


def _fits(buffer: Tensor, like: Tensor, dtype: torch.dtype) -> bool:
    """Whether a buffer is ordinary and has the dtype, shape and device that it must: then no check of it would fail."""
    return (
        is_ordinary(buffer)
        and not buffer.is_neg()
        and buffer.dtype == dtype
        and buffer.shape == like.shape
        and buffer.device == like.device
        and buffer.is_contiguous()
    )


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
