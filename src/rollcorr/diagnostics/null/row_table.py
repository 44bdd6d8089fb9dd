"""Bounded, evenly spread table of rows with the sums of d of each row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROWS = 4096
"""Approximate number of rows in the table; at most twice this number."""
FIELDS = ("tokens", "sum_d", "sum_d2", "sum_k3", "min_d", "max_d", "prompt")
"""Columns of the table: number of valid tokens of a row; Σ d, Σ d², Σ k3, minimum and maximum of d over them, nats;
number of prompt tokens, −1 if not recorded."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """Every k-th row of a log; k is the smallest power of 2 that bounds the table.

    The merged tables of all parts therefore equal the table of the complete log, at any split.

    Attributes:
        stride: k; default 1.
        index: positions of the rows in the log, (r,) int64; default empty.
        values: columns `FIELDS`, (r, 7) float64; default empty.
    """

    stride: int = 1
    index: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(FIELDS))))

    @classmethod
    def of(cls, values: NDArray[np.float64], index: NDArray[np.int64]) -> RowTable:
        """Return the table of rows with values (r, 7) and rising positions in the log (r,)."""
        return _thinned(1, index, values)

    def merge(self, later: RowTable) -> RowTable:
        """Return the table of both parts of the log; `later` comes second."""
        stride = max(self.stride, later.stride)
        return _thinned(stride, np.concatenate([self.index, later.index]), np.concatenate([self.values, later.values]))

    def without(self, part: RowTable) -> RowTable:
        """Return the table without the rows of `part`."""
        rest = ~np.isin(self.index, part.index)
        return RowTable(self.stride, self.index[rest], self.values[rest])

    def __len__(self) -> int:
        return len(self.index)

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one column of `FIELDS`, (r,)."""
        return self.values[:, FIELDS.index(name)]


def _thinned(stride: int, index: NDArray[np.int64], values: NDArray[np.float64]) -> RowTable:
    while True:
        kept = index % stride == 0
        if int(kept.sum()) <= 2 * ROWS:
            return RowTable(stride, index[kept], values[kept])
        stride *= 2
