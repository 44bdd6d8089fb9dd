"""A bounded, evenly spread table of the denoising steps of a log: what each step recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollcorr.rollout_log import RolloutBatch

ROWS = 8192
"""About how many pictures the table holds: twice as many at most."""
RECORDED = ("timestep", "sigma", "sigma_next", "step_std")
FIELDS = ("picture", "step", "version", "prompt", "dimensions", *RECORDED, "rollout", "train", "kl")
"""Columns: position of the picture in the log; the training step, the version of the weights and a checksum of the
prompt; D; what the step records; log μ and log π, averages over D; the exact KL over all D. NaN where not recorded."""
Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PictureRows:
    """The denoising steps of every k-th picture of a log, k being the smallest power of 2 that makes them few enough.

    Attributes:
        values: (n, 12) float64, the columns `FIELDS`.
        stride: k.
    """

    values: Column = field(default_factory=lambda: np.zeros((0, len(FIELDS))))
    stride: int = 1

    @classmethod
    def of(cls, batch: RolloutBatch, rollout: Tensor, train: Tensor, kl: Tensor | None, *, first: int) -> PictureRows:
        """The table of a batch whose first row is row `first` of the log; the tensors are packed."""

        def of_pictures(name: str) -> Tensor:
            missing = torch.full((len(batch),), torch.nan, dtype=torch.float64, device="cpu")
            return batch.values(name).double() if batch.has(name) else missing

        # What is recorded for each picture is repeated for each of its denoising steps.
        index = torch.arange(first, first + len(batch), dtype=torch.float64, device="cpu")
        each = (index, of_pictures("step"), _versions(batch), _prompts(batch), of_pictures("dimensions"))
        unknown = torch.full_like(rollout, torch.nan)
        columns = [values.repeat_interleave(batch.lengths) for values in each]
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


def _versions(batch: RolloutBatch) -> Tensor:
    """The version of the weights that sampled each picture, (B,); NaN without."""
    spans = batch.objects("policy_versions") if batch.has("policy_versions") else [None] * len(batch)
    found = [float(span[0]["version"]) if span else np.nan for span in spans]
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def _prompts(batch: RolloutBatch) -> Tensor:
    """A checksum of each prompt, else of the group, (B,); NaN without either."""
    name = next((name for name in ("prompt", "group_id") if batch.has(name)), None)
    texts = batch.objects(name) if name else [None] * len(batch)
    found = [np.nan if text is None else float(crc32(str(text).encode())) for text in texts]
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def _thinned(values: Column, stride: int) -> PictureRows:
    while True:
        kept = values[values[:, 0] % stride == 0]
        if len(np.unique(kept[:, 0])) <= 2 * ROWS:
            return PictureRows(kept, stride)
        stride *= 2
