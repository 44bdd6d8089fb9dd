"""The loss of denoising steps, in both modes.

    decoupled           w · L(π_θ / π_old)       w and keep mask from π_old / μ, once per batch
    bypass, ppo_clip    L(π_θ / μ)               keep mask from π_θ / μ, per step; the ratio includes the correction
    bypass, reinforce   −sg(w) · log π_θ · A     w and keep mask from π_θ / μ, per step

L is the loss selected by `loss_mode` (`rollcorr.core.diffusion_losses`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.core.aggregation import Denominators
from rollcorr.core.boundary import truth
from rollcorr.core.diffusion_losses import flow_dppo_loss, flow_grpo_loss, grpo_guard_loss, mean_kl
from rollcorr.core.losses import neutral_log_probs, reinforce_loss
from rollcorr.core.mergeable_statistics import Statistics, moments_of
from rollcorr.correction.denominators import Averaged, aggregate, loss_denominators
from rollcorr.correction.losses import PolicyLossOutput, check_whole_step
from rollcorr.correction.result import Correction
from rollcorr.diffusion.batch_checks import Batch, check_shapes, dimensions_of, require
from rollcorr.diffusion.step_correction import correct_steps, step_kl

if TYPE_CHECKING:
    from rollcorr.diffusion.actor_config import DiffusionActorConfig

_CORRECTION_FRACTIONS = ("zeroed_fraction_positive", "zeroed_fraction_negative")


def diffusion_loss(
    config: DiffusionActorConfig,
    model_output: Batch,
    data: Batch,
    *,
    total_steps: Tensor | float | None = None,
    whole_step: bool = False,
    schedule: Sequence[float] | None = None,
) -> PolicyLossOutput:
    """Compute Σ kept w L / denominator + kl_coef · mean KL(π_θ‖π_ref) / D, of b samples and w steps. Never syncs.

    To process one step at a time, pass w = 1. Bypass mode corrects each step separately for any w, so a full window
    and its single steps produce the same result.

    Args:
        config: the actor's.
        model_output: `log_probs` (b, w), averaged over D, with gradient; `prev_sample_mean` (b, w, …), with gradient,
            for grpo_guard, flow_dppo, kl_coef, step_kl and the exact KL.
        data: this micro-batch's slices of the batch (`rollcorr.diffusion.batch_checks`).
        total_steps: steps (samples × window) of the full optimizer step, including rejected ones, over every
            micro-batch and rank; the divisor of the sums. Defaults to the counts of this call, by `rs_denominator`.
        whole_step: states that this call is the full optimizer step. Bypass mode requires it without `total_steps`,
            because kept steps are known only after the last micro-batch; for several, `TrainingStep.diffusion_loss`.
        schedule: timestep values to break down the mismatch by (bypass mode); default: none.

    Returns:
        The loss, its parts, the counts of `rs_denominator`, `loss_mask` (b, w) with the steps in the loss, statistics,
        and in bypass mode the correction. If no step is kept, the policy gradient is 0 and connected to the graph.

    Raises:
        KeyError: a tensor that the mode needs is missing.
        ValueError: shapes differ, or D is needed and not known; or in bypass mode neither or both of `total_steps` and
            `whole_step` are given.
    """
    require(model_output, "log_probs", reason="carries the gradient")
    check_shapes(model_output, like="log_probs")
    check_shapes({**data, "log_probs": model_output["log_probs"]}, like="log_probs")
    if config.bypass_mode:
        check_whole_step(whole_step, "total_steps", given=total_steps is not None)
        parts = _bypass_loss(config, model_output, data, schedule)
    else:
        parts = _decoupled_loss(config, model_output, data)

    # Divide sums by all steps of the optimizer step: the number of kept steps is known only at its end.
    keep, sampled = parts.keep, torch.ones_like(parts.keep)
    counts = loss_denominators(config.denominator, keep, sampled, parts.weights)
    if total_steps is None:
        whole, divisor = Denominators(keep.numel(), keep.shape[0]), counts
    else:
        whole = divisor = Denominators(total_steps, 0.0)
    policy_gradient = aggregate(parts.per_step, keep, "token-mean", divisor)

    # The KL to the reference covers every step, so it is never divided by the kept count.
    regularization, reference_rows = _reference_kl(config, model_output, data, whole)
    return PolicyLossOutput(
        loss=policy_gradient if regularization is None else policy_gradient + regularization,
        policy_gradient=policy_gradient,
        regularization=regularization,
        counts=counts,
        loss_mask=keep,
        statistics=parts.statistics | reference_rows,
        correction=parts.correction,
        averaged=Averaged("token-mean", divisor, whole, sampled),
    )


class _LossParts(NamedTuple):
    """The parts of a micro-batch's loss, in both modes."""

    per_step: Tensor  # (b, w), 0 where rejected
    statistics: Statistics
    keep: Tensor  # (b, w) bool: steps in the loss
    weights: Tensor | None  # factors of the loss
    correction: Correction | None


def _decoupled_loss(config: DiffusionActorConfig, model_output: Batch, data: Batch) -> _LossParts:
    """Compute w · L(π_θ / π_old), with the weights and the mask stored in the batch."""
    (old,) = require(data, "old_log_probs", reason="decoupled mode compares π_θ with")
    if config.correction is None:
        keep, weights = torch.ones_like(old, dtype=torch.bool), None
    else:
        keep, weights = require(data, "rollout_keep_mask", "rollout_is_weights", reason="the correction acts through")
        if not config.correction.weights_reach_loss:
            weights = None

    # `neutral` means ratio 1 in the loss, as it does in the weight.
    log_prob = model_output["log_probs"]
    if config.correction is not None and config.correction.nonfinite == "neutral":
        log_prob, old = neutral_log_probs(log_prob, old)
    per_step, statistics = _ratio_loss(config, {**model_output, "log_probs": log_prob}, data, old, keep, weights)
    return _LossParts(per_step, statistics, truth(keep, "rollout_keep_mask"), weights, None)


def _bypass_loss(
    config: DiffusionActorConfig, model_output: Batch, data: Batch, schedule: Sequence[float] | None
) -> _LossParts:
    """Compute L(π_θ / μ), or −sg(w) · log π_θ · A: each step is corrected separately, by π_θ / μ."""
    assert config.correction is not None
    log_prob = model_output["log_probs"]
    (rollout,) = require(data, "rollout_log_probs", reason="bypass mode compares π_θ with")

    # Treat each step as its own sequence, so its correction is independent of the split into micro-batches.
    exact = step_kl(data.get("prev_sample_mean"), model_output.get("prev_sample_mean"), data.get("std"))
    timesteps = data.get("timesteps")
    correction = correct_steps(
        log_prob.reshape(-1, 1),
        rollout.reshape(-1, 1),
        config,
        exact_kl=None if exact is None else exact.reshape(-1, 1),
        timesteps=None if timesteps is None else timesteps.reshape(-1, 1),
        dimensions=dimensions_of(model_output, data),
        schedule=schedule,
    )
    keep = correction.loss_mask.view(log_prob.shape)
    weights = None if correction.loss_weights is None else correction.loss_weights.view(log_prob.shape)

    # Missing values reach the loss only under nonfinite="neutral". Like log μ = −inf, they get ratio 1.
    log_prob, behavior = neutral_log_probs(log_prob, rollout.masked_fill(~rollout.isfinite(), torch.nan))
    if config.correction.loss_type == "reinforce":
        advantages = _clipped_advantages(config, data)
        per_step, statistics = reinforce_loss(log_prob, advantages, keep, weights=weights, behavior_log_prob=behavior)
    else:
        # The ratio π_θ / μ is the importance ratio: weights would count it twice.
        per_step, statistics = _ratio_loss(config, {**model_output, "log_probs": log_prob}, data, behavior, keep, None)

    # Report zeroed gradients together with the mismatch that causes them.
    assert correction.statistics is not None
    names = [name for name in _CORRECTION_FRACTIONS if name in statistics.names["moments"]]
    shares = Statistics.of(moments={name: statistics.moment(name) for name in names}, device=log_prob.device)
    correction = dataclasses.replace(correction, statistics=correction.statistics | shares)
    return _LossParts(per_step, statistics, keep, weights, correction)


def _ratio_loss(
    config: DiffusionActorConfig, model_output: Batch, data: Batch, old: Tensor, keep: Tensor, weights: Tensor | None
) -> tuple[Tensor, Statistics]:
    """Compute the loss selected by `loss_mode`."""
    log_prob = model_output["log_probs"]
    advantages = _clipped_advantages(config, data)
    if config.loss_mode == "flow_grpo":
        return flow_grpo_loss(log_prob, old, advantages, keep, clip_ratio=config.clip_ratio, weights=weights)

    # The remaining two modes also read the means of both policies.
    reason = f"{config.loss_mode} compares"
    (mean,) = require(model_output, "prev_sample_mean", reason=reason)
    (old_mean, std) = require(data, "old_prev_sample_mean", "std", reason=reason)
    if config.loss_mode == "flow_dppo":
        limit = config.kl_mask_threshold
        return flow_dppo_loss(log_prob, old, mean, old_mean, std, advantages, keep, kl_threshold=limit, weights=weights)
    (dt,) = require(data, "dt", reason="grpo_guard divides by")
    return grpo_guard_loss(
        log_prob, old, mean, old_mean, std, dt, advantages, keep, clip_ratio=config.clip_ratio, weights=weights
    )


def _clipped_advantages(config: DiffusionActorConfig, data: Batch) -> Tensor:
    (advantages,) = require(data, "advantages", reason="the loss weighs steps by")
    return advantages.clamp(-config.adv_clip_max, config.adv_clip_max)


def _reference_kl(
    config: DiffusionActorConfig, model_output: Batch, data: Batch, whole: Denominators
) -> tuple[Tensor | None, Statistics]:
    """Compute kl_coef · mean over all steps of mean_D (m − m_ref)² / 2s², and statistics of this KL.

    With `kl_coef` 0 the first is None, and the statistics are empty unless the batch has the reference's means.
    """
    device = model_output["log_probs"].device
    if not config.kl_coef and ("ref_prev_sample_mean" not in data or "prev_sample_mean" not in model_output):
        return None, Statistics.of(device=device)

    (mean,) = require(model_output, "prev_sample_mean", reason="kl_coef compares with the reference")
    reference, std = require(data, "ref_prev_sample_mean", "std", reason="kl_coef compares with")

    # Replace non-finite steps before any arithmetic, so they never reach the gradient.
    measured = (mean.isfinite() & reference.isfinite()).flatten(2).all(-1) & (std > 0)
    kl = mean_kl(mean, reference, std.detach().masked_fill(~measured, 1.0), measured)

    row = Statistics.of(moments={"kl_ref": moments_of(kl.detach(), measured)})
    if not config.kl_coef:
        return None, row
    return config.kl_coef * aggregate(kl, measured, "token-mean", whole), row
