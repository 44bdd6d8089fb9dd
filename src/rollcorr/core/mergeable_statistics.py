"""Mergeable statistics: batch statistics that add up exactly.

There are five kinds of row, on the device of the data, in float64:

    sums        Σ x                     merged by addition
    moments     (n, mean, M2)           merged by Chan's update; M2 = Σ (x − mean)²
    extremes    (min, max)              merged by min and max
    histograms  counts in fixed bins    merged by addition; on request (`rollcorr.core.detail_rows`)
    tops        worst entries           merged by order; on request (`rollcorr.core.detail_rows`)

`merge` is associative and commutative up to the last bits of float64, so micro-batches, ranks and log shards produce
the same number as one process. Ratios, means and roots are computed once, after the last merge
(`rollcorr.core.metric_registry`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from rollcorr.core.detail_rows import merge_tops
from rollcorr.core.host_statistics import ROW_SHAPES, HostStatistics
from rollcorr.core.metric_registry import finalize

STATISTICS_DTYPE = torch.float64

_NO_ROWS: Mapping[str, Tensor] = MappingProxyType({})


def merge_sums(parts: Tensor) -> Tensor:
    """Merge sums, or histograms, over the first dimension."""
    return parts.sum(0)


def merge_moments(parts: Tensor) -> Tensor:
    """Merge moments over the first dimension: (P, …, 3) → (…, 3).

    n = Σ n_p,  mean = Σ n_p mean_p / n,  M2 = Σ M2_p + Σ n_p (mean_p − mean)².

    Source: Chan, Golub & LeVeque (1983), "Algorithms for Computing the Sample Variance".
    """
    count, mean, m2 = parts.unbind(-1)
    total = count.sum(0)

    # Add the deviation of each part's mean from the common mean, which is not in its M2.
    center = (count * mean).sum(0) / total.clamp(min=1)
    spread = m2.sum(0) + (count * (mean - center).square()).sum(0)
    return torch.stack([total, center, spread], dim=-1)


def merge_extremes(parts: Tensor) -> Tensor:
    """Merge extremes over the first dimension: (P, …, 2) → (…, 2)."""
    return torch.stack([parts[..., 0].amin(0), parts[..., 1].amax(0)], dim=-1)


_MERGE_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": merge_sums,
    "moments": merge_moments,
    "extremes": merge_extremes,
    "histograms": merge_sums,
    "tops": merge_tops,
}
"""Kind of row → (P, R, *shape) → (R, *shape)."""


def _row_shapes(names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    return {kind: (len(names[kind]), *shape) for kind, shape in ROW_SHAPES.items()}


class _PackedRows(Mapping[str, Tensor]):
    """Mapping of kind of row → values, stored in one vector that is split on first access."""

    def __init__(self, vector: Tensor, names: Mapping[str, tuple[str, ...]]) -> None:
        self.vector, self._names = vector, names
        self._parts: dict[str, Tensor] | None = None

    def __getitem__(self, kind: str) -> Tensor:
        if self._parts is None:
            shapes = _row_shapes(self._names)
            parts = self.vector.split([math.prod(shape) for shape in shapes.values()])
            self._parts = {kind: part.view(shapes[kind]) for kind, part in zip(shapes, parts, strict=True)}
        return self._parts[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(ROW_SHAPES)

    def __len__(self) -> int:
        return len(ROW_SHAPES)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Named rows on one device that merge exactly. Create them with `of`.

    Attributes:
        names: kind of row → the names of its rows.
        rows: kind of row → their values, float64: sums (R,), moments (R, 3: n, mean, M2), extremes (R, 2: min, max;
            +inf, −inf for an empty sample), histograms (R, BINS), tops (R, TOP, 3).
    """

    names: Mapping[str, tuple[str, ...]]
    rows: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        *,
        sums: Mapping[str, Tensor] = _NO_ROWS,
        moments: Mapping[str, Tensor] = _NO_ROWS,
        extremes: Mapping[str, Tensor] = _NO_ROWS,
        histograms: Mapping[str, Tensor] = _NO_ROWS,
        tops: Mapping[str, Tensor] = _NO_ROWS,
        device: torch.device | str | None = None,
    ) -> Statistics:
        """Stack named rows.

        Args:
            sums: name → a 0-d tensor.
            moments: name → result of `moments_of`, (3,): count, mean and sum of squared deviations.
            extremes: name → result of `extremes_of`, (2,).
            histograms: name → result of `histogram_of`, (BINS,).
            tops: name → result of `top_entries`, (TOP, 3).
            device: device of the empty tables; needed only if no row is given.
        """
        given = dict(zip(ROW_SHAPES, (sums, moments, extremes, histograms, tops), strict=True))

        # If there is no row, the caller must specify the device of the empty tables.
        device = next((row.device for rows in given.values() for row in rows.values()), device)
        return cls(
            {kind: tuple(rows) for kind, rows in given.items()},
            {kind: _stack(rows.values(), ROW_SHAPES[kind], device) for kind, rows in given.items()},
        )

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both samples combined.

        Raises:
            ValueError: the two have different rows, for instance because their configurations differ.
        """
        return merge_statistics([self, other])

    def __or__(self, other: Statistics) -> Statistics:
        """Join two statistics with disjoint rows over the same sample (a batch's correction and its loss)."""
        shared = {name for kind in ROW_SHAPES for name in set(self.names[kind]) & set(other.names[kind])}
        if shared:
            raise ValueError(f"rows appear on both sides: {sorted(shared)}")

        return Statistics(
            {kind: self.names[kind] + other.names[kind] for kind in ROW_SHAPES},
            {kind: torch.cat([self.rows[kind], other.rows[kind]]) for kind in ROW_SHAPES},
        )

    def without(self, *left_out: str) -> Statistics:
        """Return all rows except these. Unknown names are ignored."""
        kept = {kind: [i for i, name in enumerate(self.names[kind]) if name not in left_out] for kind in ROW_SHAPES}
        return Statistics(
            {kind: tuple(self.names[kind][i] for i in kept[kind]) for kind in ROW_SHAPES},
            {
                kind: torch.stack([rows[i] for i in kept[kind]]) if kept[kind] else rows[:0]
                for kind, rows in self.rows.items()
            },
        )

    def pack(self) -> Tensor:
        """Return all rows as one float64 vector, for a single transfer between ranks or to the host."""
        if isinstance(self.rows, _PackedRows):
            return self.rows.vector.clone()
        return torch.cat([rows.flatten() for rows in self.rows.values()])

    def unpack(self, vector: Tensor) -> Statistics:
        """Return the same rows with the values of a vector.

        Args:
            vector: 1-D float64, from `pack`, on any rank.
        """
        return Statistics(self.names, _PackedRows(vector, self.names))

    @classmethod
    def from_vector(cls, names: Mapping[str, tuple[str, ...]], vector: Tensor) -> Statistics:
        """Return rows with these names, kind by kind, without an existing `Statistics`.

        Args:
            names: kind of row → the names of its rows.
            vector: 1-D float64, from `pack`.

        Raises:
            ValueError: the vector has a different number of values than these rows.
        """
        sizes = [math.prod(shape) for shape in _row_shapes(names).values()]
        if sum(sizes) != vector.numel():
            raise ValueError(f"these rows have {sum(sizes)} values, and the vector has {vector.numel()}")
        return cls(dict(names), _PackedRows(vector, names))

    def read(self) -> HostStatistics:
        """Copy every row to the host in one transfer."""
        # Each transfer syncs with the device, so all rows travel together, as one list of numbers.
        vector = self.rows.vector if isinstance(self.rows, _PackedRows) else self.pack()
        return HostStatistics(tuple([self.names[kind] for kind in ROW_SHAPES]), vector.cpu().tolist())

    def metrics(self, *, prefix: str = "rollout_corr/") -> dict[str, float]:
        """Compute every metric whose rows are present, in one transfer; also of merged statistics."""
        return finalize(self.read(), prefix=prefix)

    def sum(self, name: str) -> Tensor:
        """Return one sum, 0-d, still on the device."""
        return self.rows["sums"][self.names["sums"].index(name)]

    def moment(self, name: str) -> Tensor:
        """Return one row of moments, (3,): n, mean, M2, still on the device."""
        return self.rows["moments"][self.names["moments"].index(name)]


def merge_statistics(parts: Iterable[Statistics]) -> Statistics:
    """Merge any number of statistics. The same parts in the same order produce the same bits.

    Raises:
        ValueError: there are no parts, or rows differ.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("nothing to merge: give at least one Statistics")

    names = parts[0].names
    for part in parts:
        if part.names != names:
            differing = sorted({name for kind in ROW_SHAPES for name in set(part.names[kind]) ^ set(names[kind])})
            raise ValueError(f"only statistics with the same rows merge; these rows are on one side only: {differing}")

    # Histograms and the worst entries are optional. A kind without rows is skipped.
    merged = {
        kind: _MERGE_FUNCTIONS[kind](torch.stack([part.rows[kind] for part in parts])) if names[kind] else rows
        for kind, rows in parts[0].rows.items()
    }
    return Statistics(names, merged)


def moments_of(values: Tensor, mask: Tensor) -> Tensor:
    """Compute (n, mean, M2) of the values where mask is true, in two passes, so that a large mean cancels no digits.

    Args:
        values: any shape, finite where `mask` is true. Masked values are never read.
        mask: bool, same shape.

    Returns:
        (3,) float64. Zeros for an empty sample.
    """
    values = values.to(STATISTICS_DTYPE)
    count = mask.sum(dtype=STATISTICS_DTYPE)
    mean = values.masked_fill(~mask, 0.0).sum() / count.clamp(min=1)

    # Subtract the mean first: Σ x² − n mean² would cancel for a mean far from 0.
    m2 = (values - mean).masked_fill_(~mask, 0.0).pow_(2).sum()
    return torch.stack([count, mean, m2])


def extremes_of(values: Tensor, mask: Tensor) -> Tensor:
    """Compute (min, max) of the values where mask is true; (+inf, −inf) if the sample is empty. (2,) float64."""
    if values.numel() == 0:
        return no_extremes(values.device)
    values = values.to(STATISTICS_DTYPE)
    return torch.stack([values.masked_fill(~mask, torch.inf).amin(), values.masked_fill(~mask, -torch.inf).amax()])


def no_extremes(device: torch.device) -> Tensor:
    """Return (+inf, −inf), the extremes of an empty sample, (2,) float64."""
    # Fill on the device: copying two numbers from Python would stall a GPU's queue.
    nothing = torch.full((2,), torch.inf, dtype=STATISTICS_DTYPE, device=device)
    nothing[1:].neg_()
    return nothing


def _stack(rows: Iterable[Tensor], shape: Sequence[int], device: torch.device | str | None) -> Tensor:
    rows = [row.to(STATISTICS_DTYPE) for row in rows]
    return torch.stack(rows) if rows else torch.empty(0, *shape, dtype=STATISTICS_DTYPE, device=device)
