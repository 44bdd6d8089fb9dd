"""The correction in one pass: log-probs → weights, loss mask, keep flags, statistics.

`reference` is the specification: whole tensors, one formula at a time. `blocked` is its fast twin for every device that
runs torch: it walks over blocks that stay in cache. `cpu` is the same in compiled C, at the speed of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from rollcorr.kernels.correction.blocked import blocked_correction
from rollcorr.kernels.correction.cpu import cpu_correction, status, why_not
from rollcorr.kernels.correction.output import CorrectionOutput, Out, check_out
from rollcorr.kernels.correction.reference import reference_correction

if TYPE_CHECKING:
    from rollcorr.config import RolloutCorrectionConfig

__all__ = ["CorrectionOutput", "Implementation", "Out", "check_out", "correction_kernel", "implementations"]

Implementation = Literal["auto", "reference", "blocked", "cpu"]


def correction_kernel(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    *,
    cu_seqlens: Tensor | None = None,
    out: Out | None = None,
    impl: Implementation = "auto",
) -> CorrectionOutput:
    """Weights before normalisation, loss mask, keep flags and statistics of one batch.

    Args:
        train_log_prob: log π, nats. (B, T), or (N,) when packed; any floating dtype.
        rollout_log_prob: log μ, nats. Same shape.
        mask: non-zero on response tokens. Same shape; any dtype.
        config: what to compute.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        out: buffers for the weights and the loss mask, which `check_out` has seen; None for fresh ones.
        impl: "auto" takes the fastest implementation that runs here and takes this batch.

    Raises:
        ValueError: `impl` is not one of those above, or does not take this batch.
        ImportError: `impl="cpu"`, and the library was not built.
    """
    if impl == "cpu" or (impl == "auto" and why_not(train_log_prob, rollout_log_prob, mask, config) is None):
        return cpu_correction(train_log_prob, rollout_log_prob, mask, config, cu_seqlens=cu_seqlens, out=out)
    valid = mask if mask.dtype == torch.bool else mask != 0
    if impl in ("auto", "blocked"):
        return blocked_correction(train_log_prob, rollout_log_prob, valid, config, cu_seqlens=cu_seqlens, out=out)
    if impl == "reference":
        output = reference_correction(train_log_prob, rollout_log_prob, valid, config, cu_seqlens=cu_seqlens)
        return output if out is None else _copied(output, out)
    raise ValueError(f"impl must be one of {', '.join(map(repr, get_args(Implementation)))}, got {impl!r}")


def implementations() -> dict[str, tuple[bool, str]]:
    """Every implementation of the correction, with whether it can be used here, and where or why not."""
    level, reason = status()
    return {
        "reference": (True, "every device: the specification"),
        "blocked": (True, "every device: eager torch in blocks"),
        "cpu": (level is not None, f"CPU, float32 and bfloat16: compiled C, {level}" if level else reason),
    }


def _copied(output: CorrectionOutput, out: Out) -> CorrectionOutput:
    """The same output in the caller's buffers."""
    weights, loss_mask = out
    if weights is not None and output.weights is not None:
        weights.copy_(output.weights)
    return output._replace(weights=weights, loss_mask=loss_mask.copy_(output.loss_mask))
