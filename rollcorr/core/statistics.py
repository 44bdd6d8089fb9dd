"""Mergeable statistics: what a batch says about itself, as numbers that add up exactly.

Three kinds of row, each a vector on the device of the data, in float64:

    sums      Σ x                      merged by addition
    moments   (n, mean, M2)            merged by Chan's update; M2 = Σ (x − mean)²
    extremes  (min, max)               merged by min and max

`merge` is associative and commutative up to the last bits of float64, so micro-batches, ranks and log shards
give the number that one process would. Ratios, means and roots are taken once, after the last merge
(`rollcorr.core.metrics`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

STATISTICS_DTYPE = torch.float64


@dataclass(frozen=True, eq=False)
class Statistics:
    """Named rows of sums, moments and extremes that live on one device and merge exactly.

    Attributes:
        sum_names: name of each entry of `sums`.
        moment_names: name of each row of `moments`.
        extreme_names: name of each row of `extremes`.
        sums: (S,) float64.
        moments: (K, 3) float64: n, mean, M2.
        extremes: (E, 2) float64: min, max; (+inf, −inf) when nothing was seen.
    """

    sum_names: tuple[str, ...]
    moment_names: tuple[str, ...]
    extreme_names: tuple[str, ...]
    sums: Tensor
    moments: Tensor
    extremes: Tensor

    @classmethod
    def of(
        cls,
        *,
        sums: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        extremes: Mapping[str, Tensor],
        device: torch.device | str | None = None,
    ) -> Statistics:
        """Stack named rows: 0-d sums, (3,) moments from `moments_of`, (2,) extremes from `extremes_of`."""
        device = next((t.device for rows in (sums, moments, extremes) for t in rows.values()), device)
        return cls(
            tuple(sums),
            tuple(moments),
            tuple(extremes),
            _stack(sums.values(), (), device),
            _stack(moments.values(), (3,), device),
            _stack(extremes.values(), (2,), device),
        )

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both samples together.

        Raises:
            ValueError: the two have different rows, for instance because their configurations differ.
        """
        if self._names != other._names:
            differing = sorted(set().union(*self._names) ^ set().union(*other._names))
            raise ValueError(f"only statistics with the same rows merge; these rows are on one side only: {differing}")
        return Statistics(
            *self._names,
            self.sums + other.sums,
            merge_moments(torch.stack([self.moments, other.moments])),
            merge_extremes(torch.stack([self.extremes, other.extremes])),
        )

    def __or__(self, other: Statistics) -> Statistics:
        """Join two statistics with disjoint rows over the same sample (a batch's correction and its loss)."""
        shared = set(self.sum_names) & set(other.sum_names)
        shared |= set(self.moment_names) & set(other.moment_names)
        shared |= set(self.extreme_names) & set(other.extreme_names)
        if shared:
            raise ValueError(f"rows appear on both sides: {sorted(shared)}")
        return Statistics(
            self.sum_names + other.sum_names,
            self.moment_names + other.moment_names,
            self.extreme_names + other.extreme_names,
            torch.cat([self.sums, other.sums]),
            torch.cat([self.moments, other.moments]),
            torch.cat([self.extremes, other.extremes]),
        )

    def pack(self) -> Tensor:
        """All rows as one float64 vector: what travels between ranks, or to the host, in one transfer."""
        return torch.cat([self.sums, self.moments.flatten(), self.extremes.flatten()])

    def unpack(self, vector: Tensor) -> Statistics:
        """The same rows with values from a vector that `pack` made (here or on another rank)."""
        sizes = [len(self.sum_names), 3 * len(self.moment_names), 2 * len(self.extreme_names)]
        sums, moments, extremes = vector.split(sizes)
        return Statistics(*self._names, sums, moments.view(-1, 3), extremes.view(-1, 2))

    def read(self) -> HostStatistics:
        """Bring every row to the host in one transfer."""
        host = self.unpack(self.pack().to("cpu"))
        return HostStatistics(
            dict(zip(host.sum_names, host.sums.tolist(), strict=True)),
            {name: Moments(*row) for name, row in zip(host.moment_names, host.moments.tolist(), strict=True)},
            {name: Extremes(*row) for name, row in zip(host.extreme_names, host.extremes.tolist(), strict=True)},
        )

    def sum(self, name: str) -> Tensor:
        """One sum, 0-d, still on the device."""
        return self.sums[self.sum_names.index(name)]

    def moment(self, name: str) -> Tensor:
        """One row of moments, (3,): n, mean, M2, still on the device."""
        return self.moments[self.moment_names.index(name)]

    @property
    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return self.sum_names, self.moment_names, self.extreme_names


def merge_statistics(parts: Iterable[Statistics]) -> Statistics:
    """Merge any number of statistics, left to right.

    Raises:
        ValueError: there is nothing to merge, or rows differ.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("nothing to merge: give at least one Statistics")
    return reduce(Statistics.merge, parts)


@dataclass(frozen=True)
class Moments:
    """Count, mean and M2 = Σ (x − mean)² of a sample, on the host."""

    count: float
    mean: float
    m2: float

    @property
    def total(self) -> float:
        """Σ x."""
        return self.count * self.mean

    @property
    def std(self) -> float:
        """Population standard deviation, sqrt(M2 / n); 0 for an empty sample."""
        return (self.m2 / self.count) ** 0.5 if self.count else 0.0

    @property
    def effective_sample_size(self) -> float:
        """(Σ x)² / (n Σ x²), in [0, 1]; 0 when every value is 0 or there is none (Kish, 1965)."""
        square = self.mean * self.mean
        second_moment = self.m2 / self.count + square if self.count else 0.0
        return min(1.0, square / second_moment) if second_moment > 0 else 0.0


@dataclass(frozen=True)
class Extremes:
    """Smallest and largest value of a sample, on the host; (+inf, −inf) when it is empty."""

    min: float
    max: float


@dataclass(frozen=True)
class HostStatistics:
    """The rows of a `Statistics` as Python numbers: what the finalisers of the metric registry read."""

    sums: Mapping[str, float]
    moments: Mapping[str, Moments]
    extremes: Mapping[str, Extremes]


def moments_of(values: Tensor, mask: Tensor) -> Tensor:
    """(n, mean, M2) of the values where mask is true: two passes, so a large mean cancels nothing.

    Args:
        values: any shape, finite where `mask` is true. Masked values are never read.
        mask: bool, same shape.

    Returns:
        (3,) float64. An empty sample gives zeros.
    """
    values = values.to(STATISTICS_DTYPE)
    count = mask.sum(dtype=STATISTICS_DTYPE)
    mean = values.masked_fill(~mask, 0.0).sum() / count.clamp(min=1)
    m2 = (values - mean).masked_fill_(~mask, 0.0).square_().sum()
    return torch.stack([count, mean, m2])


def extremes_of(values: Tensor, mask: Tensor) -> Tensor:
    """(min, max) of the values where mask is true; (+inf, −inf) when there is none. (2,) float64."""
    if values.numel() == 0:
        return torch.tensor([torch.inf, -torch.inf], dtype=STATISTICS_DTYPE, device=values.device)
    values = values.to(STATISTICS_DTYPE)
    return torch.stack([values.masked_fill(~mask, torch.inf).amin(), values.masked_fill(~mask, -torch.inf).amax()])


def merge_moments(parts: Tensor) -> Tensor:
    """Merge moments over the first dimension: (P, …, 3) → (…, 3).

    n = Σ n_p,  mean = Σ n_p mean_p / n,  M2 = Σ M2_p + Σ n_p (mean_p − mean)².

    Source: Chan, Golub & LeVeque (1983), "Algorithms for Computing the Sample Variance".
    """
    count, mean, m2 = parts.unbind(-1)
    total = count.sum(0)
    centre = (count * mean).sum(0) / total.clamp(min=1)
    spread = m2.sum(0) + (count * (mean - centre).square()).sum(0)
    return torch.stack([total, centre, spread], dim=-1)


def merge_extremes(parts: Tensor) -> Tensor:
    """Merge extremes over the first dimension: (P, …, 2) → (…, 2)."""
    return torch.stack([parts[..., 0].amin(0), parts[..., 1].amax(0)], dim=-1)


def _stack(rows: Iterable[Tensor], shape: Sequence[int], device: torch.device | str | None) -> Tensor:
    rows = [row.to(STATISTICS_DTYPE) for row in rows]
    return torch.stack(rows) if rows else torch.zeros(0, *shape, dtype=STATISTICS_DTYPE, device=device)
