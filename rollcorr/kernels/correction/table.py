"""What a pass over blocks of tokens leaves behind: sums for each sequence, and rows for the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollcorr.core.statistics import STATISTICS_DTYPE, Statistics, merge_moments


class SequenceTable:
    """Per-sequence columns, (B,) float64, filled block by block.

    A padded block holds whole rows, so each entry is written once. A packed block may hold part of a sequence, so
    columns accumulate.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        self._sequences, self._device = sequences, device
        self._columns: dict[str, Tensor] = {}

    def __getitem__(self, column: str) -> Tensor:
        """The finished column."""
        return self._columns[column]

    def __setitem__(self, column: str, values: Tensor) -> None:
        """Set a column that follows from others."""
        self._columns[column] = values

    def add(self, column: str, values: Tensor, rows: slice, ids: Tensor | None) -> None:
        """Add a block's values to their sequences. Values are 0 (or False) at tokens that do not take part."""
        out = self._column(column, 0.0)
        if ids is None:
            counting = values.dtype == torch.bool
            out[rows] = values.count_nonzero(dim=-1) if counting else values.sum(dim=-1, dtype=STATISTICS_DTYPE)
        else:
            out.index_add_(0, ids, values.to(STATISTICS_DTYPE))

    def extremes(self, column: str, low: Tensor, high: Tensor, rows: slice, ids: Tensor | None) -> None:
        """Track the smallest and largest value of each sequence, as columns `{column}_min` and `{column}_max`.

        Args:
            column: name of the pair.
            low: the values, with +inf at tokens that do not take part.
            high: the values, with −inf at tokens that do not take part.
            rows: the block's rows, when padded.
            ids: each token's sequence, when packed.
        """
        smallest, largest = self._column(f"{column}_min", torch.inf), self._column(f"{column}_max", -torch.inf)
        if ids is not None:
            smallest.scatter_reduce_(0, ids, low, "amin")
            largest.scatter_reduce_(0, ids, high, "amax")
        elif low.shape[-1]:
            smallest[rows], largest[rows] = low.amin(dim=-1), high.amax(dim=-1)

    def join(self, other: SequenceTable) -> None:
        """Add the columns that a pass over other blocks of the same batch filled."""
        for column, values in other._columns.items():
            if column.endswith("_min"):
                self._column(column, torch.inf).clamp_(max=values)
            elif column.endswith("_max"):
                self._column(column, -torch.inf).clamp_(min=values)
            else:
                self._column(column, 0.0).add_(values)

    def pack(self) -> Tensor:
        """All columns, (C, B), in the order of their names."""
        columns = [self._columns[name] for name in sorted(self._columns)]
        return torch.stack(columns) if columns else torch.zeros(0, self._sequences, device=self._device)

    def merge(self, parts: Tensor) -> None:
        """Replace every column by what passes over other tokens of the same sequences give together.

        Args:
            parts: (P, C, B), what `pack` gave for each part.
        """
        for name, column in zip(sorted(self._columns), parts.unbind(1), strict=True):
            self._columns[name] = (
                column.amin(0) if name.endswith("_min") else column.amax(0) if name.endswith("_max") else column.sum(0)
            )

    def _column(self, name: str, fill: float) -> Tensor:
        if name not in self._columns:
            self._columns[name] = torch.full((self._sequences,), fill, dtype=STATISTICS_DTYPE, device=self._device)
        return self._columns[name]


class BlockRows:
    """Batch-wide rows: one entry for each block, merged at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._moments: dict[str, list[Tensor]] = {}
        self._extremes: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a 0-d value to a sum."""
        self._sums.setdefault(name, []).append(value)

    def moments(
        self,
        name: str,
        values: Tensor,
        taking_part: Tensor,
        count: Tensor,
        *,
        out: Tensor,
        excess: Tensor | None = None,
    ) -> None:
        """Add (n, mean, M2) of a block's values around its own mean, so that a large mean cancels nothing.

        Args:
            name: the row.
            values: float64, 0 at tokens that do not take part.
            taking_part: 1.0 or 0.0 for each token.
            count: n, 0-d float64.
            out: a float64 buffer to work in.
            excess: how many tokens `taking_part` counts beyond n; their value is 0. None for none.
        """
        mean = values.sum() / count.clamp(min=1)
        deviation = torch.sub(values, mean, out=out).mul_(taking_part).flatten()
        m2 = torch.dot(deviation, deviation)
        if excess is not None:
            m2 = (m2 - excess * mean.square()).clamp(min=0.0)
        self._moments.setdefault(name, []).append(torch.stack([count, mean, m2]))

    def extremes(self, name: str, low: Tensor, high: Tensor) -> None:
        """Add (min, max) of a block; `low` has +inf and `high` −inf at tokens that do not take part."""
        # A slice without tokens has the row too, so that all slices have the same ones.
        ends = [low.amin(), high.amax()] if high.numel() else [high.new_full((), x) for x in (torch.inf, -torch.inf)]
        self._extremes.setdefault(name, []).append(torch.stack(ends))

    def join(self, other: BlockRows) -> None:
        """Append the entries of a pass over later blocks."""
        for own, others in (
            (self._sums, other._sums),
            (self._moments, other._moments),
            (self._extremes, other._extremes),
        ):
            for name, entries in others.items():
                own.setdefault(name, []).extend(entries)

    def statistics(self, device: torch.device) -> Statistics:
        """Every row, finished."""
        return Statistics.of(
            sums={name: self.sum(name) for name in self._sums},
            moments={name: self.merged_moments(name) for name in self._moments},
            extremes={name: self.merged_extremes(name, device) for name in self._extremes},
            device=device,
        )

    def replace(self, statistics: Statistics) -> None:
        """Replace every row by a finished one, for instance of several parts merged."""
        names = statistics.names
        self._sums = {name: [row] for name, row in zip(names["sums"], statistics.sums, strict=True)}
        self._moments = {name: [row] for name, row in zip(names["moments"], statistics.moments, strict=True)}
        self._extremes = {name: [row] for name, row in zip(names["extremes"], statistics.extremes, strict=True)}

    def sum(self, name: str) -> Tensor:
        """The finished sum, 0-d float64."""
        return torch.stack(self._sums[name]).sum(dtype=STATISTICS_DTYPE)

    def merged_moments(self, name: str) -> Tensor:
        """The finished moments, (3,) float64."""
        return merge_moments(torch.stack(self._moments[name]))

    def merged_extremes(self, name: str, device: torch.device) -> Tensor:
        """The finished extremes, (2,) float64."""
        if name not in self._extremes:
            return torch.tensor([torch.inf, -torch.inf], dtype=STATISTICS_DTYPE, device=device)
        parts = torch.stack(self._extremes[name])
        return torch.stack([parts[:, 0].amin(), parts[:, 1].amax()])


Reduction = Callable[[SequenceTable, BlockRows], None]
"""Merges, in place, what other processes read of the same sequences."""
