"""Bounds: inclusive at the precision of the data.

Log-probs are float32 at best, so a ratio that a user calls "exactly 2" arrives as exp of a float32 logarithm, half a
unit in the last place off. A bound is therefore widened by 2⁻²¹ of itself: what equals it in float32 is inside.
"""

from __future__ import annotations

import math

from torch import Tensor

_WIDENING = 2.0**-21


def widened_lower(bound: float | None) -> float:
    """The smallest value still inside a lower bound; −inf when the side is open (`None`)."""
    return -math.inf if bound is None else bound - abs(bound) * _WIDENING


def widened_upper(bound: float | None) -> float:
    """The largest value still inside an upper bound; +inf when the side is open (`None`)."""
    return math.inf if bound is None else bound + abs(bound) * _WIDENING


def below(values: Tensor, bound: float | None) -> Tensor:
    """True where a value is strictly below a lower bound. Bool, same shape; never true for an open side."""
    return values < widened_lower(bound)


def above(values: Tensor, bound: float | None) -> Tensor:
    """True where a value is strictly above an upper bound. Bool, same shape; never true for an open side."""
    return values > widened_upper(bound)


def inside(values: Tensor, *, lower: float | None, upper: float | None) -> Tensor:
    """True where lower ≤ value ≤ upper. Bool, same shape. NaN is never inside."""
    return (values >= widened_lower(lower)) & (values <= widened_upper(upper))


def log_bound(ratio: float | None) -> float | None:
    """The log of a bound on a ratio; `None` (open) stays `None`."""
    return None if ratio is None else math.log(ratio)
