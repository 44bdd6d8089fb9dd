"""Blocks of tokens, and the sums over each sequence that a pass over them leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.core.mergeable_statistics import Statistics


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

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values, 0 where they do not count, over each sequence: of the block's rows, or of all when packed."""
        return values.sum(-1) if self.lengths is None else self._reduce(values, "sum")

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each sequence; −inf for one that has no token here."""
        if self.lengths is not None:
            return self._reduce(values, "max")
        return values.amax(-1) if values.shape[-1] else values.new_full(values.shape[:1], -torch.inf)

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values, how, lengths=self.lengths, unsafe=True)


class SequenceTable(dict[str, Tensor]):
    """Per-sequence columns by name, (B,) float64: sums, and largest values where the name ends in _max."""

    def pack(self) -> Tensor:
        """All columns, (C, B), in their order."""
        return torch.stack(list(self.values()))

    def merge(self, parts: Tensor) -> None:
        """Replace every column by what passes over other tokens of the same sequences give together.

        Args:
            parts: (P, C, B), what `pack` gave for each part.
        """
        for name, column in zip(self, parts.unbind(1), strict=True):
            self[name] = column.amax(0) if name.endswith("_max") else column.sum(0)

    def join(self, other: SequenceTable, *, packed: bool) -> None:
        """Add what was read of another block: other sequences when padded, other tokens of the same when packed."""
        for name, column in other.items():
            if not packed:
                self[name] = torch.cat([self[name], column])
            elif name.endswith("_max"):
                self[name] = torch.maximum(self[name], column)
            else:
                self[name] += column


Reduction = Callable[[SequenceTable, Statistics], Statistics]
"""Merges what other processes read of the same sequences: into the table in place, and into the rows that it returns.
"""
