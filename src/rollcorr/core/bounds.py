"""Bounds: inclusive at the precision of the data.

Log-probs are float32 at best, so a ratio that a user calls "exactly 1.001" arrives as exp of a float32 logarithm, a few
units in the last place off. Bounds are therefore widened by a hair: what equals a bound in float32 is inside it.
"""

from __future__ import annotations

import math

from torch import Tensor

_RELATIVE = 2.0**-21
_ABSOLUTE = 2.0**-22  # of a log-ratio: the relative precision of a float32 ratio near 1, with room for its logarithm


def ratio_below(log_ratio: Tensor, lower: float | None) -> Tensor:
    """True where exp(log_ratio) < lower, strictly. Bool, same shape; never true for an open side (`None`)."""
    return log_ratio < log_band(lower, None)[0]


def ratio_above(log_ratio: Tensor, upper: float | None) -> Tensor:
    """True where exp(log_ratio) > upper, strictly. Bool, same shape; never true for an open side (`None`)."""
    return log_ratio > log_band(None, upper)[1]


def ratio_inside(log_ratio: Tensor, *, lower: float | None, upper: float | None) -> Tensor:
    """True where lower ≤ exp(log_ratio) ≤ upper. Bool, same shape. NaN is never inside."""
    low, high = log_band(lower, upper)
    return (log_ratio >= low) & (log_ratio <= high)


def exceeds(divergence: Tensor, upper: float | None) -> Tensor:
    """True where divergence > upper, strictly. Bool, same shape; never true for an open side (`None`)."""
    return divergence > divergence_bound(upper)


def log_band(lower: float | None, upper: float | None) -> tuple[float, float]:
    """The log-ratios that lie inside a band of ratios, ends included, nats; infinite for an open side (`None`)."""
    return (
        -math.inf if lower is None else math.log(lower) - _widening(lower),
        math.inf if upper is None else math.log(upper) + _widening(upper),
    )


def divergence_bound(upper: float | None) -> float:
    """The largest divergence that a bound lets pass; inf for `None`."""
    return math.inf if upper is None else upper * (1 + _RELATIVE)


def _widening(ratio: float) -> float:
    return abs(math.log(ratio)) * _RELATIVE + _ABSOLUTE
