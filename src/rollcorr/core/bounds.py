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


def within_ratio_band(log_ratio: Tensor, *, lower: float | None, upper: float | None) -> Tensor:
    """Keep iff lower ≤ ρ ≤ upper, where ρ is exp(d), exp(S_i) or exp(G_i): the k1 criteria.

    The band is on the ratio itself. Testing −log ρ against [log lower, log upper] would invert every band that is not
    reciprocal.

    Args:
        log_ratio: d, S or G, nats; −inf is ratio 0. Any shape.
        lower: smallest ratio kept; None leaves the side open.
        upper: largest ratio kept; None leaves the side open.
    """
    low, high = log_band(lower, upper)
    return (log_ratio >= low) & (log_ratio <= high)


def exceeds(divergence: Tensor, upper: float | None) -> Tensor:
    """True where divergence > upper, strictly. Bool, same shape; never true for an open side (`None`)."""
    return divergence > divergence_bound(upper)


def catastrophic_tokens(log_ratio: Tensor, *, threshold: float) -> Tensor:
    """True where ρ_t < threshold, strictly, on the unclamped ratio: one such token vetoes its sequence.

    Args:
        log_ratio: d, nats; −inf is ratio 0. Any shape.
        threshold: τ, a ratio, e.g. 1e-4.
    """
    return ratio_below(log_ratio, threshold)


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
