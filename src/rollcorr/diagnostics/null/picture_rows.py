"""Bounded, evenly spread table of a log's denoising steps and their recorded values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollcorr.rollout_log import RolloutBatch

# Approximate number of pictures in the table; at most twice this number.
ROWS = 8192
RECORDED = ("timestep", "sigma", "sigma_next", "step_std")
# Columns: position of the picture in the log; training step; version of the weights; D; recorded values of the step;
# log μ and log π, nats, averages over D; exact KL, nats over all D. NaN where not recorded.
FIELDS = ("picture", "step", "version", "dimensions", *RECORDED, "rollout", "train", "kl")
Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PictureRows:
    """Denoising steps of every k-th picture of a log; k is the smallest power of 2 that bounds the table.

    Attributes:
        values: columns `FIELDS`, (n, 11) float64; default empty.
        stride: k; default 1.
    """

    values: Column = field(default_factory=lambda: np.zeros((0, len(FIELDS))))
    stride: int = 1

    @classmethod
    def of(cls, batch: RolloutBatch, rollout: Tensor, train: Tensor, kl: Tensor | None, *, first: int) -> PictureRows:
        """Return the table of a batch whose first row is row `first` of the log; the tensors are packed, (N,)."""
        index = torch.arange(first, first + len(batch), dtype=torch.float64, device="cpu")
        spans = batch.objects("policy_versions") if batch.has("policy_versions") else [None] * len(batch)
        version = torch.tensor([span[0]["version"] if span else torch.nan for span in spans], device="cpu")
        step = batch.values("step") if batch.has("step") else torch.full_like(index, torch.nan)

        # Repeat the values of a picture for each of its denoising steps.
        each = (index, step, version, batch.values("dimensions"))
        unknown = torch.full_like(rollout, torch.nan)
        columns = [values.double().repeat_interleave(batch.lengths) for values in each]
        columns += [batch.packed(name) if batch.has(name) else unknown for name in RECORDED]
        columns += [rollout, train, unknown if kl is None else kl]
        return _thinned(torch.stack([column.double() for column in columns], dim=1).numpy(), 1)

    def merge(self, later: PictureRows) -> PictureRows:
        """Return the table of both parts of the log; `later` comes second."""
        return _thinned(np.concatenate([self.values, later.values]), max(self.stride, later.stride))

    def where(self, chosen: NDArray[np.bool_]) -> PictureRows:
        """Return the table of the denoising steps where `chosen`, (n,) bool, is True."""
        return PictureRows(self.values[chosen], self.stride)

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> Column:
        """Return one column of `FIELDS`, (n,)."""
        return self.values[:, FIELDS.index(name)]

    @property
    def kl_scale(self) -> Column:
        """Return KL / D of a velocity with root mean square error 1, c² / 2s², nats; NaN if σ or s is not recorded.

        The mean of a step contains the velocity with the factor c = dt (1 + g² (1 − σ) / 2σ), where g² = s² / −dt.
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
