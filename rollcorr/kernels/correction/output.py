"""What a correction kernel returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rollcorr.core.statistics import Statistics


class CorrectionOutput(NamedTuple):
    """One batch, corrected; weights are not normalised yet.

    Attributes:
        weights: float32, 0 outside the mask, in the inputs' shape; None without importance sampling.
        loss_mask: bool, in the inputs' shape.
        sequence_kept: (B,) bool: has a token in the loss, or had none to lose.
        statistics: rows for the metric registry, on the device.
    """

    weights: Tensor | None
    loss_mask: Tensor
    sequence_kept: Tensor
    statistics: Statistics
