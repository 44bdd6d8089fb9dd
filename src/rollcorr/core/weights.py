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


def truncated_weights(log_weight: Tensor, *, upper: float, safety_bound: float = 20.0) -> Tensor:
    """w = min(exp ℓ, upper): truncated importance sampling (TIS).

    The ceiling bounds variance and buys a bias toward μ. Small weights are left alone.

    Args:
        log_weight: ℓ, nats. Any shape.
        upper: C, the largest weight (a ratio, not a log). Finite and > 0.
        safety_bound: largest |ℓ|, nats.

    Raises:
        ValueError: `upper` is not finite and positive.

    Source: Ionides (2008), "Truncated Importance Sampling", J. Comput. Graph. Stat. 17(2).
    """
    check_positive("upper", upper)
    return bounded_weights(log_weight, safety_bound=safety_bound).clamp(max=upper)


def masked_weights(log_weight: Tensor, *, lower: float, upper: float, safety_bound: float = 20.0) -> Tensor:
    """w = exp ℓ if lower ≤ exp ℓ ≤ upper, else 0 (IcePop). The loss mask stays as it is.

    Args:
        log_weight: ℓ, nats. Any shape.
        lower: smallest weight kept (a ratio).
        upper: largest weight kept (a ratio).
        safety_bound: largest |ℓ|, nats.

    Raises:
        ValueError: a bound is not finite and positive, or lower > upper.

    Source: Ling Team (2025), "Every Step Evolves", arXiv:2510.18855.
    """
    check_positive("lower", lower)
    check_positive("upper", upper)
    if lower > upper:
        raise ValueError(f"lower must not exceed upper, got {lower} > {upper}")

    bounded = at_least_float32(log_weight.detach()).clamp(-safety_bound, safety_bound)
    kept = within_ratio_band(bounded, lower=lower, upper=upper) & (log_weight != -torch.inf)

    # NaN is inside no band, but it must stay visible: a weight of 0 would hide a missing log-prob.
    return bounded.exp().masked_fill(~kept & ~bounded.isnan(), 0.0)


def normalization_factor(weight_sum: Tensor, count: Tensor) -> Tensor:
    """Σ w / n: what weights are divided by so that their batch mean is 1; 1 where it would be 0."""
    mean = weight_sum / count.clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))
