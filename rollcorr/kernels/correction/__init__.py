"""The correction in one pass: log-probs → weights, loss mask, keep flags, statistics.

`reference` is the specification: whole tensors, one formula at a time. `blocked` is its fast twin for every device that
runs torch: it walks over blocks that stay in cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from rollcorr.kernels.correction.blocked import blocked_correction
from rollcorr.kernels.correction.output import CorrectionOutput
from rollcorr.kernels.correction.reference import reference_correction
from rollcorr.kernels.correction.table import Reduction

if TYPE_CHECKING:
    from rollcorr.config import RolloutCorrectionConfig

__all__ = ["CorrectionOutput", "Implementation", "Reduction", "correction_kernel"]

Implementation = Literal["auto", "reference", "blocked"]


def correction_kernel(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    *,
    cu_seqlens: Tensor | None = None,
    reduce: Reduction | None = None,
    impl: Implementation = "auto",
) -> CorrectionOutput:
    """Weights before normalisation, loss mask, keep flags and statistics of one batch.

    Args:
        train_log_prob: log π, nats. (B, T), or (N,) when packed; any floating dtype.
        rollout_log_prob: log μ, nats. Same shape.
        mask: bool, true on response tokens. Same shape.
        config: what to compute.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        reduce: merges in the other parts of the sequences, when this call has a part of each; before anything is
            decided. Not for "reference", which needs its sequences whole.
        impl: "auto" takes the fastest implementation that runs here.

    Raises:
        ValueError: `impl` is not one of those above, or cannot reduce.
    """
    if impl == "reference" and reduce is not None:
        raise ValueError("impl='reference' needs whole sequences: gather them first")
    if impl == "reference":
        return reference_correction(train_log_prob, rollout_log_prob, mask, config, cu_seqlens=cu_seqlens)
    if impl in ("auto", "blocked"):
        return blocked_correction(train_log_prob, rollout_log_prob, mask, config, cu_seqlens=cu_seqlens, reduce=reduce)
    raise ValueError(f"impl must be 'auto', 'reference' or 'blocked', got {impl!r}")
