"""The tokens of a block that count, brought together: where they lie in it, and how many each sequence has.

Nothing that is computed of them needs a mask, and padding costs nothing. This reads the mask's values, so it is for
host memory alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollcorr.kernels.correction.torch.table import Block

SHORT = 512
"""Tokens: runs that are shorter than this on average are not copied one by one, because each costs an operation."""

Place = tuple[int, slice] | slice
"""Where a run of tokens is in its block: (row, columns), or tokens."""


class CountedTokens:
    """Tokens of a block, and their order: by sequence, and in it by place.

    Attributes:
        at: the sequences of the block.
        counts: how many tokens each of these has.
        number: how many all of them have, n.
    """

    def __init__(
        self, at: slice, counts: list[int], number: int, runs: list[Place] | None = None, index: Tensor | None = None
    ) -> None:
        """Take where they lie: runs in order, or places in the flat block, (n,) int64. Neither: everywhere."""
        self.at, self.counts, self.number = at, counts, number
        self._runs, self._index = runs, index
        self._is_even = counts[0] > 0 and counts.count(counts[0]) == len(counts)
        if not self._is_even:
            lengths = np.array(counts)
            self._present = lengths > 0
            self._starts = (np.cumsum(lengths) - lengths)[self._present]

    def take(self, source: Tensor, out: Tensor, spare: Tensor) -> None:
        """Widen the tokens of a block, (rows, T) or (tokens,), into (n,); `spare` is overwritten."""
        if self.number == source.numel():
            out.view(source.shape).copy_(source)
            return
        if self._index is not None:
            narrow = spare.view(source.dtype)[: self.number]
            out.copy_(torch.index_select(source.reshape(-1), 0, self._index, out=narrow))
            return
        start = 0
        for place in self._runs or ():
            run = source[place]
            end = start + run.numel()
            out[start:end].view(run.shape).copy_(run)
            start = end

    def put(self, values: Tensor, out: Tensor, spare: Tensor) -> None:
        """Narrow (n,) into a contiguous block, which is 0 elsewhere; `spare` is overwritten."""
        if self.number == out.numel():
            out.copy_(values.view(out.shape))
            return
        out.zero_()
        if self._index is not None:
            narrow = spare.view(out.dtype)[: self.number].copy_(values)
            out.view(-1).index_copy_(0, self._index, narrow)
            return
        start = 0
        for place in self._runs or ():
            run = out[place]
            end = start + run.numel()
            run.copy_(values[start:end].view(run.shape))
            start = end

    def mark(self, out: Tensor) -> None:
        """True where a token counts, False elsewhere, in a contiguous bool block."""
        if self.number == out.numel():
            out.fill_(True)
            return
        out.zero_()
        if self._index is not None:
            out.view(-1).index_fill_(0, self._index, True)
        for place in self._runs or ():
            out[place].fill_(True)

    def sums(self, values: Tensor) -> Tensor:
        """Σ over each sequence: (n,) → (sequences,)."""
        if self._is_even:
            return values.view(len(self.counts), -1).sum(-1)
        return self._reduced(np.add, values, 0.0)

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest of each sequence, (n,) → (sequences,); (inf, −inf) of one without tokens."""
        if self._is_even:
            rows = values.view(len(self.counts), -1)
            return rows.amin(-1), rows.amax(-1)
        return self._reduced(np.minimum, values, np.inf), self._reduced(np.maximum, values, -np.inf)

    def _reduced(self, how: np.ufunc, values: Tensor, nothing: float) -> Tensor:
        """Sequences of any lengths at once: numpy adds and compares several values at a time here, torch does not."""
        found = np.full(len(self.counts), nothing)
        found[self._present] = how.reduceat(values.numpy(), self._starts)
        return torch.from_numpy(found)


def counted_tokens(mask: Tensor, block: Block) -> CountedTokens | None:
    """The tokens of a block that count; None where there is none."""
    whether = mask.view(torch.uint8).numpy()  # a bool's true may be any byte but 0
    number = int(np.count_nonzero(whether))
    if not number:
        return None
    if block.lengths is not None:
        return _packed(whether, number, block.lengths)

    rows, T = whether.shape
    if number == whether.size:
        return CountedTokens(block.at, [T] * rows, number)
    counts = [int(np.count_nonzero(row)) for row in whether]
    runs = None if T < SHORT else _runs(whether, counts)
    index = None if runs is not None else torch.from_numpy(np.flatnonzero(whether))
    return CountedTokens(block.at, counts, number, runs, index)


def _packed(whether: np.ndarray, number: int, lengths: Tensor) -> CountedTokens:
    """As `counted_tokens`, of a packed block."""
    inside = np.flatnonzero(lengths.numpy())
    first, last = int(inside[0]), int(inside[-1]) + 1
    counts, at = lengths[first:last].tolist(), slice(first, last)
    if number == whether.size:
        return CountedTokens(at, counts, number)
    index = np.flatnonzero(whether)
    counts = np.diff(np.searchsorted(index, np.cumsum([0, *counts]))).tolist()
    return CountedTokens(at, counts, number, index=torch.from_numpy(index))


def _runs(whether: np.ndarray, counts: list[int]) -> list[Place] | None:
    """The runs of tokens in each row; None if they are short on average."""
    runs: list[Place] = []
    for i, (row, count) in enumerate(zip(whether, counts, strict=True)):
        if np.count_nonzero(row[:count]) == count:  # padded on the right, as most are
            runs.append((i, slice(0, count)))
            continue
        valid = row != 0
        edges = (np.flatnonzero(valid[1:] != valid[:-1]) + 1).tolist()
        ends = [*([0] if valid[0] else []), *edges, len(row)]
        runs += [(i, slice(start, stop)) for start, stop in zip(ends[::2], ends[1::2], strict=False)]
        if len(runs) * SHORT > whether.size:
            return None
    return runs
