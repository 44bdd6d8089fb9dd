"""k3 by training step and by the version of the weights that sampled: is it the age, or the sampler?

A log that records `policy_versions` says how old the weights behind each token were. If k3 grows with that age within a
step, the weights are as old as the log says. If it grows with the step while the recorded age stays the same, the
versions are wrong: the sampler never took new weights over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.health.trend import AgeWatch
from rollcorr.diagnostics.health.weight_sync_rules import ABOVE_NULL, FIRST_STEP, SAME_ORDER
from rollcorr.diagnostics.null.null_file import MismatchNull
from rollcorr.diagnostics.numbers import format_number

Cell = tuple[float, float]
MOST_CELLS = 1 << 14
"""Pairs of step and version that are kept; those of the lowest steps where there are more."""
GROWTH = 3.0
"""k3 at the end over k3 at the start from which it grew."""
BY_LAG = 1.5
"""k3 at the highest age over that at the lowest, within steps, from which age explains it."""
MIN_STEPS = 6
"""Fewer steps show no growth."""
RANK = 0.8
"""Rank correlation of k3 with the step from which the growth is steady."""
CELL_TOKENS = 200
"""Fewer tokens of an age within a step are not compared."""
BY_AGE = "the mismatch grows with the age of the weights"
"""Title of `stale_by_lag`."""


@dataclass(frozen=True)
class VersionCells:
    """Tokens and Σ k3 by (step, version).

    Attributes:
        cells: (step, version) → tokens, Σ k3.
    """

    cells: Mapping[tuple[int, int], Cell] = field(default_factory=dict)

    @classmethod
    def of(
        cls, step: NDArray[np.int64], version: NDArray[np.int64], k3: NDArray[np.float64], tokens: NDArray[np.float64]
    ) -> VersionCells:
        """The cells of some rows or spans: each (n,), with their tokens and their Σ k3."""
        cells: dict[tuple[int, int], Cell] = {}
        pairs, inverse = np.unique(np.stack([step, version]), axis=1, return_inverse=True)
        inverse = inverse.reshape(-1)
        counts, sums = np.bincount(inverse, tokens), np.bincount(inverse, k3)
        for (of_step, of_version), count, total in zip(pairs.T.tolist(), counts.tolist(), sums.tolist(), strict=True):
            if count:
                cells[of_step, of_version] = (count, total)
        return cls(cells)

    def merge(self, later: VersionCells) -> VersionCells:
        """The cells of both together."""
        if not later.cells:
            return self
        cells = dict(self.cells)
        for key, (count, total) in later.cells.items():
            before = cells.get(key, (0.0, 0.0))
            cells[key] = (before[0] + count, before[1] + total)
        if len(cells) > MOST_CELLS:
            cells = {key: cells[key] for key in sorted(cells)[:MOST_CELLS]}
        return VersionCells(cells)

    def by_step(self) -> list[tuple[int, float, float]]:
        """(step, k3 per token, mean recorded age) of each step, rising."""
        steps: dict[int, list[float]] = {}
        for (step, version), (count, total) in sorted(self.cells.items()):
            sums = steps.setdefault(step, [0.0, 0.0, 0.0])
            sums[0] += count
            sums[1] += total
            sums[2] += count * (step - version)
        return [(step, total / count, age / count) for step, (count, total, age) in steps.items()]

    def growth_with_age(self) -> tuple[float, float, int]:
        """k3 at the lowest and at the highest age within a step, and the number of steps that have two ages.

        Both are geometric means over those steps, nats per token. NaN without any.
        """
        by_step: dict[int, list[tuple[int, float]]] = {}
        for (step, version), (count, total) in self.cells.items():
            if count >= CELL_TOKENS and total > 0:
                by_step.setdefault(step, []).append((step - version, total / count))
        ends = []
        for ages in by_step.values():
            (youngest, low), (oldest, high) = min(ages), max(ages)
            if oldest > youngest:
                ends.append((math.log(low), math.log(high)))
        if not ends:
            return math.nan, math.nan, 0
        low, high = np.exp(np.mean(ends, axis=0)).tolist()
        return low, high, len(ends)


def judge_versions(versions: VersionCells, null: MismatchNull | None = None) -> tuple[Finding, ...]:
    """Whether the mismatch follows the recorded age of the weights, or grows although that stays the same.

    Args:
        versions: of the log.
        null: what has been in excess of it since before the first update, and has only grown, is no sampler that keeps
            its weights. None where there is none.
    """
    # The rows of one step are scored by one policy, so there only the age of the sampler's weights tells them apart.
    found = []
    youngest, oldest, steps = versions.growth_with_age()
    if steps and oldest >= BY_LAG * youngest:
        reason = (
            f"within a step, k3 of the oldest weights is {format_number(oldest / youngest)} times that of the newest "
            f"({steps} steps have both)"
        )
        limit = f"below {BY_LAG:g} times {format_number(youngest)}, that of the newest weights"
        found.append(_finding("stale_by_lag", BY_AGE, oldest, limit, reason, growth=oldest / youngest))

    # Over the steps, k3 must have grown steadily: single steps scatter, so thirds of the run are compared.
    series = versions.by_step()
    if len(series) < MIN_STEPS:
        return tuple(found)
    k3 = [value for _, value, _ in series]
    age = [value for _, _, value in series]
    third = max(len(series) // 3, 1)
    start, end = float(np.median(k3[:third])), float(np.median(k3[-third:]))
    if start <= 0 or end < GROWTH * start or rank_correlation(k3) < RANK:
        return tuple(found)

    # Where the recorded age grew with it, the sampler is late, as the log says.
    ratio, limit = end / start, f"below {GROWTH:g} times {format_number(start)}, its start"
    watch = AgeWatch()
    for of_step, value in zip(age, k3, strict=True):
        watch.add(of_step, value)
    if watch.explains is not None:
        grew = format_number(watch.explains - age[0])
        reason = f"k3 grew {format_number(ratio)} times, and the recorded age by {grew} versions"
        if not found:
            found.append(_finding("stale_by_lag", BY_AGE, end, limit, reason, growth=ratio))
        return tuple(found)

    # What was in excess before the first update does not come from an update that the sampler missed.
    in_excess = null is not None and k3[0] >= max(ABOVE_NULL * null.profile.k3, SAME_ORDER * end)
    if in_excess and series[0][0] <= FIRST_STEP:
        return tuple(found)
    reason = (
        f"k3 grew {format_number(ratio)} times from steps {series[0][0]}–{series[third - 1][0]} to "
        f"{series[-third][0]}–{series[-1][0]}, and the recorded age of the weights does not explain it: the sampler "
        "does not hold the versions that the log records"
    )
    title = "the sampler keeps old weights"
    frozen = _finding("frozen_sampler", title, end, limit, reason, growth=ratio, first_step=series[0][0])
    return (frozen, *found)


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman's correlation of a series with its order."""
    ranks = np.argsort(np.argsort(values)).astype(np.float64)
    order = np.arange(len(values), dtype=np.float64)
    return float(np.corrcoef(ranks, order)[0, 1]) if len(values) > 1 else 0.0


_FIXES = {
    "stale_by_lag": (
        "sync the weights more often, limit the age of what is trained on, or correct with the recorded log-probs",
        "limit the age to one version: the mismatch falls to that of the null",
    ),
    "frozen_sampler": (
        "check that the weight update reaches the sampler: its return code, the parameter names, the cache reset",
        "score a probe batch on both sides after a sync: they differ by more than rounding",
    ),
}


def _finding(
    code: str, title: str, k3: float, limit: str, reason: str, *, growth: float, first_step: int | None = None
) -> Finding:
    fix, confirm = _FIXES[code]
    return Finding(
        code=code,
        metric="k3_kl",
        title=title,
        value=k3,
        limit=limit,
        reason=reason,
        fix=fix,
        confirm=confirm,
        confidence=0.95,
        evidence={"growth": growth},
        first_step=first_step,
    )
