"""Importance weights: how much a rollout token or sequence counts in the trainer's loss.

The safety bound acts on the log weight before `exp`, so nothing overflows, and a larger log weight never gives a
smaller weight. Weights carry no gradient: they scale the loss and are not part of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollcorr.core.boundary import check_positive
from rollcorr.core.bounds import within_ratio_band
from rollcorr.core.ratios import at_least_float32


def bounded_weights(log_weight: Tensor, *, safety_bound: float = 20.0) -> Tensor:
    """w = exp(clamp(ℓ, ±bound)): the raw weight, kept inside the range of floats.

    Args:
        log_weight: ℓ, nats. Any shape: per token or per sequence. ℓ = −inf is probability zero, not an underflow.
        safety_bound: largest |ℓ|, nats.

    Returns:
        Weights in {0} ∪ [e^−bound, e^bound], same shape, at least float32, no gradient. NaN in gives NaN out.
    """
    log_weight = at_least_float32(log_weight.detach())
    return log_weight.clamp(-safety_bound, safety_bound).exp().masked_fill(log_weight == -torch.inf, 0.0)


def truncated_weights(
    log_weight: Tensor, *, upper: float | None, lower: float | None = None, safety_bound: float = 20.0
) -> Tensor:
    """w = min(max(exp ℓ, lower), upper): truncated importance sampling (TIS).

    The ceiling bounds variance and buys a bias toward μ. Small weights are left alone, unless there is a floor. A ratio
    of 0 has the weight 0 in any case: its log-prob is −inf, and a loss must not read it.

    Args:
        log_weight: ℓ, nats. Any shape.
        upper: C, the largest weight (a ratio, not a log). Finite and > 0; None for no ceiling.
        lower: the smallest weight of a ratio above 0. Finite and > 0; None for no floor.
        safety_bound: largest |ℓ|, nats.

    Raises:
        ValueError: a bound is not finite and positive, or lower > upper.

    Source: Ionides (2008), "Truncated Importance Sampling", J. Comput. Graph. Stat. 17(2).
    """
    _check_bounds(lower, upper)
    return between(bounded_weights(log_weight, safety_bound=safety_bound), lower, upper)


def between(weights: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Weights raised to `lower` and lowered to `upper`; 0 stays 0. None leaves a side as it is. Any shape."""
    if lower is None:
        return weights if upper is None else weights.clamp(max=upper)
    return torch.where(weights > 0, weights.clamp(lower, upper), weights)


def masked_weights(
    log_weight: Tensor, *, lower: float | None, upper: float | None, safety_bound: float = 20.0
) -> Tensor:
    """w = exp ℓ if lower ≤ exp ℓ ≤ upper, else 0 (IcePop). The loss mask stays as it is.

    Args:
        log_weight: ℓ, nats. Any shape.
        lower: smallest weight kept (a ratio); None leaves the side open.
        upper: largest weight kept (a ratio); None leaves the side open.
        safety_bound: largest |ℓ|, nats.

    Raises:
        ValueError: a bound is not finite and positive, or lower > upper.

    Source: Ling Team (2025), "Every Step Evolves", arXiv:2510.18855.
    """
    _check_bounds(lower, upper)
    bounded = at_least_float32(log_weight.detach()).clamp(-safety_bound, safety_bound)
    kept = within_ratio_band(bounded, lower=lower, upper=upper) & (log_weight != -torch.inf)

    # NaN is inside no band, but it must stay visible: a weight of 0 would hide a missing log-prob.
    return bounded.exp().masked_fill(~kept & ~bounded.isnan(), 0.0)


def normalization_factor(weight_sum: Tensor, count: Tensor) -> Tensor:
    """Σ w / n: what weights are divided by so that their batch mean is 1; 1 where it would be 0."""
    mean = weight_sum / count.clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _check_bounds(lower: float | None, upper: float | None) -> None:
    for name, value in (("lower", lower), ("upper", upper)):
        if value is not None:
            check_positive(name, value)
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"lower must not exceed upper, got {lower} > {upper}")
