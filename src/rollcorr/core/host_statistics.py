"""Statistics on the host: merged rows as Python numbers, from which the metric registry computes metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from rollcorr.core.detail_rows import BINS, TOP, Entry, host_entries

ROW_SHAPES: dict[str, tuple[int, ...]] = {
    "sums": (),
    "moments": (3,),
    "extremes": (2,),
    "histograms": (BINS,),
    "tops": (TOP, 3),
}
"""Kind of row → its shape."""

_ROW_SIZES = {kind: math.prod(shape) for kind, shape in ROW_SHAPES.items()}


def population_std(count: float, m2: float) -> float:
    """Compute sqrt(M2 / n); 0 for an empty sample."""
    return (m2 / count) ** 0.5 if count else 0.0


def kish_sample_size(count: float, mean: float, m2: float) -> float:
    """Compute (Σ x)² / (n Σ x²), in [0, 1]; 0 for an empty sample or if every value is 0 (Kish, 1965)."""
    square = mean * mean
    second_moment = m2 / count + square if count else 0.0
    return min(1.0, square / second_moment) if second_moment > 0 else 0.0


class Moments(NamedTuple):
    """Count, mean and M2 = Σ (x − mean)² of a sample, on the host."""

    count: float  # type: ignore[assignment] # shadows a method of tuple that moments never use
    mean: float
    m2: float

    @property
    def std(self) -> float:
        """Return the population standard deviation; 0 for an empty sample."""
        return population_std(self.count, self.m2)


class Extremes(NamedTuple):
    """Smallest and largest value of a sample, on the host; (+inf, −inf) when it is empty."""

    min: float
    max: float


@dataclass(frozen=True)
class HostStatistics:
    """Rows of a `Statistics` as Python numbers, from which the metric registry computes metrics.

    Attributes:
        names: the names of the rows, kind by kind.
        numbers: the numbers of all rows in sequence, in the order of `Statistics.pack`.
    """

    names: tuple[tuple[str, ...], ...]
    numbers: list[float]

    @cached_property
    def sums(self) -> Mapping[str, float]:
        """Return name → Σ x."""
        return {name: number for name, (number,) in self._iter_rows_of_kind("sums")}

    @cached_property
    def moments(self) -> Mapping[str, Moments]:
        """Return name → count, mean and M2."""
        return {name: Moments(*row) for name, row in self._iter_rows_of_kind("moments")}

    @cached_property
    def extremes(self) -> Mapping[str, Extremes]:
        """Return name → smallest and largest value."""
        return {name: Extremes(*row) for name, row in self._iter_rows_of_kind("extremes")}

    @cached_property
    def histograms(self) -> Mapping[str, Sequence[float]]:
        """Return name → counts, BINS long."""
        return dict(self._iter_rows_of_kind("histograms"))

    @cached_property
    def tops(self) -> Mapping[str, tuple[Entry, ...]]:
        """Return name → existing entries, worst first."""
        return {
            name: host_entries([row[i : i + 3] for i in range(0, 3 * TOP, 3)])
            for name, row in self._iter_rows_of_kind("tops")
        }

    def _iter_rows_of_kind(self, kind: str) -> Iterator[tuple[str, list[float]]]:
        """Yield the rows of a kind, with their names."""
        for row, place in row_places(self.names).items():
            of, _, name = row.partition(":")
            if of == kind:
                yield name, self.numbers[place : place + _ROW_SIZES[kind]]


@lru_cache(maxsize=64)
def row_places(names: tuple[tuple[str, ...], ...]) -> Mapping[str, int]:
    """Return the start of each row in `HostStatistics.numbers`, by its name as finalizers use it, "kind:name"."""
    rows = [(kind, name) for kind, of_kind in zip(ROW_SHAPES, names, strict=True) for name in of_kind]
    ends = accumulate(_ROW_SIZES[kind] for kind, _ in rows)
    return {f"{kind}:{name}": end - _ROW_SIZES[kind] for (kind, name), end in zip(rows, ends, strict=True)}
