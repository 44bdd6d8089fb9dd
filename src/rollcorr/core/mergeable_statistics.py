"""Mergeable statistics: numbers about a batch that add up exactly.

There are five kinds of row, on the device of the data, in float64:

    sums        Σ x                     merged by addition
    moments     (n, mean, M2)           merged by Chan's update; M2 = Σ (x − mean)²
    extremes    (min, max)              merged by min and max
    histograms  counts in fixed bins    merged by addition; on request (`rollcorr.core.detail_rows`)
    tops        the worst, and where    merged by order; on request (`rollcorr.core.detail_rows`)

`merge` is associative and commutative up to the last bits of float64, so micro-batches, ranks and log shards
give the number that one process would. Ratios, means and roots are taken once, after the last merge
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

_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


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

    # What each part's mean is away from the common one was not in its M2.
    center = (count * mean).sum(0) / total.clamp(min=1)
    spread = m2.sum(0) + (count * (mean - center).square()).sum(0)
    return torch.stack([total, center, spread], dim=-1)


def merge_extremes(parts: Tensor) -> Tensor:
    """Merge extremes over the first dimension: (P, …, 2) → (…, 2)."""
    return torch.stack([parts[..., 0].amin(0), parts[..., 1].amax(0)], dim=-1)


_MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": merge_sums,
    "moments": merge_moments,
    "extremes": merge_extremes,
    "histograms": merge_sums,
    "tops": merge_tops,
}
"""Kind of row → (P, R, *shape) → (R, *shape)."""


def _shapes(names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    return {kind: (len(names[kind]), *shape) for kind, shape in ROW_SHAPES.items()}


class _PackedRows(Mapping[str, Tensor]):
    """Kind of row → values, of rows that lie in one vector. They are taken apart when they are first asked for."""

    def __init__(self, vector: Tensor, names: Mapping[str, tuple[str, ...]]) -> None:
        self.vector, self._names = vector, names
        self._parts: dict[str, Tensor] | None = None

    def __getitem__(self, kind: str) -> Tensor:
        if self._parts is None:
            shapes = _shapes(self._names)
            parts = self.vector.split([math.prod(shape) for shape in shapes.values()])
            self._parts = {kind: part.view(shapes[kind]) for kind, part in zip(shapes, parts, strict=True)}
        return self._parts[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(ROW_SHAPES)

    def __len__(self) -> int:
        return len(ROW_SHAPES)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Named rows that live on one device and merge exactly. `of` makes them.

    Attributes:
        names: kind of row → the names of its rows.
        rows: kind of row → their values, float64: sums (R,), moments (R, 3: n, mean, M2), extremes (R, 2: min, max;
            +inf, −inf when nothing was seen), histograms (R, BINS), tops (R, TOP, 3).
    """

    names: Mapping[str, tuple[str, ...]]
    rows: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        *,
        sums: Mapping[str, Tensor] = _NOTHING,
        moments: Mapping[str, Tensor] = _NOTHING,
        extremes: Mapping[str, Tensor] = _NOTHING,
        histograms: Mapping[str, Tensor] = _NOTHING,
        tops: Mapping[str, Tensor] = _NOTHING,
        device: torch.device | str | None = None,
    ) -> Statistics:
        """Stack named rows.

        Args:
            sums: name → a 0-d tensor.
            moments: name → what `moments_of` returns, (3,): count, mean and sum of squared deviations.
            extremes: name → what `extremes_of` returns, (2,).
            histograms: name → what `histogram_of` returns, (BINS,).
            tops: name → what `top_entries` returns, (TOP, 3).
            device: where the tables go if no row is given at all.
        """
        given = dict(zip(ROW_SHAPES, (sums, moments, extremes, histograms, tops), strict=True))

        # Only where there is no row at all, the caller must say which device the empty tables are on.
        device = next((row.device for rows in given.values() for row in rows.values()), device)
        return cls(
            {kind: tuple(rows) for kind, rows in given.items()},
            {kind: _stack(rows.values(), ROW_SHAPES[kind], device) for kind, rows in given.items()},
        )

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both samples together.

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
        """All rows except these. Names that are not there are ignored."""
        kept = {kind: [i for i, name in enumerate(self.names[kind]) if name not in left_out] for kind in ROW_SHAPES}
        return Statistics(
            {kind: tuple(self.names[kind][i] for i in kept[kind]) for kind in ROW_SHAPES},
            {
                kind: torch.stack([rows[i] for i in kept[kind]]) if kept[kind] else rows[:0]
                for kind, rows in self.rows.items()
            },
        )

    def pack(self) -> Tensor:
        """All rows as one float64 vector, which travels between ranks or to the host in one transfer."""
        if isinstance(self.rows, _PackedRows):
            return self.rows.vector.clone()
        return torch.cat([rows.flatten() for rows in self.rows.values()])

    def unpack(self, vector: Tensor) -> Statistics:
        """The same rows with other values.

        Args:
            vector: 1-D float64, from `pack`, here or on another rank.
        """
        return Statistics(self.names, _PackedRows(vector, self.names))

    @classmethod
    def from_vector(cls, names: Mapping[str, tuple[str, ...]], vector: Tensor) -> Statistics:
        """The rows with these names, kind by kind; for who has no such rows.

        Args:
            names: kind of row → the names of its rows.
            vector: 1-D float64, from `pack`.

        Raises:
            ValueError: the vector has another number of values than these rows.
        """
        sizes = [math.prod(shape) for shape in _shapes(names).values()]
        if sum(sizes) != vector.numel():
            raise ValueError(f"these rows have {sum(sizes)} values, and the vector has {vector.numel()}")
        return cls(dict(names), _PackedRows(vector, names))

    def read(self) -> HostStatistics:
        """Bring every row to the host in one transfer."""
        # Each transfer waits for the device, so all rows travel together, as one list of numbers.
        vector = self.rows.vector if isinstance(self.rows, _PackedRows) else self.pack()
        return HostStatistics(tuple([self.names[kind] for kind in ROW_SHAPES]), vector.cpu().tolist())

    def metrics(self, *, prefix: str = "rollout_corr/") -> dict[str, float]:
        """Every metric of the registry that these rows suffice for, in one transfer; of merged statistics too."""
        return finalize(self.read(), prefix=prefix)

    def sum(self, name: str) -> Tensor:
        """One sum, 0-d, still on the device."""
        return self.rows["sums"][self.names["sums"].index(name)]

    def moment(self, name: str) -> Tensor:
        """One row of moments, (3,): n, mean, M2, still on the device."""
        return self.rows["moments"][self.names["moments"].index(name)]


def merge_statistics(parts: Iterable[Statistics]) -> Statistics:
    """Merge any number of statistics. The same parts in the same order give the same bits.

    Raises:
        ValueError: there is nothing to merge, or rows differ.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("nothing to merge: give at least one Statistics")

    names = parts[0].names
    for part in parts:
        if part.names != names:
            differing = sorted({name for kind in ROW_SHAPES for name in set(part.names[kind]) ^ set(names[kind])})
            raise ValueError(f"only statistics with the same rows merge; these rows are on one side only: {differing}")

    # Histograms and the worst entries exist on request only. A kind without rows has nothing to merge.
    merged = {
        kind: _MERGES[kind](torch.stack([part.rows[kind] for part in parts])) if names[kind] else rows
        for kind, rows in parts[0].rows.items()
    }
    return Statistics(names, merged)


def moments_of(values: Tensor, mask: Tensor) -> Tensor:
    """(n, mean, M2) of the values where mask is true, in two passes, so that a large mean cancels no digits.

    Args:
        values: any shape, finite where `mask` is true. Masked values are never read.
        mask: bool, same shape.

    Returns:
        (3,) float64. An empty sample gives zeros.
    """
    values = values.to(STATISTICS_DTYPE)
    count = mask.sum(dtype=STATISTICS_DTYPE)
    mean = values.masked_fill(~mask, 0.0).sum() / count.clamp(min=1)

    # Deviations are taken from the mean itself: Σ x² − n mean² would cancel for a mean far from 0.
    m2 = (values - mean).masked_fill_(~mask, 0.0).pow_(2).sum()
    return torch.stack([count, mean, m2])


def extremes_of(values: Tensor, mask: Tensor) -> Tensor:
    """(min, max) of the values where mask is true; (+inf, −inf) when there is none. (2,) float64."""
    if values.numel() == 0:
        return no_extremes(values.device)
    values = values.to(STATISTICS_DTYPE)
    return torch.stack([values.masked_fill(~mask, torch.inf).amin(), values.masked_fill(~mask, -torch.inf).amax()])


def no_extremes(device: torch.device) -> Tensor:
    """(+inf, −inf), the extremes of an empty sample, (2,) float64."""
    # Filled on the device: two numbers from Python would be copied there, and a GPU's queue would stop for them.
    nothing = torch.full((2,), torch.inf, dtype=STATISTICS_DTYPE, device=device)
    nothing[1:].neg_()
    return nothing


def _stack(rows: Iterable[Tensor], shape: Sequence[int], device: torch.device | str | None) -> Tensor:
    rows = [row.to(STATISTICS_DTYPE) for row in rows]
    return torch.stack(rows) if rows else torch.empty(0, *shape, dtype=STATISTICS_DTYPE, device=device)
