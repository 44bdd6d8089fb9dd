"""Divergence of the training policy from the rollout policy, estimated on the sampled tokens.

Log-ratios are clamped at `SAFETY_BOUND` before an exponential; the clamped share is a metric.

With y ~ μ and d = log π(y) − log μ(y): E[k1] = E[k3] = KL(μ‖π), and k2 is its second-order approximation.
Source: Schulman (2020), "Approximating KL Divergence".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rollcorr.config.correction_options import SAFETY_BOUND as SAFETY_BOUND

_SERIES_RADIUS = 0.03
_INVERSE_FACTORIALS = tuple(1 / math.factorial(n) for n in range(8, 1, -1))


def k1(log_ratio: Tensor) -> Tensor:
    """Compute k1 = −d: unbiased, signed, high variance. Same shape, nats."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Compute k2 = d² / 2: biased, nonnegative, ignores the sign. Same shape, nats to second order. Not clipped."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Compute k3 = expm1(d) − d, d clamped to 20: unbiased, nonnegative. Same shape, nats.

    Near 0, `exp(d) − 1 − d` loses all digits to cancellation, and `expm1(d) − d` half of them. There the series
    d² (1/2 + d/6 + d²/24 + …) is used, so the result is positive and accurate in every dtype.
    """
    capped = log_ratio.clamp(max=SAFETY_BOUND)
    small = capped.clamp(-_SERIES_RADIUS, _SERIES_RADIUS)
    series = torch.full_like(small, _INVERSE_FACTORIALS[0])
    for coefficient in _INVERSE_FACTORIALS[1:]:
        series = series * small + coefficient
    return torch.where(capped.abs() < _SERIES_RADIUS, series * small.square(), torch.expm1(capped) - capped)


ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
"""What a rejection criterion can bound, by the name of its kind. All but k1 are convex, and 0 at d = 0."""


def chi_squared(log_ratio: Tensor) -> Tensor:
    """Compute ρ² − 1 = expm1(2 d) with |d| ≤ 20; its mean under μ is χ²(π‖μ), the variance of the importance weight.

    ρ = 0 (d = −inf) maps to −1. Same shape.
    """
    return torch.expm1(2 * log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND))


def probability_difference(train_log_prob: Tensor, rollout_log_prob: Tensor) -> Tensor:
    """Compute |π − μ| of the sampled token: the total-variation integrand. Same shape, a probability.

    Two densities that both overflow their dtype (above e^709 in float64) count as equal, because ∞ − ∞ is undefined.
    """
    return (train_log_prob.exp() - rollout_log_prob.exp()).abs().nan_to_num(nan=0.0, posinf=torch.inf)
