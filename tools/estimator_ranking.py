"""Which estimator is best in which regime: the order by direction error, averaged over the kinds of mismatch.

The kinds of `APART` have no say: raw log-probs make all estimators alike, and broken sequences are a fault to be found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rollcorr.simulation.studies import APART

LEAST_SEQUENCES = 30
"""Fewer effective sequences than this decide no ranking."""


class RankedEstimator(NamedTuple):
    """One estimator of a ranking.

    Attributes:
        estimator: its name.
        direction: mean direction error over the kinds (and regimes) that were given.
        error: standard error of the mean, from those of the kinds.
        behind: how much larger its mean is than the best one's.
        resolved: every mean rests on 30 effective sequences or more. Where one does not, rare sequences of large
            weight decide, most of them were not drawn, and the truth is worse than the number.
        tied: at most two of its standard errors behind the best. All share their samples, so this is a wide limit.
    """

    estimator: str
    direction: float
    error: float
    behind: float
    resolved: bool
    tied: bool


def ranked_estimators(
    rows: Sequence[dict[str, Any]], batch_size: int, *, regime: float | None = None
) -> list[RankedEstimator]:
    """From best to worst.

    Args:
        rows: of the study "regimes".
        batch_size: whose numbers count.
        regime: T × KL; None: all of them together.
    """
    chosen = [
        row
        for row in rows
        if row["batch_size"] == batch_size and row["kind"] not in APART and regime in (None, row["regime"])
    ]
    values: dict[str, list[tuple[float, float]]] = {}
    unresolved: set[str] = set()
    for row in chosen:
        # What rejects everything is known, however few sequences were kept.
        if row["ess"] * row["sequences"] < LEAST_SEQUENCES and row["kept"] > 0 and not row["exact"]:
            unresolved.add(row["estimator"])
        values.setdefault(row["estimator"], []).append((row["direction"], row["direction_error"]))

    means = {name: sum(value for value, _ in found) / len(found) for name, found in values.items()}
    errors = {name: math.sqrt(sum(error**2 for _, error in found)) / len(found) for name, found in values.items()}
    best = min(means.values(), default=0.0)
    order = sorted(means, key=lambda name: means[name])
    return [
        RankedEstimator(
            estimator=name,
            direction=means[name],
            error=errors[name],
            behind=means[name] - best,
            resolved=name not in unresolved,
            tied=means[name] - best <= 2 * errors[name],
        )
        for name in order
    ]
