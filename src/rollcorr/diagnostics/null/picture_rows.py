"""A bounded, evenly spread table of the denoising steps of a log: what each step recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollcorr.rollout_log import RolloutBatch

# About how many pictures the table holds: twice as many at most.
ROWS = 8192
RECORDED = ("timestep", "sigma", "sigma_next", "step_std")
# Columns: position of the picture in the log; the training step; the version of the weights; D; what the step records;
# log μ and log π, averages over D; the exact KL over all D. NaN where not recorded.
FIELDS = ("picture", "step", "version", "dimensions", *RECORDED, "rollout", "train", "kl")
Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PictureRows:
    """The denoising steps of every k-th picture of a log, k being the smallest power of 2 that makes them few enough.

    Attributes:
        values: (n, 11) float64, the columns `FIELDS`.
        stride: k.
    """

    values: Column = field(default_factory=lambda: np.zeros((0, len(FIELDS))))
    stride: int = 1

    @classmethod
    def of(cls, batch: RolloutBatch, rollout: Tensor, train: Tensor, kl: Tensor | None, *, first: int) -> PictureRows:
        """The table of a batch whose first row is row `first` of the log; the tensors are packed."""
        index = torch.arange(first, first + len(batch), dtype=torch.float64, device="cpu")
        spans = batch.objects("policy_versions") if batch.has("policy_versions") else [None] * len(batch)
        version = torch.tensor([span[0]["version"] if span else torch.nan for span in spans], device="cpu")
        step = batch.values("step") if batch.has("step") else torch.full_like(index, torch.nan)

        # What is recorded for each picture is repeated for each of its denoising steps.
        each = (index, step, version, batch.values("dimensions"))
        unknown = torch.full_like(rollout, torch.nan)
        columns = [values.double().repeat_interleave(batch.lengths) for values in each]
        columns += [batch.packed(name) if batch.has(name) else unknown for name in RECORDED]
        columns += [rollout, train, unknown if kl is None else kl]
        return _thinned(torch.stack([column.double() for column in columns], dim=1).numpy(), 1)

    def merge(self, later: PictureRows) -> PictureRows:
        """The table of both stretches of the log."""
        return _thinned(np.concatenate([self.values, later.values]), max(self.stride, later.stride))

    def where(self, chosen: NDArray[np.bool_]) -> PictureRows:
        """The table of some denoising steps, (n,) bool."""
        return PictureRows(self.values[chosen], self.stride)

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> Column:
        """One column of `FIELDS`, (n,)."""
        return self.values[:, FIELDS.index(name)]

    @property
    def kl_scale(self) -> Column:
        """KL / D of a velocity that is off by 1 (root mean square), c² / 2s²; NaN where σ or s is not recorded.

        The mean of a step has the factor c = dt (1 + g² (1 − σ) / 2σ) on the velocity, and g² = s² / −dt.
        """
        sigma, variance = self.column("sigma"), self.column("step_std") ** 2
        dt = self.column("sigma_next") - sigma
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = dt - variance * (1 - sigma) / (2 * sigma)
            return np.asarray(factor**2 / (2 * variance))


def _thinned(values: Column, stride: int) -> PictureRows:
    while True:
        kept = values[values[:, 0] % stride == 0]
        if len(np.unique(kept[:, 0])) <= 2 * ROWS:
            return PictureRows(kept, stride)
        stride *= 2
