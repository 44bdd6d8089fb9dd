"""Importance weights and bounds: how much a rollout token or sequence counts in the trainer's loss.

The safety bound is applied to the log weight before `exp`, so no weight overflows, and weights stay monotonic in the
log weight. Weights carry no gradient: they scale the loss and are not part of it.

Bounds are inclusive at the precision of the data. Log-probs are float32 at best, so a ratio of exactly 1.001 arrives as
exp of a float32 logarithm, a few units in the last place off. Bounds are therefore widened slightly: a value equal to a
bound in float32 is inside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollcorr.core.ratios import at_least_float32

# Rounding errors of a log-ratio. The absolute one is the relative precision of a float32 ratio near 1, with a margin
# for the error of the logarithm.
_RELATIVE_ROUNDING = 2.0**-21
_ABSOLUTE_ROUNDING = 2.0**-22


def bounded_weights(log_weight: Tensor, *, safety_bound: float) -> Tensor:
    """Compute w = exp(clamp(ℓ, ±bound)): the raw weight, kept inside the range of floats.

    Args:
        log_weight: ℓ, nats. Any shape: per token or per sequence. ℓ = −inf is probability zero, not an underflow.
        safety_bound: largest |ℓ|, nats.

    Returns:
        Weights in {0} ∪ [e^−bound, e^bound], same shape, at least float32, no gradient. NaN in, NaN out.
    """
    log_weight = at_least_float32(log_weight.detach())
    return log_weight.clamp(-safety_bound, safety_bound).exp().masked_fill(log_weight == -torch.inf, 0.0)


def between(weights: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Clamp weights to [lower, upper]; 0 stays 0. None leaves a side open. Any shape."""
    if lower is None:
        return weights if upper is None else weights.clamp(max=upper)
    return torch.where(weights > 0, weights.clamp(lower, upper), weights)


def masked_weights(log_weight: Tensor, *, lower: float | None, upper: float | None, safety_bound: float) -> Tensor:
    """Compute w = exp ℓ if lower ≤ exp ℓ ≤ upper, else 0 (IcePop). The loss mask is unchanged.

    Args:
        log_weight: ℓ, nats. Any shape.
        lower: smallest weight kept (a ratio); None leaves the side open.
        upper: largest weight kept (a ratio); None leaves the side open.
        safety_bound: largest |ℓ|, nats.

    Source: Ling Team (2025), "Every Step Evolves", arXiv:2510.18855.
    """
    bounded = at_least_float32(log_weight.detach()).clamp(-safety_bound, safety_bound)
    kept = within_ratio_band(bounded, lower=lower, upper=upper) & (log_weight != -torch.inf)

    # NaN is outside every band, but it must stay visible: a weight of 0 would hide a missing log-prob.
    return bounded.exp().masked_fill(~kept & ~bounded.isnan(), 0.0)


def normalization_factor(weight_sum: Tensor, count: Tensor) -> Tensor:
    """Compute Σ w / n: the divisor that makes the batch mean of the weights 1; 1 where it would be 0."""
    mean = weight_sum / count.clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def ratio_below(log_ratio: Tensor, lower: float | None) -> Tensor:
    """Return where exp(log_ratio) < lower, strictly. Bool, same shape; never true for an open side (`None`)."""
    return log_ratio < log_band(lower, None)[0]


def ratio_above(log_ratio: Tensor, upper: float | None) -> Tensor:
    """Return where exp(log_ratio) > upper, strictly. Bool, same shape; never true for an open side (`None`)."""
    return log_ratio > log_band(None, upper)[1]


def within_ratio_band(log_ratio: Tensor, *, lower: float | None, upper: float | None) -> Tensor:
    """Return where lower ≤ ρ ≤ upper, where ρ is exp(d), exp(S_i) or exp(G_i): the k1 criteria.

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
    """Return where divergence > upper, strictly. Bool, same shape; never true for an open side (`None`)."""
    return divergence > divergence_bound(upper)


def log_band(lower: float | None, upper: float | None) -> tuple[float, float]:
    """Return the bounds of a band of ratios as log-ratios, inclusive, nats; infinite for an open side (`None`)."""
    return (
        -math.inf if lower is None else math.log(lower) - _rounding_of_log(lower),
        math.inf if upper is None else math.log(upper) + _rounding_of_log(upper),
    )


def divergence_bound(upper: float | None) -> float:
    """Return the largest divergence within a bound; inf for `None`."""
    return math.inf if upper is None else upper * (1 + _RELATIVE_ROUNDING)


def _rounding_of_log(ratio: float) -> float:
    return abs(math.log(ratio)) * _RELATIVE_ROUNDING + _ABSOLUTE_ROUNDING
