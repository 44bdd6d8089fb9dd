"""What a pass over blocks of tokens leaves behind: sums for each sequence, and rows for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics, merge_extremes, merge_moments, no_extremes


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
        self._columns = dict(zip(columns, self._sums.unbind(), strict=True))

    def __getitem__(self, column: str) -> Tensor:
        """The finished column."""
        return self._columns[column]

    def __setitem__(self, column: str, values: Tensor) -> None:
        """Set a column that follows from others."""
        self._columns[column] = values

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
        out = self._column(column, torch.inf if smallest else -torch.inf)
        if block.lengths is not None:
            ends = _segments(values, "min" if smallest else "max", block.lengths)
            (torch.minimum if smallest else torch.maximum)(out, ends, out=out)
        elif values.shape[-1]:
            (torch.amin if smallest else torch.amax)(values, dim=-1, out=out[block.at])

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
        for name, column in zip(sorted(self._columns), parts.unbind(1), strict=True):
            self._columns[name] = (
                column.amin(0) if name.endswith("_min") else column.amax(0) if name.endswith("_max") else column.sum(0)
            )

    def _column(self, name: str, fill: float) -> Tensor:
        if name not in self._columns:
            self._columns[name] = torch.full_like(self._sums[0], fill)
        return self._columns[name]


def _segments(values: Tensor, reduce: str, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(values, reduce, lengths=lengths, unsafe=True)


class BlockRows:
    """Batch-wide rows: one entry for each block, merged at the end."""

    def __init__(self) -> None:
        # Kind of row → name → what each block gave: a number for a sum, the numbers of moments or of extremes.
        self._rows: dict[str, dict[str, list[Any]]] = {"sums": {}, "moments": {}, "extremes": {}}

    def add(self, name: str, value: Tensor) -> None:
        """Add a 0-d value to a sum."""
        self._rows["sums"].setdefault(name, []).append(value)

    def moments(self, name: str, count: Tensor, mean: Tensor, m2: Tensor) -> None:
        """Add the 0-d moments of a block."""
        self._rows["moments"].setdefault(name, []).append((count, mean, m2))

    def extremes(self, name: str, smallest: Tensor, largest: Tensor) -> None:
        """Add the 0-d extremes of a block."""
        self._rows["extremes"].setdefault(name, []).append((smallest, largest))

    def join(self, other: BlockRows) -> None:
        """Append the entries of a pass over later blocks."""
        for kind, rows in other._rows.items():
            for name, entries in rows.items():
                self._rows[kind].setdefault(name, []).extend(entries)

    def statistics(self, device: torch.device) -> Statistics:
        """Every row, finished."""
        return Statistics.of(
            sums={name: self.sum(name) for name in self._rows["sums"]},
            moments={name: self.merged_moments(name) for name in self._rows["moments"]},
            extremes={name: self.merged_extremes(name, device) for name in self._rows["extremes"]},
            device=device,
        )

    def replace(self, statistics: Statistics) -> None:
        """Replace every row by a finished one, for instance of several parts merged."""
        for kind in self._rows:
            rows = zip(statistics.names[kind], statistics.rows[kind], strict=True)
            self._rows[kind] = {name: [row if kind == "sums" else row.unbind()] for name, row in rows}

    def sum(self, name: str) -> Tensor:
        """The finished sum, 0-d float64."""
        return torch.stack(self._rows["sums"][name]).sum(dtype=STATISTICS_DTYPE)

    def merged_moments(self, name: str) -> Tensor:
        """The finished moments, (3,) float64."""
        return merge_moments(
            torch.stack([torch.stack(part) for part in zip(*self._rows["moments"][name], strict=True)], dim=-1)
        )

    def merged_extremes(self, name: str, device: torch.device) -> Tensor:
        """The finished extremes, (2,) float64."""
        if name not in self._rows["extremes"]:
            return no_extremes(device)
        ends = [torch.stack(part) for part in zip(*self._rows["extremes"][name], strict=True)]
        return merge_extremes(torch.stack(ends, dim=-1))


Reduction = Callable[[SequenceTable, BlockRows], None]
"""Merges, in place, what other processes read of the same sequences."""
