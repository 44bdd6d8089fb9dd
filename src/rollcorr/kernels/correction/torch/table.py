"""What a pass over blocks of tokens leaves behind: sums for each sequence, and rows for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics, merge_extremes, merge_moments, merge_sums


class Block(NamedTuple):
    """Some of a batch's tokens.

    Attributes:
        at: its rows when padded, its tokens when packed.
        lengths: how many of its tokens each sequence has, (B,), when packed; None when padded.
    """

    at: slice
    lengths: Tensor | None

    def ids(self) -> Tensor | None:
        """The sequence of each token, (n,) int64, when packed; None when padded."""
        if self.lengths is None:
            return None
        return torch.repeat_interleave(self.lengths, output_size=self.at.stop - self.at.start)


class SequenceTable:
    """Per-sequence columns, (B,) float64, filled block by block.

    A padded block holds whole rows, so each entry is written once. A packed block may hold part of a sequence, so
    columns accumulate.
    """

    def __init__(self, columns: Sequence[str], sequences: int, device: torch.device) -> None:
        self._sums = torch.zeros(len(columns), sequences, dtype=STATISTICS_DTYPE, device=device)
        self._names = tuple(columns)
        self._columns = dict(zip(columns, self._sums.unbind(), strict=True))

    def __getitem__(self, column: str) -> Tensor:
        """The finished column."""
        return self._columns[column]

    def __setitem__(self, column: str, values: Tensor) -> None:
        """Set a column that follows from others."""
        self._columns[column] = values

    def neighbors(self, first: str, last: str) -> Tensor:
        """The summed columns from one to another, (C, B), as they were named to the table."""
        return self._sums[self._names.index(first) : self._names.index(last) + 1]

    def add(self, values: Tensor, block: Block) -> Tensor:
        """Add a block's values to their sequences, and return what they add up to, for each column.

        Args:
            values: for each column, (C, rows, T) when padded and (C, n) when packed; 0 at tokens that take no part.
            block: which tokens these are.
        """
        if block.lengths is None:
            sums = torch.sum(values, dim=-1, out=self._sums[:, block.at])
        else:
            sums = _segments(values.view(-1), "sum", block.lengths.repeat(len(values))).view_as(self._sums)
            self._sums.add_(sums)
        return sums.sum(-1)

    def extreme(self, column: str, values: Tensor, block: Block) -> None:
        """Track the smallest or the largest value of each sequence: `column` ends in _min or _max.

        Args:
            column: the name.
            values: (rows, T) or (n,), with something far off at tokens that take no part.
            block: which tokens these are.
        """
        smallest = column.endswith("_min")
        if block.lengths is None:
            ends = self._column(column, torch.inf if smallest else -torch.inf)[block.at]
            if values.shape[-1]:
                (torch.amin if smallest else torch.amax)(values, dim=-1, out=ends)
            return

        # The first block says something of every sequence, and of one that has no token there, nothing.
        ends = _segments(values, "min" if smallest else "max", block.lengths)
        found = self._columns.setdefault(column, ends)
        if found is not ends:
            (torch.minimum if smallest else torch.maximum)(found, ends, out=found)

    def join(self, other: SequenceTable) -> None:
        """Add the columns that a pass over other blocks of the same batch filled."""
        for column, values in other._columns.items():
            if column.endswith("_min"):
                self._column(column, torch.inf).clamp_(max=values)
            elif column.endswith("_max"):
                self._column(column, -torch.inf).clamp_(min=values)
        self._sums.add_(other._sums)

    def pack(self) -> Tensor:
        """All columns, (C, B), in the order of their names."""
        return torch.stack([self._columns[name] for name in sorted(self._columns)])

    def merge(self, parts: Tensor) -> None:
        """Replace every column by what passes over other tokens of the same sequences give together.

        Args:
            parts: (P, C, B), what `pack` gave for each part.
        """
        merged: dict[str, Tensor] = {}
        for name, column in zip(sorted(self._columns), parts.unbind(1), strict=True):
            if name.endswith("_min"):
                merged[name] = column.amin(0)
            elif name.endswith("_max"):
                merged[name] = column.amax(0)
            else:
                merged[name] = column.sum(0)

        # The sums stay together in one tensor.
        self._sums = torch.stack([merged[name] for name in self._names])
        self._columns = merged | dict(zip(self._names, self._sums.unbind(), strict=True))

    def _column(self, name: str, fill: float) -> Tensor:
        if name not in self._columns:
            self._columns[name] = torch.full_like(self._sums[0], fill)
        return self._columns[name]


def _segments(values: Tensor, reduce: str, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(values, reduce, lengths=lengths, unsafe=True)


class BlockRows:
    """Batch-wide rows: one entry for each block, merged at the end, all of them at once."""

    def __init__(self) -> None:
        # Kind of row → name → what each block gave, number by number: one of a sum, three of moments, two of extremes.
        self._entries: dict[str, dict[str, list[Tensor]]] = {"sums": {}, "moments": {}, "extremes": {}}
        self._merged: dict[str, dict[str, Tensor]] | None = None

    def add(self, name: str, value: Tensor) -> None:
        """Add a 0-d value to a sum."""
        self._entries["sums"].setdefault(name, []).append(value)

    def moments(self, name: str, count: Tensor, mean: Tensor, m2: Tensor) -> None:
        """Add the 0-d moments of a block."""
        self._entries["moments"].setdefault(name, []).extend((count, mean, m2))

    def extremes(self, name: str, smallest: Tensor, largest: Tensor) -> None:
        """Add the 0-d extremes of a block."""
        self._entries["extremes"].setdefault(name, []).extend((smallest, largest))

    def join(self, other: BlockRows) -> None:
        """Append the entries of a pass over later blocks."""
        for kind, rows in other._entries.items():
            for name, entries in rows.items():
                self._entries[kind].setdefault(name, []).extend(entries)

    def statistics(self, device: torch.device) -> Statistics:
        """Every row, finished."""
        rows = self._finished()
        return Statistics.of(sums=rows["sums"], moments=rows["moments"], extremes=rows["extremes"], device=device)

    def replace(self, statistics: Statistics) -> None:
        """Replace every row by a finished one, for instance of several parts merged."""
        self._merged = {
            kind: dict(zip(statistics.names[kind], statistics.rows[kind].unbind(), strict=True))
            for kind in self._entries
        }

    def sum(self, name: str) -> Tensor:
        """The finished sum, 0-d float64."""
        return self._finished()["sums"][name]

    def merged_moments(self, name: str) -> Tensor:
        """The finished moments, (3,) float64."""
        return self._finished()["moments"][name]

    def merged_extremes(self, name: str) -> Tensor:
        """The finished extremes, (2,) float64."""
        return self._finished()["extremes"][name]

    def _finished(self) -> dict[str, dict[str, Tensor]]:
        """Kind → name → the row, merged over the blocks."""
        if self._merged is not None:
            return self._merged
        numbers = [x for rows in self._entries.values() for entries in rows.values() for x in entries]
        if not numbers:
            return {kind: {} for kind in self._entries}

        # One vector of every number: an operation on a number costs as much as one on a thousand.
        parts = iter(torch.stack(numbers).split([sum(map(len, rows.values())) for rows in self._entries.values()]))
        self._merged = {}
        for kind, size, merge in (
            ("sums", 1, merge_sums),
            ("moments", 3, merge_moments),
            ("extremes", 2, merge_extremes),
        ):
            rows, values = self._entries[kind], next(parts)
            by_block = values.view(len(rows), -1, size) if rows else values.view(0, 1, size)
            merged = by_block[:, 0] if by_block.shape[1] == 1 else merge(by_block.transpose(0, 1))
            merged = merged.squeeze(-1) if kind == "sums" else merged
            self._merged[kind] = dict(zip(rows, merged.unbind(), strict=True))
        return self._merged


Reduction = Callable[[SequenceTable, BlockRows], None]
"""Merges, in place, what other processes read of the same sequences."""
