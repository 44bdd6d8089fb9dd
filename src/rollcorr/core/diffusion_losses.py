"""Losses of denoising steps: Flow-GRPO's clip, GRPO-Guard's re-centered ratio, Flow-DPPO's divergence mask.

Each loss returns one number per sample and step, (b, w), 0 where the step was rejected, for aggregation, and mergeable
statistics. r = π_θ / π_old is the ratio of log-probs averaged over the D latent dimensions. It is the true likelihood
ratio to the power 1/D, so a useful clip range also shrinks as 1/D.

Rejected steps are never read: they are replaced before any arithmetic, so NaN or ±inf there has no effect, forward or
backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.core.boundary import check_positive, truth
from rollcorr.core.losses import weights_and_active
from rollcorr.core.mergeable_statistics import Statistics, moments_of
from rollcorr.core.ratios import token_log_ratio


def flow_grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    keep: Tensor,
    *,
    clip_ratio: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Compute −w · min(r A, clip(r, 1 − ε, 1 + ε) A) with r = π_θ / π_old.

    If rollout and trainer differ before any update (bypass mode), r does not start at 1. Since E[log r] = −KL, it
    starts below: the clip then stops samples with A < 0 far more often than samples with A > 0.

    Args:
        log_prob: log π_θ averaged over the D dimensions, nats. (b, w): samples and steps. Carries the gradient.
        old_log_prob: log π_old, averaged likewise; same shape.
        advantages: A of each sample, (b,).
        keep: steps in the loss, same shape as the log-probs; read as ≠ 0.
        clip_ratio: ε > 0.
        weights: importance weights, same shape; detached here. Defaults to 1. A step of weight 0 adds 0.

    Returns:
        The loss of each step, and statistics over the kept ones: `policy_kl` (log π_old − log π_θ), `ratio`,
        `clip_fraction_high` and `_low` (r beyond its range, on either side of A), `zeroed_fraction_positive` and
        `_negative`: the share of the steps with A > 0, and with A < 0, whose gradient is 0.

    Raises:
        ValueError: shapes differ, or clip_ratio is not above 0.

    Source: Liu et al. (2025), "Flow-GRPO", arXiv:2505.05470.
    """
    steps = _prepare_inputs(log_prob, old_log_prob, advantages, keep, weights)
    return _clipped_loss(steps, steps.log_ratio, clip_ratio)


def grpo_guard_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor,
    dt: Tensor,
    advantages: Tensor,
    keep: Tensor,
    *,
    clip_ratio: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Compute −w · min(r A, clip(r) A) / |dt| with r = exp(s (log π_θ − log π_old + b)), b = mean_D (m − m_old)² / 2s².

    b is KL/D, so it centers the mean of log r at 0. The factor s removes the spread, which differs between timesteps.
    The factor 1/|dt| equalizes the size of the gradient.

    Args:
        log_prob: as in `flow_grpo_loss`, like `old_log_prob`, `advantages`, `keep`, `clip_ratio`, `weights`.
        old_log_prob: log π_old.
        mean: m of π_θ, (b, w, …). Carries the gradient.
        old_mean: m_old of π_old, same shape: in bypass mode the rollout's own.
        std: s, (b, w).
        dt: σ_next − σ < 0, (b, w).
        advantages: (b,).
        keep: (b, w).
        clip_ratio: ε > 0.
        weights: (b, w), optional.

    Returns:
        As `flow_grpo_loss`, with the re-centered ratio; and `ratio_mean_bias`, the moments of b.

    Raises:
        ValueError: as in `flow_grpo_loss`.

    Source: Wang et al. (2025), "GRPO-Guard", arXiv:2510.22319.
    """
    steps = _prepare_inputs(log_prob, old_log_prob, advantages, keep, weights)
    std, dt = _fill_inactive("std", std, steps), _fill_inactive("dt", dt, steps)
    bias = mean_kl(mean, old_mean, std, steps.active)
    loss, statistics = _clipped_loss(steps, std * (steps.log_ratio + bias), clip_ratio)
    row = Statistics.of(moments={"ratio_mean_bias": moments_of(bias.detach(), steps.active)})
    return loss / dt.abs(), statistics | row


def flow_dppo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor,
    advantages: Tensor,
    keep: Tensor,
    *,
    kl_threshold: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Compute −w · r A, without gradient if mean_D (m − m_old)² / 2s² > threshold and the update would increase it.

    The update increases it if r > 1 at A > 0, or r < 1 at A < 0. Steps with a correcting gradient stay in the loss.

    Args:
        log_prob: as in `grpo_guard_loss`, like the remaining tensors.
        old_log_prob: log π_old.
        mean: m of π_θ, (b, w, …).
        old_mean: m_old, same shape.
        std: s, (b, w).
        advantages: (b,).
        keep: (b, w).
        kl_threshold: largest KL/D, nats, > 0.
        weights: (b, w), optional.

    Returns:
        As `flow_grpo_loss`; and `divergence`, the moments of KL/D.

    Raises:
        ValueError: shapes differ, or kl_threshold is not above 0.

    Source: Flow-DPPO (2026), arXiv:2606.11025.
    """
    check_positive("kl_threshold", kl_threshold)
    steps = _prepare_inputs(log_prob, old_log_prob, advantages, keep, weights)
    with torch.no_grad():
        divergence = mean_kl(mean, old_mean, _fill_inactive("std", std, steps), steps.active)

    # A step beyond the limit stays in the loss if its gradient reduces the divergence.
    ratio = _clamped_ratio(steps.log_ratio)
    high, low = ratio > 1, ratio < 1
    far = divergence > kl_threshold
    zeroed = far & steps.leads_away(high, low)
    loss = -torch.where(zeroed, ratio.detach(), ratio) * steps.advantages

    row = Statistics.of(moments={"divergence": moments_of(divergence, steps.active)})
    return steps.weighted(loss), _clip_statistics(steps, ratio, far & high, far & low, zeroed) | row


class _StepInputs(NamedTuple):
    """Inputs with entries outside the loss replaced."""

    log_ratio: Tensor  # (b, w), with gradient; 0 where inactive
    advantages: Tensor  # (b, w); 0 where inactive
    active: Tensor  # (b, w) bool: kept, with nonzero weight
    weights: Tensor | None

    def leads_away(self, high: Tensor, low: Tensor) -> Tensor:
        """Return where the gradient increases a ratio that is high, or decreases one that is low."""
        return (high & (self.advantages > 0)) | (low & (self.advantages < 0))

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the importance-weighted loss of each step."""
        return loss if self.weights is None else self.weights * loss


def _prepare_inputs(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, keep: Tensor, weights: Tensor | None
) -> _StepInputs:
    """Check the inputs, and replace entries outside the loss.

    Raises:
        ValueError: shapes differ.
    """
    for name, tensor in (("old_log_prob", old_log_prob), ("keep", keep)):
        if log_prob.dim() != 2 or tensor.shape != log_prob.shape:
            raise ValueError(f"log_prob {tuple(log_prob.shape)} and {name} {tuple(tensor.shape)} must both be (b, w)")
    if advantages.shape != log_prob.shape[:1]:
        raise ValueError(
            f"advantages {tuple(advantages.shape)} do not fit log_prob {tuple(log_prob.shape)}: one for each sample, "
            f"({log_prob.shape[0]},); nothing is broadcast"
        )

    # A step with old probability 0 adds 0, as in `ppo_clip_loss`. So does a step of weight 0.
    weights, active = weights_and_active(weights, log_prob, truth(keep, "keep") & (old_log_prob != -torch.inf))
    log_ratio = token_log_ratio(log_prob, old_log_prob.detach(), active)
    per_step = advantages.detach().to(log_ratio.dtype).unsqueeze(1).expand_as(log_ratio)
    return _StepInputs(log_ratio, per_step.masked_fill(~active, 0.0), active, weights)


def _clipped_loss(steps: _StepInputs, log_ratio: Tensor, clip_ratio: float) -> tuple[Tensor, Statistics]:
    """Compute −w · min(r A, clip(r) A) of each step with r = exp(log_ratio), and its statistics."""
    check_positive("clip_ratio", clip_ratio)
    ratio = _clamped_ratio(log_ratio)
    loss = torch.maximum(-ratio * steps.advantages, -ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * steps.advantages)

    # The clip zeroes the gradient on one side of A only; steps that move back into the range stay.
    high, low = ratio > 1 + clip_ratio, ratio < 1 - clip_ratio
    return steps.weighted(loss), _clip_statistics(steps, ratio, high, low, steps.leads_away(high, low))


def _clip_statistics(steps: _StepInputs, ratio: Tensor, high: Tensor, low: Tensor, zeroed: Tensor) -> Statistics:
    active = steps.active
    moments = {
        "policy_kl": moments_of(-steps.log_ratio.detach(), active),
        "ratio": moments_of(ratio.detach(), active),
        "clip_fraction_high": moments_of(high, active),
        "clip_fraction_low": moments_of(low, active),
        "zeroed_fraction_positive": moments_of(zeroed, active & (steps.advantages > 0)),
        "zeroed_fraction_negative": moments_of(zeroed, active & (steps.advantages < 0)),
    }
    return Statistics.of(moments=moments)


def mean_kl(mean: Tensor, old_mean: Tensor, std: Tensor, active: Tensor) -> Tensor:
    """Compute mean_D (m − m_old)² / 2s² of each step, (b, w); 0 for inactive steps, whose means are not read."""
    if mean.shape != old_mean.shape or mean.shape[:2] != active.shape or mean.dim() < 3:
        raise ValueError(
            f"mean {tuple(mean.shape)} and old_mean {tuple(old_mean.shape)} must be (b, w, …) with (b, w) = "
            f"{tuple(active.shape)}"
        )
    inactive = ~active.unsqueeze(-1)
    shift = mean.flatten(2).masked_fill(inactive, 0.0) - old_mean.detach().flatten(2).masked_fill(inactive, 0.0)
    return shift.square().mean(-1) / (2 * std.square())


def _fill_inactive(name: str, values: Tensor, steps: _StepInputs) -> Tensor:
    """Return values of each step, with 1 where inactive, so that a division there is safe."""
    if values.shape != steps.active.shape:
        raise ValueError(f"{name} {tuple(values.shape)} must be one for each step, {tuple(steps.active.shape)}")
    return values.detach().to(steps.log_ratio.dtype).masked_fill(~steps.active, 1.0)


def _clamped_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
