"""Rejection: which tokens and sequences stay in the loss. A decision is a mask, never a weight.

Each criterion is decided on the base mask alone and the decisions are AND-ed, so their order never matters.
Bounds are inclusive (`rollcorr.core.bounds`).
"""

from __future__ import annotations

from torch import Tensor

from rollcorr.core.bounds import exceeds, ratio_below, ratio_inside


def within_ratio_band(log_ratio: Tensor, *, lower: float | None, upper: float | None) -> Tensor:
    """Keep iff lower ≤ ρ ≤ upper, where ρ is exp(d), exp(S_i) or exp(G_i): the k1 criteria.

    The band is on the ratio itself. Testing −log ρ against [log lower, log upper] would invert every band that is not
    reciprocal.

    Args:
        log_ratio: d, S or G, nats; −inf is ratio 0. Any shape.
        lower: smallest ratio kept; None leaves the side open.
        upper: largest ratio kept; None leaves the side open.
    """
    return ratio_inside(log_ratio, lower=lower, upper=upper)


def within_divergence(divergence: Tensor, *, upper: float | None) -> Tensor:
    """Keep iff divergence ≤ upper: the k2 and k3 criteria over a token, or a sequence's sum, mean or maximum.

    Args:
        divergence: k2 or k3, nats. Any shape; +inf (probability zero) is rejected by every finite bound.
        upper: largest divergence kept, nats.
    """
    return ~exceeds(divergence, upper)


def catastrophic_tokens(log_ratio: Tensor, *, threshold: float) -> Tensor:
    """True where ρ_t < threshold, strictly, on the unclamped ratio: one such token vetoes its sequence.

    Args:
        log_ratio: d, nats; −inf is ratio 0. Any shape.
        threshold: τ, a ratio, e.g. 1e-4.
    """
    return ratio_below(log_ratio, threshold)
