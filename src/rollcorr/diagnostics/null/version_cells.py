"""k3 by training step, and by turn or by version of the weights: separates old weights from a stuck sampler.

A log that records `policy_versions` contains the age of the weights behind each token. If k3 grows with that age within
a step, the weights are as old as recorded. If it grows with the step at a constant recorded age, the versions are
incorrect: the sampler never loaded new weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollcorr.config.finding import Finding
from rollcorr.core.lag_statistics import PolicyClock, known_metrics, lag_sums
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.numbers import format_number

Cell = tuple[float, float]
Cells = TypeVar("Cells", bound="StepCells")
MOST_CELLS = 1 << 14
"""Largest number of pairs of step and version; the lowest steps are kept."""
BY_LAG = 1.5
"""Ratio of k3 at the highest age to k3 at the lowest, within steps, from which age explains it."""
MOST_TURNS = 16
"""Turn that also contains all later turns."""
CELL_TOKENS = 200
"""Fewest tokens of an age within a step for a comparison."""


@dataclass(frozen=True)
class StepCells:
    """Token counts and Σ k3 by (step, value), where the value is a turn or a version of the weights.

    Attributes:
        cells: (step, value) → tokens, Σ k3 in nats; default empty.
    """

    cells: Mapping[tuple[int, int], Cell] = field(default_factory=dict)

    @classmethod
    def of(
        cls: type[Cells],
        step: NDArray[np.int64],
        value: NDArray[np.int64],
        k3: NDArray[np.float64],
        tokens: NDArray[np.float64],
    ) -> Cells:
        """Sum k3 (nats) and tokens by (step, value). Each argument has one number per row or span: (n,)."""
        steps, of_step = np.unique(step, return_inverse=True)
        values, of_value = np.unique(value, return_inverse=True)
        cell, size = of_step.reshape(-1) * len(values) + of_value.reshape(-1), len(steps) * len(values)
        counts, sums = np.bincount(cell, tokens, size), np.bincount(cell, k3, size)
        table = zip(product(steps.tolist(), values.tolist()), counts.tolist(), sums.tolist(), strict=True)
        return cls({key: (count, total) for key, count, total in table if count})

    def merge(self: Cells, later: Cells) -> Cells:
        """Return the cells of both parts."""
        if not later.cells:
            return self
        cells = dict(self.cells)
        for key, (count, total) in later.cells.items():
            before = cells.get(key, (0.0, 0.0))
            cells[key] = (before[0] + count, before[1] + total)
        if len(cells) > MOST_CELLS:
            cells = {key: cells[key] for key in sorted(cells)[:MOST_CELLS]}
        return type(self)(cells)

    def by_turn(self) -> tuple[TurnRow, ...]:
        """Return the mismatch of each turn over all steps; empty if no row has several turns."""
        by_turn = ((turn, cell) for (_, turn), cell in sorted(self.cells.items()))
        rows = tuple(TurnRow(*row) for row in _rows_by_value(by_turn))
        return rows if len(rows) > 1 else ()


class VersionCells(StepCells):
    """Token counts and Σ k3 by (step, version of the weights)."""

    def by_lag(self) -> dict[int, dict[int, Cell]]:
        """Return step → lag in versions → tokens, Σ k3 in nats; steps and lags are rising.

        The policy's version is computed by `PolicyClock`, which reads the complete log first.
        """
        newest = dict(sorted(self.cells))
        clock = PolicyClock()
        for step, version in newest.items():
            clock.see(step, torch.tensor(version, device="cpu"))

        # The policy's version never decreases: use the newest one up to each step.
        seen = accumulate(newest.values(), max)
        policy = {
            step: int(clock.version(step, torch.tensor(version, device="cpu")))
            for step, version in zip(newest, seen, strict=True)
        }
        steps: dict[int, dict[int, Cell]] = {}
        for (step, version), (count, total) in sorted(self.cells.items(), key=lambda cell: (cell[0][0], -cell[0][1])):
            lags = steps.setdefault(step, {})
            lag = max(policy[step] - version, 0)
            before = lags.get(lag, (0.0, 0.0))
            lags[lag] = (before[0] + count, before[1] + total)
        return steps

    def growth_with_age(self) -> tuple[float, float, int]:
        """Return k3 at the lowest and at the highest age within a step, and the number of steps that have two ages.

        Both are geometric means over those steps, nats per token; NaN without such steps.
        """
        by_step: dict[int, list[tuple[int, float]]] = {}
        for (step, version), (count, total) in self.cells.items():
            if count >= CELL_TOKENS and total > 0:
                by_step.setdefault(step, []).append((step - version, total / count))
        ages = ((min(of_step), max(of_step)) for of_step in by_step.values())
        ends = [(math.log(low), math.log(high)) for (youngest, low), (oldest, high) in ages if oldest > youngest]
        if not ends:
            return math.nan, math.nan, 0
        low, high = np.exp(np.mean(ends, axis=0)).tolist()
        return low, high, len(ends)


class TurnRow(NamedTuple):
    """Mismatch of the tokens of one turn.

    Attributes:
        turn: turn, counted from 1; `MOST_TURNS` contains all later turns.
        tokens: number of tokens.
        k3_kl: mean k3, nats per token.
        error: standard error of `k3_kl` from the spread over steps, nats; NaN for a single step.
    """

    turn: int
    tokens: int
    k3_kl: float
    error: float


class LagRow(NamedTuple):
    """Mismatch of the tokens of one lag.

    Attributes:
        lag: age of the weights that sampled, in versions.
        tokens: number of tokens with this lag.
        k3_kl: mean k3, nats per token.
        error: standard error of `k3_kl` from the spread over steps, nats; NaN for a single step.
    """

    lag: int
    tokens: int
    k3_kl: float
    error: float


def mean_lag(lags: Mapping[int, Cell]) -> float:
    """Return the mean lag of the tokens of a step, in versions."""
    return sum(lag * tokens for lag, (tokens, _) in lags.items()) / sum(tokens for tokens, _ in lags.values())


def lag_rows(steps: Mapping[int, Mapping[int, Cell]]) -> tuple[LagRow, ...]:
    """Return the mismatch by lag over all steps, from `VersionCells.by_lag`."""
    by_lag = (lag for lags in steps.values() for lag in lags.items())
    return tuple(LagRow(*row) for row in _rows_by_value(by_lag))


def _rows_by_value(cells: Iterable[tuple[int, Cell]]) -> Iterator[tuple[int, int, float, float]]:
    """Yield each value of the given cells, rising, with its tokens, k3 per token and the standard error, nats."""
    table: dict[int, list[Cell]] = {}
    for value, cell in cells:
        table.setdefault(value, []).append(cell)
    for value, of_value in sorted(table.items()):
        yield value, *_mean_and_error(np.array(of_value))


def _mean_and_error(cells: NDArray[np.float64]) -> tuple[int, float, float]:
    """Return the tokens of some steps, k3 per token and its standard error; tokens of one step are dependent."""
    count, total = cells.sum(0)
    mean, steps = total / count, len(cells)
    if steps < 2:
        return int(count), float(mean), math.nan
    residuals = cells[:, 1] - cells[:, 0] * mean
    return int(count), float(mean), float(math.sqrt(steps / (steps - 1) * residuals @ residuals) / count)


def lag_metrics(rows: Iterable[LagRow]) -> dict[str, float]:
    """Return the metrics of lag rows by prefixed name; the split is omitted if no token has lag 0."""
    sums = [0.0] * 5
    for lag, tokens, k3, _ in rows:
        fresh = lag == 0
        of_row = (tokens, tokens * k3, tokens * lag, tokens * fresh, tokens * k3 * fresh)
        sums = [total + value for total, value in zip(sums, of_row, strict=True)]
    return known_metrics(lag_sums(*sums).read())


def judge_versions(versions: VersionCells) -> tuple[Finding, ...]:
    """Return a finding if, within a step, k3 grows with the recorded age of the weights; else empty.

    The same policy scores all rows of a step, so only the age of the sampler's weights separates them.
    `weight_sync_rules` judges growth over the steps.
    """
    k3_newest, k3_oldest, steps = versions.growth_with_age()
    if not steps or k3_oldest < BY_LAG * k3_newest:
        return ()
    growth = k3_oldest / k3_newest
    finding = replace(
        fault("stale_by_lag").finding,
        metric="k3_kl",
        title="the mismatch grows with the age of the weights",
        value=k3_oldest,
        limit=f"below {BY_LAG:g} times {format_number(k3_newest)}, that of the newest weights",
        reason=f"within a step, k3 of the oldest weights is {format_number(growth)} times that of the newest ({steps} "
        "steps have both)",
        confidence=0.95,
        evidence={"growth": growth},
    )
    return (finding,)
