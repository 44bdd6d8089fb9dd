"""A bounded, evenly spread table of rows: what each row's d adds up to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROWS = 4096
"""About how many rows the table holds: twice as many at most."""
FIELDS = ("tokens", "sum_d", "sum_d2", "sum_k3", "min_d", "max_d", "prompt")
"""Columns of the table: the number of valid tokens of a row; Σ d, Σ d², Σ k3 and the extremes of d over them; the
number of tokens of the prompt, −1 where it is not recorded."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """Every k-th row of a log, k being the smallest power of 2 for which they are few enough.

    So the table of a whole is the merged tables of its parts, however the log was cut.

    Attributes:
        stride: k.
        index: (r,) int64, positions of the rows in the log.
        values: (r, 7) float64, the columns `FIELDS`.
    """

    stride: int = 1
    index: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(FIELDS))))

    @classmethod
    def of(cls, values: NDArray[np.float64], index: NDArray[np.int64]) -> RowTable:
        """The table of some rows: values (r, 7) and positions in the log (r,), rising."""
        return _thinned(1, index, values)

    def merge(self, later: RowTable) -> RowTable:
        """The table of both stretches of the log together; `later` comes after."""
        stride = max(self.stride, later.stride)
        return _thinned(stride, np.concatenate([self.index, later.index]), np.concatenate([self.values, later.values]))

    def without(self, part: RowTable) -> RowTable:
        """The table without the rows of another one."""
        rest = ~np.isin(self.index, part.index)
        return RowTable(self.stride, self.index[rest], self.values[rest])

    def __len__(self) -> int:
        return len(self.index)

    def column(self, name: str) -> NDArray[np.float64]:
        """One column of `FIELDS`, (r,)."""
        return self.values[:, FIELDS.index(name)]


def _thinned(stride: int, index: NDArray[np.int64], values: NDArray[np.float64]) -> RowTable:
    while True:
        kept = index % stride == 0
        if int(kept.sum()) <= 2 * ROWS:
            return RowTable(stride, index[kept], values[kept])
        stride *= 2
