"""What a pass over blocks of tokens leaves behind: sums for each sequence, and rows for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics, merge_extremes, merge_moments, merge_sums
from rollcorr.kernels.correction.rows import Computed


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


def joined(tables: Sequence[SequenceTable]) -> SequenceTable:
    """Join the tables that passes over different blocks of one batch filled."""
    if len(tables) > 1:
        tables[0].merge(torch.stack([table.pack() for table in tables]))
    return tables[0]


def _segments(values: Tensor, reduce: str, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(values, reduce, lengths=lengths, unsafe=True)


class BlockRows(NamedTuple):
    """The batch-wide rows of one block, number by number: stacking them here would cost an operation for each row.

    Attributes:
        sums: name → number, 0-d float64.
        moments: name → n, mean and M2.
        extremes: name → smallest and largest value.
    """

    sums: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor, Tensor]]
    extremes: dict[str, tuple[Tensor, Tensor]]

    def numbers(self) -> list[Tensor]:
        """Return the numbers of all rows, in the order of `Statistics.pack`."""
        return [*self.sums.values(), *chain(*self.moments.values()), *chain(*self.extremes.values())]


def merge_blocks(blocks: Sequence[BlockRows]) -> Computed:
    """Merge the rows of blocks, all at once: an operation on one number costs as much as one on a thousand."""
    vectors = torch.stack([number for block in blocks for number in block.numbers()]).view(len(blocks), -1)
    names = blocks[0]
    sums, moments, extremes = vectors.split((len(names.sums), 3 * len(names.moments), 2 * len(names.extremes)), dim=1)
    values = (sums, moments.unflatten(1, (-1, 3)), extremes.unflatten(1, (-1, 2)))

    # One block has nothing to merge, and each operation is a launch on a device.
    merged = [value[0] for value in values]
    if len(blocks) > 1:
        merged = [
            merge(value) for merge, value in zip((merge_sums, merge_moments, merge_extremes), values, strict=True)
        ]
    keys = (names.sums.keys(), names.moments.keys(), names.extremes.keys())
    return Computed(*(dict(zip(key, value.unbind(), strict=True)) for key, value in zip(keys, merged, strict=True)))


Reduction = Callable[[SequenceTable, Statistics], Statistics]
"""Merges what other processes read of the same sequences: into the table in place, and into the rows that it returns.
"""
