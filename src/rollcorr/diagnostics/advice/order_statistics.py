"""Estimate quantiles with distribution-free intervals.

The interval of a quantile lies between two order statistics: P(x_(l) ≤ quantile ≤ x_(u)) is a sum of binomial
probabilities, whatever the distribution. Source: Conover (1999), Practical Nonparametric Statistics, section 3.2.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.95
"""Nominal coverage of the intervals."""


class QuantileEstimate(NamedTuple):
    """An estimate and its 95 % interval; an end that the sample does not bound is infinite."""

    value: float
    low: float
    high: float


def quantile_estimate(values: Floats, q: float) -> QuantileEstimate:
    """Estimate a quantile of independent values.

    The value is interpolated at position (n + 1) q: on average, a new value lies below it with probability q.
    """
    ordered = np.sort(values)
    below, above = _quantile_ranks(len(ordered), round(q, 12))
    low = float(ordered[below - 1]) if below >= 1 else -math.inf
    high = float(ordered[above - 1]) if above <= len(ordered) else math.inf
    return QuantileEstimate(float(np.quantile(ordered, q, method="weibull")), low, high)


def interval_of(replicates: Floats) -> tuple[float, float]:
    """Return the percentile interval of bootstrap replicates."""
    low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@lru_cache(maxsize=1024)
def _quantile_ranks(n: int, q: float) -> tuple[int, int]:
    """Return the 1-based ranks of the order statistics around the quantile; 0 or n + 1 if unbounded."""
    log_factorial = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
    k = np.arange(n + 1)
    log_chance = log_factorial[n] - log_factorial - log_factorial[::-1] + k * math.log(q) + (n - k) * math.log1p(-q)
    cumulated = np.exp(log_chance).cumsum()
    tail = (1 - LEVEL) / 2
    below = int(np.searchsorted(cumulated, tail, side="right"))
    above = int(np.searchsorted(cumulated, 1 - tail, side="left")) + 1
    return below, above
