"""Where a rise of a series began: of several forms that begin at some place, the one that fits best.

Of a step, a line, a parabola and an exponential, with the level before and the size of the rise fitted by least squares
in the logarithm of the values:

    x_t = ln a                             before the onset
    x_t = ln a + b                         a step
    x_t = ln a + b u                       an exponential; u = 1, 2, … from the onset on
    x_t = ln(a + c u^p)                    a line (p = 1), a parabola (p = 2), and what lies between them (p = 1.5)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal

import numpy as np

Array = np.ndarray[tuple[int], np.dtype[np.float64]]
Shape = Literal["step", "growth"]

POWERS = (1.0, 1.5, 2.0)
SPIKE = 4.0
"""Standard deviations from the median of its neighbors beyond which a value is replaced by that median."""
LEAST_SPREAD = 0.05
"""A spread from step to step below this, nats, is taken for it."""
COARSE = 20
"""Places of the first, coarse look."""
BEFORE = 60
"""Steps before an onset that tell the level there."""


def onset_of(values: Sequence[float]) -> tuple[int, Shape]:
    """The place at which a rise began, and its shape.

    Args:
        values: logarithms of a metric, in order, at least two; they rise somewhere.
    """
    x = without_spikes(np.asarray(values, dtype=np.float64))
    last = len(x) - 1
    if last < 1:
        return 0, "step"

    # The fit gets worse on both sides of the best place, so a coarse look comes first, and then one around its best.
    stride = max(1, last // COARSE)
    coarse = min((_fit(x, place) for place in range(1, last + 1, stride)), key=itemgetter(0))
    around = range(max(1, coarse[1] - stride), min(last, coarse[1] + stride) + 1)
    _, place, shape = min((_fit(x, place) for place in around), key=itemgetter(0))
    return place, shape


def _fit(x: Array, place: int) -> tuple[float, int, Shape]:
    """The smallest sum of squares of a rise that begins at a place, the place, and the shape that has it."""
    before, after = x[:place], x[place:]
    level = float(before[-BEFORE:].mean())
    unchanged = float(np.square(before - level).sum())
    deviation, shape = min(_deviations(level, after), key=itemgetter(0))
    return unchanged + deviation, place, shape


def without_spikes(x: Array) -> Array:
    """The values, with each that is far from its neighbors replaced by the median of the five around it."""
    padded = np.concatenate([x[2:0:-1], x, x[-2:-4:-1]]) if len(x) > 3 else np.pad(x, 2, mode="edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, 5)
    middle = np.median(around, axis=1)
    spread = max(LEAST_SPREAD, float(np.median(np.abs(x - middle))) / 0.6745)
    return np.where(np.abs(x - middle) > SPIKE * spread, middle, x)


def _deviations(level: float, after: Array) -> Iterator[tuple[float, Shape]]:
    """The sum of squares after an onset, of each form of a rise."""
    yield float(np.square(after - after.mean()).sum()), "step"
    if len(after) < 3:  # two values may rise in any way
        return

    u = np.arange(1, len(after) + 1, dtype=np.float64)
    slope = float(u @ (after - level) / (u @ u))
    yield float(np.square(after - level - slope * u).sum()), "growth"
    for power in POWERS:
        fitted = _fitted_power(level, after, u**power)
        if fitted is not None:
            yield float(np.square(after - fitted).sum()), "growth"


def _fitted_power(level: float, after: Array, growth: Array) -> Array | None:
    """ln(a + c g), with c by two steps of Gauss and Newton from the median; None where nothing has grown."""
    start = math.exp(level)
    rate = float(np.median((np.exp(after) - start) / growth))
    if not rate > 0:
        return None
    for _ in range(2):
        fitted = np.log(start + rate * growth)
        share = rate * growth / (start + rate * growth)  # d fitted / d ln rate
        rate *= math.exp(min(max(float(share @ (after - fitted) / (share @ share)), -1.0), 1.0))
    fitted_values: Array = np.log(start + rate * growth)
    return fitted_values
