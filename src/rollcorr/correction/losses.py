"""The policy loss: the role of each of the three policies, and the denominators of the sum.

    decoupled           −w · min(r A, clip(r) A)   r = π_θ / π_old; w and mask from π_old / μ, once per batch
    bypass, ppo_clip    −min(r A, clip(r) A)       r = π_θ / μ; no weights, r is the importance ratio already
    bypass, reinforce   −sg(w) · log π_θ · A       w and mask from π_θ / μ, in every call

The formulas are in `rollcorr.core.losses` and `rollcorr.core.aggregation`. This file chooses between them, and checks
that the choice is valid. `rollcorr.correction.denominators` computes the denominators of the sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from rollcorr.config import LossAggMode, LossConfig, Normalizer, PresetName, RolloutCorrectionConfig
from rollcorr.config.checks import unknown_name, warn_once
from rollcorr.config.conversion import resolve
from rollcorr.core.aggregation import Denominators
from rollcorr.core.boundary import check_floating, check_tensors, truth
from rollcorr.core.divergence import ESTIMATES
from rollcorr.core.layout import check_layout
from rollcorr.core.losses import (
    neutral_log_probs,
    ppo_clip_loss,
    reference_kl,
    reinforce_loss,
)
from rollcorr.core.mergeable_statistics import Statistics, moments_of
from rollcorr.correction.correction_checks import check_belongs, compare_policies, context_group_of, has_step_counts
from rollcorr.correction.denominators import (
    Averaged,
    aggregate,
    aggregation_mode,
    count_denominators,
    loss_denominators,
    sequence_lengths,
    sum_denominators,
)
from rollcorr.correction.process_groups import members, warn_without_group
from rollcorr.correction.result import Correction
from rollcorr.correction.rollout_correction import correct

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyLogProbs:
    """The log-probs of the sampled tokens under each policy, in nats; all (B, T), or all (N,) when packed.

    Fields are keyword-only, so that policies cannot be swapped by position.

    Attributes:
        log_prob: log π_θ, the policy being trained; carries the gradient.
        old_log_prob: log π_old, the trainer's policy when the batch arrived. Decoupled mode only.
        rollout_log_prob: log μ, as the sampler reported it. Required in bypass mode.
        ref_log_prob: log π_ref, for the KL penalty; over the full vocabulary.
        full_log_prob: log π_θ over the full vocabulary, for the KL penalty, if `log_prob` is over a truncated one;
            carries a gradient. Defaults to `log_prob`, which then covers the full vocabulary.

    Raises:
        TypeError: a field is not a tensor.
        ValueError: shapes or devices differ, or a field is not floating-point; or `log_prob` has no gradient and a
            fixed policy has one.
    """

    log_prob: Tensor
    old_log_prob: Tensor | None = None
    rollout_log_prob: Tensor | None = None
    ref_log_prob: Tensor | None = None
    full_log_prob: Tensor | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        check_tensors(**given)
        check_floating(**given)
        for name in ("old_log_prob", "rollout_log_prob", "ref_log_prob", "full_log_prob"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != self.log_prob.shape:
                raise ValueError(f"log_prob {tuple(self.log_prob.shape)} and {name} {tuple(tensor.shape)} differ")

            # A model's output carries a graph, and only the policy being trained is computed with one.
            fixed = tensor is not None and name != "full_log_prob"
            if fixed and tensor.grad_fn is not None and not self.log_prob.requires_grad:
                raise ValueError(
                    f"{name} carries a gradient and log_prob carries none, so they seem to be swapped: log_prob is the "
                    f"policy being trained; give {name}.detach() if there is nothing to train"
                )


@dataclass(frozen=True, eq=False)
class PolicyLossOutput:
    """A loss, its parts, and the counts that merge it with other micro-batches.

    Attributes:
        loss: 0-d: `policy_gradient`, plus `regularization` if there is one. Call `backward` on it.
        policy_gradient: 0-d, the part to which weights and rejection apply.
        regularization: 0-d, kl_coef · KL − entropy_coef · entropy; `None` when both coefficients are 0.
        counts: the contribution of this call to the denominators of the configuration's normalizer; 0-d tensors.
        loss_mask: the tokens in the policy gradient, bool.
        statistics: mergeable; `loss_metrics` reads them.
        correction: the applied correction, if any. In bypass mode it was computed by this call, against π_θ.
        averaged: the denominators of the parts, and the response mask; `TrainingStep` reads them.
    """

    loss: Tensor
    policy_gradient: Tensor
    regularization: Tensor | None
    counts: Denominators
    loss_mask: Tensor
    statistics: Statistics
    correction: Correction | None
    averaged: Averaged


def policy_loss(
    policies: PolicyLogProbs,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: RolloutCorrectionConfig | Mapping[str, Any] | PresetName | None = None,
    loss: LossConfig | None = None,
    correction: Correction | None = None,
    denominators: Denominators | None = None,
    original_denominators: Denominators | None = None,
    whole_step: bool = False,
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | Literal["local"] | None = None,
    context_group: ProcessGroup | None = None,
    **misspelled: NoReturn,
) -> PolicyLossOutput:
    """Compute Σ per-token loss / denominator + kl_coef · KL(π_θ‖π_ref) − entropy_coef · H(π_θ).

    Args:
        policies: the log-probs. The mode determines which of them are required.
        advantages: per token, in the shape of `log_prob`; or per sequence, (B,), in the padded layout.
        response_mask: tokens that the policy sampled, same shape; read as ≠ 0.
        config: the correction and its mode: a configuration, a preset's name or a dictionary. Defaults to the
            configuration of `correction`, or to plain PPO without a correction.
        loss: clip constants, aggregation and coefficients; defaults to `LossConfig()`.
        correction: in decoupled mode, the result of `correct(old, rollout, …)`, computed once per batch; for a
            micro-batch its part, `correction[rows]`. Bypass mode computes its own, because it depends on π_θ.
        denominators: denominators of the policy gradient, over every micro-batch and rank of the optimizer step. By
            default, the denominators of `correction`, so that the losses of its parts add up. Without a correction,
            this call is the full step, and its tokens are counted.
        original_denominators: denominators of the response mask, for the KL and entropy terms, which also cover
            rejected tokens. Required only if `denominators` count a different quantity.
        whole_step: declares that this call is the full optimizer step of this rank. Bypass mode requires it without
            `denominators`, because the kept tokens are known only after the last micro-batch: for several micro-batches
            use `TrainingStep`.
        entropy: H(π_θ(·|s_t)) per token, nats, same shape; with its graph when entropy_coef is not 0.
        cu_seqlens: (B + 1,) token offsets, only when packed; defaults to the offsets of `correction`.
        group: data-parallel ranks over which a call without `correction` and `denominators` counts. Defaults to this
            process, with a warning if there are several ranks; "local" omits the warning.
        context_group: ranks with other tokens of the same sequences; defaults to the context group of `correction`. The
            ranks' losses then add up to the loss of full sequences. `counts` and the correction cover full sequences,
            and the statistics the rank's own tokens.
        misspelled: unknown options; they raise `TypeError`, which suggests the nearest known name.

    Returns:
        The loss, its parts and its statistics. Without tokens to average, the loss is 0 and connected to the graph.

    Raises:
        TypeError: an argument is not a tensor, or an option is unknown.
        ValueError: shapes or devices differ; a policy that the mode needs is missing; the behavior ratio π/μ would be
            applied twice or not at all; a coefficient is set without its tensor; the correction is of different tokens,
            ranks or swapped policies, or lacks the denominators of its optimizer step.
    """
    if misspelled:
        raise _unknown_option_error(next(iter(misspelled)))
    loss = loss_config_of(loss)
    if config is None and correction is not None:
        config = correction.config
    settings = config if isinstance(config, RolloutCorrectionConfig) else resolve(config)
    if correction is not None:
        context_group = context_group_of(correction, context_group)
        cu_seqlens = correction.cu_seqlens if cu_seqlens is None else cu_seqlens
    peers, ranks = members(group), None if correction is None else correction.ranks[0]
    if peers is not None and ranks not in (None, peers.size()):
        raise ValueError(f"group has {peers.size()} ranks, the correction {ranks}: pass the same group to correct")
    if denominators is None:
        warn_without_group(group, context_group, correction and correction.group, None if ranks == 1 else ranks)
    normalizer: Normalizer = "kept" if settings is None else settings.normalizer
    mode = aggregation_mode(settings, loss)

    check_layout(log_prob=policies.log_prob, response_mask=response_mask, cu_seqlens=cu_seqlens)
    check_tensors(log_prob=policies.log_prob, advantages=advantages, entropy=entropy)
    check_floating(entropy=entropy)
    inputs = _LossInputs(policies, advantages, truth(response_mask, "response_mask"), cu_seqlens, context_group)

    # Compute the loss per token: the mode selects the policies of the ratio, the tokens and the weights.
    if settings is not None and settings.bypass_mode:
        token = _bypass_loss(
            inputs, settings, loss, correction, whole_step=whole_step, counted=denominators is not None
        )
    else:
        token = _decoupled_loss(inputs, settings, loss, correction)

    # Divide the policy gradient by the denominators of the full step. Return this call's contribution to them.
    counts = loss_denominators(
        normalizer, token.loss_mask, inputs.mask, token.weights, cu_seqlens=cu_seqlens, context_group=context_group
    )
    if denominators is None and correction is not None and has_step_counts(correction, inputs.mask):
        denominators = correction.denominators(normalizer)
        original_denominators = original_denominators or correction.denominators("original")
    divisor = denominators or (counts if peers is None else sum_denominators(counts, peers))
    divides_rows_by = inputs.mask if normalizer == "original" else token.loss_mask
    policy_gradient = aggregate(
        token.per_token,
        token.loss_mask,
        mode,
        divisor,
        lengths=_sequence_lengths(inputs, divides_rows_by, mode),
        scale=loss.loss_scale_factor,
        cu_seqlens=cu_seqlens,
    )

    # KL and entropy also cover rejected tokens, so they are divided by the counts of the response mask. Without a
    # correction, the caller's denominators are these counts.
    if original_denominators is None and (correction is None or normalizer == "original"):
        original_denominators = denominators
    elif original_denominators is None and denominators is not None and (loss.kl_coef or loss.entropy_coef):
        raise ValueError(
            f"the KL and entropy terms average over all response tokens, but denominators count {normalizer!r} ones; "
            "pass original_denominators too"
        )
    if original_denominators is None and (loss.kl_coef or loss.entropy_coef):
        original_denominators = count_denominators(
            inputs.mask, cu_seqlens=cu_seqlens, group=peers, context_group=context_group
        )
    regularization, regularization_rows = _regularization(inputs, loss, mode, entropy, original_denominators)

    return PolicyLossOutput(
        loss=policy_gradient if regularization is None else policy_gradient + regularization,
        policy_gradient=policy_gradient,
        regularization=regularization,
        counts=counts,
        loss_mask=token.loss_mask,
        statistics=token.statistics | regularization_rows,
        correction=token.correction,
        averaged=Averaged(mode, divisor, original_denominators or divisor, inputs.mask, cu_seqlens),
    )


def loss_config_of(loss: LossConfig | None) -> LossConfig:
    """Return the loss configuration; defaults to `LossConfig()`.

    Raises:
        TypeError: `loss` has a different type, such as a dictionary.
    """
    loss = LossConfig() if loss is None else loss
    if not isinstance(loss, LossConfig):
        raise TypeError(f"loss must be a LossConfig, such as LossConfig(clip_ratio_low=0.2); got {loss!r}")
    return loss


def check_whole_step(whole_step: bool, counts: str, *, given: bool) -> None:
    """Check that a loss in bypass mode covers a full optimizer step, or was given the counts of the step.

    Args:
        whole_step: the option of the loss.
        counts: the name of the argument for the counts.
        given: whether the counts were given.

    Raises:
        ValueError: neither or both of them are given.
    """
    if whole_step == given:
        raise ValueError(
            "in bypass mode what is kept is known only after the last micro-batch, so losses of micro-batches do not "
            f"add up: use TrainingStep(model, config); or give either {counts}, or whole_step=True where this call is "
            "the whole optimizer step"
        )


def _unknown_option_error(name: str) -> TypeError:
    """Return the error for an unknown option of `policy_loss`, with the correct place or spelling."""
    own = [option for option in inspect.signature(policy_loss).parameters if option != "misspelled"]
    elsewhere = {
        field.name: f"config=RolloutCorrectionConfig({field.name}=…)" for field in fields(RolloutCorrectionConfig)
    }
    elsewhere |= {field.name: f"loss=LossConfig({field.name}=…)" for field in fields(LossConfig)}
    return TypeError(unknown_name(f"there is no option {name!r} of policy_loss", name, own, elsewhere))


def loss_metrics(statistics: Statistics, *, prefix: str = "actor/") -> dict[str, float]:
    """Return the mean of every row of (merged) loss statistics: policy_kl, clip_fraction_high, …, entropy.

    All rows are read in one device-to-host transfer.

    Args:
        statistics: `PolicyLossOutput.statistics`, of one micro-batch or merged.
        prefix: prefix of each name.
    """
    return {prefix + name: moments.mean for name, moments in statistics.read().moments.items()}


class _LossInputs(NamedTuple):
    policies: PolicyLogProbs
    advantages: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None
    context_group: ProcessGroup | None


class _TokenLossParts(NamedTuple):
    per_token: Tensor
    statistics: Statistics
    loss_mask: Tensor
    weights: Tensor | None
    correction: Correction | None


def _decoupled_loss(
    inputs: _LossInputs, config: RolloutCorrectionConfig | None, loss: LossConfig, correction: Correction | None
) -> _TokenLossParts:
    old_log_prob = inputs.policies.old_log_prob
    if old_log_prob is None:
        raise ValueError("decoupled mode needs old_log_prob, the trainer's policy when the batch arrived")
    if old_log_prob is inputs.policies.rollout_log_prob:
        raise ValueError(
            "old_log_prob and rollout_log_prob are one tensor, so π_old/μ = 1 and the correction would do nothing: "
            "recompute old_log_prob, or set bypass_mode=True"
        )

    mismatch = None
    if correction is not None:
        if correction.config != config:
            raise ValueError(f"correction was computed with {correction.config}, not with config={config}")
        check_belongs(correction, inputs.mask, inputs.cu_seqlens)
        mismatch = compare_policies(
            correction.fingerprint, inputs.policies, inputs.mask, inputs.cu_seqlens, inputs.context_group
        )
        weights, loss_mask = correction.loss_weights, correction.loss_mask
    elif config is not None and (
        config.weights_reach_loss or config.criteria or config.rollout_token_veto_threshold is not None
    ):
        raise ValueError(
            "config asks for weights or rejection, but no correction was given: compute "
            "correct(old_log_prob, rollout_log_prob, response_mask, config) once per batch and pass it"
        )
    else:
        weights, loss_mask = None, inputs.mask
        if config is None and inputs.policies.rollout_log_prob is not None and not torch.compiler.is_compiling():
            warn_once(
                "policy_loss got rollout_log_prob and no correction: this is plain PPO, and rollout_log_prob has no "
                "effect; pass correction=correct(old_log_prob, rollout_log_prob, response_mask, …), or leave it out"
            )

    # "neutral" keeps tokens without a log-prob. They get the ratio 1 here, and the weight 1.
    log_prob = inputs.policies.log_prob
    if config is not None and config.nonfinite == "neutral":
        log_prob, old_log_prob = neutral_log_probs(log_prob, old_log_prob)

    per_token, statistics = _ppo_clip_loss(inputs, log_prob, old_log_prob, loss_mask, loss, weights)
    statistics = statistics if mismatch is None else statistics | mismatch
    return _TokenLossParts(per_token, statistics, loss_mask, weights, correction)


def _bypass_loss(
    inputs: _LossInputs,
    config: RolloutCorrectionConfig,
    loss: LossConfig,
    correction: Correction | None,
    *,
    whole_step: bool,
    counted: bool,
) -> _TokenLossParts:
    log_prob, rollout_log_prob = inputs.policies.log_prob, inputs.policies.rollout_log_prob
    if rollout_log_prob is None:
        raise ValueError("bypass mode needs rollout_log_prob, the sampling policy's log-probs of the tokens")
    old_log_prob = inputs.policies.old_log_prob
    if old_log_prob is not None and old_log_prob is not rollout_log_prob:
        raise ValueError(
            "in bypass mode π_old is μ, but old_log_prob is another tensor than rollout_log_prob: leave it out, or "
            "set bypass_mode=False to use it"
        )
    if correction is not None:
        raise ValueError(
            "in bypass mode policy_loss computes the correction itself, from π_θ / μ. Another one would apply "
            "this ratio twice, or an outdated one: leave correction out"
        )
    check_whole_step(whole_step, "denominators", given=counted)
    if config.weights_reach_loss and config.rollout_is_batch_normalize and counted:
        raise ValueError(
            "rollout_is_batch_normalize in bypass mode would normalize each micro-batch or rank by itself; "
            "set normalizer='weights' instead, which divides by the weights of the whole step"
        )

    # π_θ changes between micro-batches, so compute the correction in each call.
    correction = correct(
        log_prob.detach(),
        rollout_log_prob,
        inputs.mask,
        config,
        cu_seqlens=inputs.cu_seqlens,
        context_group=inputs.context_group,
        densities=True,  # positive values are accepted: they may be log-densities
    )
    weights = correction.loss_weights

    # Tokens with a missing log-prob reach the loss only under nonfinite="neutral", and get ratio 1. A log μ of −inf
    # also counts as missing: the token was sampled, so its probability was not 0.
    behavior = rollout_log_prob.masked_fill(~rollout_log_prob.isfinite(), torch.nan)
    log_prob, behavior = neutral_log_probs(log_prob, behavior)

    if config.loss_type == "reinforce":
        per_token, statistics = reinforce_loss(
            log_prob,
            inputs.advantages,
            correction.loss_mask,
            weights=weights,
            behavior_log_prob=rollout_log_prob,  # for policy_kl, which leaves missing values out
            cu_seqlens=inputs.cu_seqlens,
        )
    else:
        # The clipped ratio π_θ / μ is the importance weight already. A second weight would count it twice.
        per_token, statistics = _ppo_clip_loss(inputs, log_prob, behavior, correction.loss_mask, loss, None)
    return _TokenLossParts(per_token, statistics, correction.loss_mask, weights, correction)


def _ppo_clip_loss(
    inputs: _LossInputs,
    log_prob: Tensor,
    old_log_prob: Tensor,
    loss_mask: Tensor,
    loss: LossConfig,
    weights: Tensor | None,
) -> tuple[Tensor, Statistics]:
    return ppo_clip_loss(
        log_prob,
        old_log_prob,
        inputs.advantages,
        loss_mask,
        clip_low=loss.clip_ratio_low,
        clip_high=loss.clip_ratio_high,
        clip_c=loss.clip_ratio_c,
        weights=weights,
        cu_seqlens=inputs.cu_seqlens,
    )


def _regularization(
    inputs: _LossInputs, loss: LossConfig, mode: LossAggMode, entropy: Tensor | None, denominators: Denominators | None
) -> tuple[Tensor | None, Statistics]:
    """Compute kl_coef · KL − entropy_coef · H over the response mask, and the mean of each term if it is given."""
    mask, cu_seqlens = inputs.mask, inputs.cu_seqlens
    log_prob, full_log_prob = inputs.policies.log_prob, inputs.policies.full_log_prob
    ref_log_prob = inputs.policies.ref_log_prob
    if loss.kl_coef and ref_log_prob is None:
        raise ValueError(f"kl_coef={loss.kl_coef} needs ref_log_prob, the reference policy's log-probs")
    if loss.entropy_coef and entropy is None:
        raise ValueError(f"entropy_coef={loss.entropy_coef} needs entropy, one value per token")

    # Measure a term even without a coefficient, if its tensor is given.
    terms: dict[str, tuple[Tensor, Tensor, float]] = {}
    if ref_log_prob is not None:
        trained = log_prob if full_log_prob is None else full_log_prob
        kl, measured = reference_kl(trained, ref_log_prob, mask, estimate=ESTIMATES[loss.kl_estimator])
        terms["kl_ref"] = kl, measured, loss.kl_coef
    if entropy is not None:
        check_layout(log_prob=log_prob, entropy=entropy, cu_seqlens=cu_seqlens)
        terms["entropy"] = entropy, mask & entropy.isfinite(), -loss.entropy_coef
    moments = {name: moments_of(values.detach(), measured) for name, (values, measured, _) in terms.items()}
    statistics = Statistics.of(moments=moments, device=mask.device)
    weighted = [term for term in terms.values() if term[2]]
    if not weighted:
        return None, statistics

    # Both terms average over the full response mask, including tokens without a measured value.
    lengths, scale = _sequence_lengths(inputs, mask, mode), loss.loss_scale_factor
    parts = [
        coefficient
        * aggregate(values, measured, mode, denominators, lengths=lengths, scale=scale, cu_seqlens=cu_seqlens)
        for values, measured, coefficient in weighted
    ]
    return sum(parts[1:], start=parts[0]), statistics


def _sequence_lengths(inputs: _LossInputs, mask: Tensor, mode: LossAggMode) -> Tensor | None:
    """Return the tokens of each full sequence in the mask, (B,), if the mode divides rows by them."""
    if mode != "seq-mean-token-mean":
        return None
    return sequence_lengths(mask, cu_seqlens=inputs.cu_seqlens, context_group=inputs.context_group)
