"""Student's t intervals of means over seeds, paired differences, and Holm's correction over the tests of a question.

Source: W. S. Gosset (1908), "The Probable Error of a Mean", Biometrika 6; S. Holm (1979), "A Simple Sequentially
Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

LEVEL = 0.05
"""An interval covers 1 − LEVEL, and a difference counts where its corrected p value is below LEVEL."""


Test = TypeVar("Test", bound=Hashable)


class Interval(NamedTuple):
    """A mean over n values, the half width of its 95 % t interval, and the p value of a mean of 0.

    Half width and p value are NaN for fewer than two values.
    """

    mean: float
    half: float
    p: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isnan(self.half) else f"{self.mean:.3f} ± {self.half:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Return mean ± t(n − 1) s / √n of the values; a mean of NaN without any."""
    n = len(values)
    if n < 2:
        return Interval(values[0] if values else math.nan, math.nan, math.nan, n)
    error = deviation(values) / math.sqrt(n)
    return from_error(sum(values) / n, error, n)


def from_error(mean: float, error: float, n: int) -> Interval:
    """Return the interval of a mean over n values from its standard error."""
    if n < 2 or math.isnan(error):
        return Interval(mean, math.nan, math.nan, n)
    if error == 0.0:
        return Interval(mean, 0.0, float(mean == 0.0), n)
    return Interval(mean, t_quantile(n - 1) * error, t_tails(mean / error, n - 1), n)


def prediction_half(values: Sequence[float]) -> float:
    """Return t(n − 1) s √(1 + 1/n): half of the 95 % t interval of one further value; NaN for fewer than two."""
    n = len(values)
    return t_quantile(n - 1) * deviation(values) * math.sqrt(1 + 1 / n) if n > 1 else math.nan


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation s, with n − 1 in the denominator."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def t_tails(t: float, df: int) -> float:
    """Return P(|T| > |t|) of Student's t with df degrees of freedom (Abramowitz & Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(df))
    square = math.cos(angle) ** 2

    # Terms of cos²: 1 + 1/2 cos² + 1·3/(2·4) cos⁴ … for even df, 1 + 2/3 cos² + 2·4/(3·5) cos⁴ … for odd df.
    odd = df % 2
    term, series = 1.0, 0.0
    for k in range(df // 2):
        series += term
        term *= square * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    if odd:
        return 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * series)
    return 1 - math.sin(angle) * series


def t_quantile(df: int, level: float = LEVEL) -> float:
    """Return t with P(|T| > t) = level, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, df) > level else (low, middle)
    return high


def holm(p_values: Mapping[Test, float]) -> dict[Test, float]:
    """Return Holm's adjusted p values; each is at least that of the test before it."""
    adjusted: dict[Test, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted
