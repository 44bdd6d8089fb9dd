"""Blocks of tokens, and the sums over each sequence that a pass over them leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.core.horizon import Gather
from rollcorr.core.mergeable_statistics import Statistics


class Block(NamedTuple):
    """Part of a batch's tokens.

    Attributes:
        at: index of its rows when padded, of its tokens when packed.
        lengths: number of its tokens in each sequence, (B,), when packed; `None` when padded.
    """

    at: slice
    lengths: Tensor | None

    def ids(self) -> Tensor | None:
        """Return the sequence of each token, (n,) int64, when packed; `None` when padded."""
        if self.lengths is None:
            return None
        return torch.repeat_interleave(self.lengths, output_size=self.at.stop - self.at.start)

    def sum(self, values: Tensor) -> Tensor:
        """Sum values, 0 on uncounted tokens, over each sequence: of the block if padded, of the batch if packed."""
        return values.sum(-1) if self.lengths is None else self._reduce_by_sequence(values, "sum")

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each sequence; −inf for one without a token in this block."""
        if self.lengths is not None:
            return self._reduce_by_sequence(values, "max")
        return values.amax(-1) if values.shape[-1] else values.new_full(values.shape[:1], -torch.inf)

    def _reduce_by_sequence(self, values: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values, how, lengths=self.lengths, unsafe=True)


class SequenceTable(dict[str, Tensor]):
    """Per-sequence columns by name, (B,) float64: sums, and largest values where the name ends in _max."""

    def pack(self) -> Tensor:
        """Return all columns, (C, B), in their order."""
        return torch.stack(list(self.values()))

    def merge(self, parts: Tensor) -> None:
        """Replace every column by the merge of several passes over other tokens of the same sequences.

        Args:
            parts: (P, C, B), the result of `pack` for each part.
        """
        for name, column in zip(self, parts.unbind(1), strict=True):
            self[name] = column.amax(0) if name.endswith("_max") else column.sum(0)

    def join(self, other: SequenceTable, *, packed: bool) -> None:
        """Add the table of another block: other sequences when padded, other tokens of the same when packed."""
        for name, column in other.items():
            if not packed:
                self[name] = torch.cat([self[name], column])
            elif name.endswith("_max"):
                self[name] = torch.maximum(self[name], column)
            else:
                self[name] += column


class Reduction(NamedTuple):
    """Exchange with the processes that have the other slices of the same sequences.

    Attributes:
        merge: merges what they read: into the table in place, and into the rows that it returns.
        gather: collects a tensor of every slice, in the order of the tokens.
    """

    merge: Callable[[SequenceTable, Statistics], Statistics]
    gather: Gather
