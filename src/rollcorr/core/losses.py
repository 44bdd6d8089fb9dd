"""Per-token policy losses, and the KL terms to a reference policy.

There are three policies: μ sampled the tokens, π_old is the trainer's policy when the batch arrived, π_θ is the policy
being trained. A loss here is a tensor of per-token values, 0 outside the loss mask, for `rollcorr.core.aggregation` to
sum, together with mergeable statistics. `rollcorr.correction.losses` assigns the policies to the arguments.

Masked values are never read: they are replaced before any arithmetic, so NaN or ±inf there has no effect, forward or
backward. Arithmetic is in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.core.boundary import check_floating, check_tensors, truth
from rollcorr.core.divergence import k3
from rollcorr.core.layout import check_layout, expand
from rollcorr.core.mergeable_statistics import Statistics, moments_of
from rollcorr.core.ratios import at_least_float32, token_log_ratio


def ppo_clip_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
    weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Compute −w · min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) with r = π_θ / π_old; if A < 0, at most −w · c A.

    Decoupled PPO: the ratio measures the drift since the batch arrived, and the weight w = π_old / μ the sampler's
    mismatch. The clip reads only r.

    Args:
        log_prob: log π_θ of the sampled tokens, nats. (B, T), or (N,) when packed. Carries the gradient.
        old_log_prob: log π_old, nats, same shape. A token with probability 0 under π_old (−inf) adds 0.
        advantages: per token, same shape; or per sequence, (B,), in the padded layout.
        loss_mask: tokens in the loss, same shape; read as ≠ 0.
        clip_low: clip range of r below 1, in [0, 1].
        clip_high: clip range of r above 1, ≥ 0.
        clip_c: dual clip, a ratio > 1: the loss of a token with A < 0 is at most −c A. Optional; off by default.
        weights: importance weights, same shape; detached here. Defaults to 1. A token of weight 0 adds 0.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        The loss per token, 0 outside the mask, and statistics over the mask: `policy_kl` (log π_old − log π_θ where
        finite), `clip_fraction_high` and `_low` (the clip binds and the gradient is 0), `clip_fraction_dual`.

    Raises:
        ValueError: shapes differ, or a clip constant is outside its range.

    Source: Schulman et al. (2017), arXiv:1707.06347; dual clip: Ye et al. (2020), arXiv:1912.09729; decoupled:
    Hilton et al. (2022), arXiv:2110.00641.
    """
    _check_clip(clip_low, clip_high, clip_c)
    check_layout(log_prob=log_prob, old_log_prob=old_log_prob, loss_mask=loss_mask, cu_seqlens=cu_seqlens)
    check_floating(log_prob=log_prob, old_log_prob=old_log_prob)
    check_tensors(log_prob=log_prob, advantages=advantages, weights=weights)

    advantages = _per_token(advantages, log_prob, cu_seqlens)
    mask = truth(loss_mask, "loss_mask")
    weights, active = weights_and_active(weights, log_prob, mask & (old_log_prob != -torch.inf))

    log_ratio = token_log_ratio(log_prob, old_log_prob.detach(), active)

    # The bound changes only tokens with A < 0 and r > e²⁰ without the dual clip: their gradient, far beyond any usable
    # size, becomes 0.
    ratio = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    advantages = advantages.detach().to(ratio.dtype).masked_fill(~active, 0.0)

    # Take the larger of the two losses: a clip that would lower the loss does not apply.
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)

    # For A < 0, r is not clipped from above, so without a ceiling one token could dominate the batch.
    negative = advantages < 0
    stopped = torch.zeros_like(negative)
    if clip_c is not None:
        ceiling = -clip_c * advantages
        stopped = negative & (loss > ceiling)
        loss = torch.where(stopped, ceiling, loss)

    statistics = _policy_statistics(
        mask,
        log_prob,
        old_log_prob,
        clip_fraction_high=(ratio > 1 + clip_high) & (advantages > 0),
        clip_fraction_low=(ratio < 1 - clip_low) & negative,
        clip_fraction_dual=stopped,
    )
    return loss if weights is None else weights * loss, statistics


def reinforce_loss(
    log_prob: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    weights: Tensor | None = None,
    behavior_log_prob: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Compute −sg(w) · log π_θ · A: the policy gradient with importance weights and without a clip.

    Args:
        log_prob: log π_θ of the sampled tokens, nats. (B, T), or (N,) when packed. Carries the gradient. A token with
            probability 0 under π_θ (−inf) adds 0: its importance ratio is 0.
        advantages: per token, same shape; or per sequence, (B,), in the padded layout.
        loss_mask: tokens in the loss, same shape; read as ≠ 0.
        weights: importance weights π_θ / μ, same shape; detached here (a gradient through w would add a second
            policy-gradient term). Defaults to 1. A token of weight 0 adds 0.
        behavior_log_prob: log μ, same shape, used only for the `policy_kl` statistic. Optional; without it the
            statistic is empty.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        The loss per token, 0 outside the mask, and the statistic `policy_kl` over the mask (log μ − log π_θ where
        finite).

    Raises:
        ValueError: shapes differ.

    Source: Williams (1992), "Simple Statistical Gradient-Following Algorithms"; Precup, Sutton & Singh (2000).
    """
    check_layout(log_prob=log_prob, loss_mask=loss_mask, cu_seqlens=cu_seqlens)
    check_tensors(log_prob=log_prob, advantages=advantages, weights=weights, behavior_log_prob=behavior_log_prob)
    check_floating(log_prob=log_prob, behavior_log_prob=behavior_log_prob)

    advantages = _per_token(advantages, log_prob, cu_seqlens)
    mask = truth(loss_mask, "loss_mask")
    weights, active = weights_and_active(weights, log_prob, mask & (log_prob != -torch.inf))

    # Set both factors to 0 on inactive tokens: with only one, 0 · NaN would still be NaN.
    active_log_prob = at_least_float32(log_prob).masked_fill(~active, 0.0)
    advantages = advantages.detach().to(active_log_prob.dtype).masked_fill(~active, 0.0)
    loss = -active_log_prob * advantages
    if weights is not None:
        loss = weights * loss

    # Without μ, return the statistic over an empty sample. The second log-prob then has no effect.
    if behavior_log_prob is None:
        return loss, _policy_statistics(torch.zeros_like(mask), log_prob, log_prob)
    check_layout(log_prob=log_prob, behavior_log_prob=behavior_log_prob, cu_seqlens=cu_seqlens)
    return loss, _policy_statistics(mask, log_prob, behavior_log_prob)


def neutral_log_probs(log_prob: Tensor, old_log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """Replace missing values in both log-probs for `nonfinite="neutral"`, so that a loss over them is finite.

    Where log π_old is missing it becomes sg(log π_θ). Then r = π_θ / sg(π_θ) is 1, its gradient is the gradient of
    log π_θ, and the token contributes −w A ∇log π_θ. Where log π_θ is missing there is no gradient: both become −inf,
    which contributes 0.

    Args:
        log_prob: log π_θ, nats. Any shape. Carries the gradient.
        old_log_prob: log π_old, or log μ in its place, nats, same shape. −inf is probability 0, which is not missing.

    Returns:
        The two log-probs, same shapes.
    """
    gone = log_prob.isnan() | (log_prob == torch.inf)
    missing = old_log_prob.isnan() | (old_log_prob == torch.inf)
    old_log_prob = torch.where(missing, log_prob.detach().to(old_log_prob.dtype), old_log_prob)
    return log_prob.masked_fill(gone, -torch.inf), old_log_prob.masked_fill(gone, -torch.inf)


def reference_kl(
    log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor, *, estimate: Callable[[Tensor], Tensor] = k3
) -> tuple[Tensor, Tensor]:
    """Estimate KL(π_θ‖π_ref) per token from d = log π_ref − log π_θ.

    Args:
        log_prob: log π_θ, nats. Any shape. Carries the gradient.
        ref_log_prob: log π_ref, nats, same shape; detached here.
        mask: response tokens, same shape; read as ≠ 0.
        estimate: a function of d, from `rollcorr.core.divergence`; default `k3`. `k1` is unbiased and signed, and the
            expectation of its gradient is 0: it measures the KL but does not lower it. `k2` is biased, but its expected
            gradient is the KL's. `k3` is unbiased and nonnegative.

    Returns:
        The estimate per token, and the mask of the tokens where both log-probs are finite; 0 elsewhere.

    Raises:
        ValueError: shapes differ.

    Source: Schulman (2020), "Approximating KL Divergence"; Shao et al. (2024), arXiv:2402.03300, eq. 4.
    """
    check_tensors(log_prob=log_prob, ref_log_prob=ref_log_prob, mask=mask)
    check_floating(log_prob=log_prob, ref_log_prob=ref_log_prob)
    for name, tensor in (("ref_log_prob", ref_log_prob), ("mask", mask)):
        if tensor.shape != log_prob.shape:
            raise ValueError(f"log_prob {tuple(log_prob.shape)} and {name} {tuple(tensor.shape)} differ")
    measured = truth(mask) & log_prob.isfinite() & ref_log_prob.isfinite()
    return estimate(-token_log_ratio(log_prob, ref_log_prob.detach(), measured)), measured


def _policy_statistics(mask: Tensor, log_prob: Tensor, old_log_prob: Tensor, **indicators: Tensor) -> Statistics:
    """Compute the moments over the mask of log π_old − log π_θ (never clamped) and of each indicator."""
    log_prob, old_log_prob = log_prob.detach(), old_log_prob.detach()
    finite = mask & log_prob.isfinite() & old_log_prob.isfinite()
    moments = {"policy_kl": moments_of(-token_log_ratio(log_prob, old_log_prob, finite), finite)}
    moments |= {name: moments_of(indicator, mask) for name, indicator in indicators.items()}
    return Statistics.of(moments=moments)


def weights_and_active(weights: Tensor | None, log_prob: Tensor, mask: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the detached weights, and the active tokens: in the mask, with nonzero weight."""
    if weights is None:
        return None, mask
    if weights.shape != log_prob.shape:
        raise ValueError(
            f"log_prob {tuple(log_prob.shape)} and weights {tuple(weights.shape)} differ; "
            "weights are one per token (a sequence-level weight is repeated)"
        )

    # 0 · NaN is NaN, so exclude a token of weight 0 like one outside the mask.
    weights = at_least_float32(weights.detach())
    active = mask & (weights != 0)
    return weights.masked_fill(~active, 0.0), active


def _per_token(advantages: Tensor, log_prob: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if advantages.shape == log_prob.shape:
        return advantages
    if cu_seqlens is None and advantages.shape == log_prob.shape[:1]:
        return expand(advantages, log_prob)

    # Packed, (B,) and (N,) are indistinguishable if B = N, so only (N,) is accepted.
    fix = "(B, T) per token or (B,) per sequence"
    if cu_seqlens is not None:
        fix = "(N,) per token; rollcorr.core.layout.expand(advantages, log_prob, cu_seqlens=cu_seqlens) spreads (B,)"
    raise ValueError(
        f"advantages {tuple(advantages.shape)} do not fit log_prob {tuple(log_prob.shape)}: expected {fix}; "
        "nothing is broadcast"
    )


def _check_clip(clip_low: float, clip_high: float, clip_c: float | None) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low must be in [0, 1], got {clip_low}")
    if not 0 <= clip_high < float("inf"):
        raise ValueError(f"clip_high must be finite and ≥ 0, got {clip_high}")
    if clip_c is not None and not 1 < clip_c < float("inf"):
        raise ValueError(f"clip_c must be finite and > 1, or None for no dual clip; got {clip_c}")
