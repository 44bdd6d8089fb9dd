"""An optimizer step over micro-batches and ranks, whose gradient equals one batch in one process.

    .grad = Σ ∇ policy_gradient / kept + Σ ∇ (KL and entropy terms) / original     over micro-batches and ranks

Each micro-batch adds its sum and its counts. The sums are divided once, at the end, when the counts of the step
are known: in bypass mode the kept tokens depend on π_θ, and in every mode a rank may have only a part of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rollcorr.config import LossConfig, PresetName, RolloutCorrectionConfig
from rollcorr.config.conversion import resolve
from rollcorr.core.boundary import in_host_memory
from rollcorr.correction.denominators import aggregation_mode, amount_of, count_denominators, rescaling
from rollcorr.correction.losses import PolicyLogProbs, PolicyLossOutput, loss_config_of, policy_loss
from rollcorr.correction.process_groups import check_groups, members, sum_over, warn_without_group
from rollcorr.correction.result import Correction
from rollcorr.correction.split_gradients import SplitGradients

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@runtime_checkable
class DiffusionConfig(Protocol):
    """A configuration of denoising steps, such as `rollcorr.diffusion.DiffusionActorConfig`."""

    @property
    def min_keep_fraction(self) -> float:
        """Return the minimum share of steps for a gradient."""

    def micro_batch_loss(
        self, model_output: Mapping[str, Tensor], data: Mapping[str, Tensor], *, schedule: Sequence[float] | None
    ) -> PolicyLossOutput:
        """Compute the loss of some samples and steps. The caller sums their counts."""


class StepOutcome(NamedTuple):
    """Loss and counts of an optimizer step, over all micro-batches and ranks: 0-d float64 tensors, on the device.

    Attributes:
        loss: the loss of the step.
        kept: tokens (or denoising steps) in the loss.
        total: tokens (or denoising steps) that were sampled.
        skipped: 0-d bool. The step has no useful gradient: no token was kept and there is no KL or entropy term, or a
            diffusion configuration's `min_keep_fraction` was missed. Skip the optimizer step, and count the skip.
    """

    loss: Tensor
    kept: Tensor
    total: Tensor
    skipped: Tensor

    @property
    def kept_fraction(self) -> Tensor:
        """Compute kept / total; 0 if no token was sampled."""
        return self.kept / self.total.clamp(min=1)


class TrainingStep(SplitGradients):
    """One optimizer step: ∇ = Σ ∇ policy gradient / kept + Σ ∇ (KL and entropy terms) / original.

    It counts the denominators over micro-batches and ranks, and sums gradients over ranks. `model` may be a plain
    module, DDP or FSDP2, also prepared by accelerate. After `finish`, `.grad` is the gradient of the full step on
    every rank (FSDP2: the rank's shard of it), equal to one process with the full batch: do not multiply the
    loss by the number of ranks, and do not divide it by the number of micro-batches.

    KL and entropy terms have a different denominator than the policy gradient. So with them each micro-batch costs a
    second backward pass through the same graph, and a second set of gradients, unless `config` is a correction.

    Example:
        ```
        correction = correct(old_log_prob, rollout_log_prob, response_mask, "decoupled_token_is", group=data_parallel)
        optimizer.zero_grad()
        with TrainingStep(model, correction, loss=loss_config, group=data_parallel) as step:
            for rows in micro_batches:
                policies = PolicyLogProbs(
                    log_prob=log_prob_of(model, rows),
                    old_log_prob=old_log_prob[rows],
                    rollout_log_prob=rollout_log_prob[rows],
                )
                output = step.policy_loss(policies, advantages[rows], response_mask[rows], correction=correction[rows])
                step.backward(output)
            step.finish()
        clip_grad_norm_(…); optimizer.step()
        ```

    Args:
        model: the module of the forward passes: the DDP or FSDP2 wrapper, not the wrapped module.
        config: the correction: a configuration, a preset's name or a dictionary, in either mode; `None` for plain PPO;
            or the actor's configuration of a diffusion model. Also the `Correction` of all rows of the step, with its
            groups: its counts are known, so KL and entropy terms need no second backward pass.
        loss: clip constants, aggregation and coefficients; defaults to `LossConfig()`. Not for diffusion models.
        group: data-parallel ranks. Defaults to this process, with a warning if there are several ranks; "local" omits
            the warning.
        context_group: ranks with other slices of the same sequences.
        accumulation: the `accelerate.Accelerator` of the loop. Its `backward` then runs the backward passes, and its
            division by `gradient_accumulation_steps` is undone. Defaults to `loss.backward()`.

    Raises:
        TypeError: `accumulation` is not an Accelerator.
        ValueError: the wrapper is from DeepSpeed, Megatron or FSDP1, a rank is in both groups, or weights in bypass
            mode are batch-normalized; on entering the block: gradients exist, or the ranks of the wrapper and of the
            groups differ.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RolloutCorrectionConfig | Mapping[str, Any] | PresetName | Correction | DiffusionConfig | None,
        *,
        loss: LossConfig | None = None,
        group: ProcessGroup | Literal["local"] | None = None,
        context_group: ProcessGroup | None = None,
        accumulation: Any = None,  # noqa: ANN401 - accelerate is not typed
    ) -> None:
        super().__init__(model, group=members(group), context_group=context_group, accumulation=accumulation)
        check_groups(self.group, context_group)

        # A wrapper over several ranks raises an error without a group, so no warning is needed.
        if not (self._ddp or self._fsdp):
            warn_without_group(group, context_group)
        self.loss = loss_config_of(loss)
        self._diffusion: DiffusionConfig | None = None
        self.config: RolloutCorrectionConfig | None = None
        self._ratio: Tensor | None = None
        self._amounts: list[Tensor] = []
        self._unused: set[Tensor] = set()  # by identity: the outputs may be copied with other statistics

        # The denoising steps of a diffusion model are its tokens, and its configuration has the options of their loss.
        if isinstance(config, DiffusionConfig):
            self._diffusion = config
            if loss is not None:
                raise ValueError(
                    "loss is of tokens, and the loss of denoising steps has its options in config: omit loss"
                )
        else:
            self.config = config.config if isinstance(config, Correction) else resolve(config)

        self._mode = aggregation_mode(self.config, self.loss)
        self._regularized = bool(self.loss.kl_coef or self.loss.entropy_coef)
        bypass_mode = self.config is not None and self.config.bypass_mode
        self._normalized = (
            self.config is not None and self.config.weights_reach_loss and self.config.rollout_is_batch_normalize
        )

        # A correction has the counts of the step only if its ranks are the same, and it is applied unchanged.
        wanted = self._regularized and not bypass_mode
        if wanted and isinstance(config, Correction) and config.counts is not None and config.ranks == self.ranks:
            kept, original = (amount_of(self._mode, config.denominators(name)) for name in (None, "original"))
            self._ratio = rescaling(original, kept)
        if bypass_mode and self._normalized:
            raise ValueError(
                "rollout_is_batch_normalize in bypass mode would normalize each micro-batch or rank by itself; "
                "set normalizer='weights' instead, which divides by the weights of the whole step"
            )

    def policy_loss(
        self,
        policies: PolicyLogProbs,
        advantages: Tensor,
        response_mask: Tensor,
        *,
        correction: Correction | None = None,
        entropy: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> PolicyLossOutput:
        """Compute the loss of a micro-batch of tokens; give it to `backward`.

        Args:
            policies: log π_θ with its graph, and log π_old and log μ as the mode requires, nats, (B, T), or (N,) when
                packed.
            advantages: same shape, or per sequence, (B,).
            response_mask: this micro-batch's tokens, same shape; read as ≠ 0.
            correction: in decoupled mode, the part with these rows: `correction[rows]`. Also a correction of only these
                rows, unless weights are batch-normalized: each micro-batch would be normalized separately.
            entropy: entropy of π_θ per token, nats, same shape. Only with an entropy coefficient.
            cu_seqlens: (B + 1,) token offsets, only when packed.

        Returns:
            The loss and its parts, as `rollcorr.policy_loss` returns them; `finish` returns the loss of the step.

        Raises:
            TypeError: the step trains a diffusion model.
            RuntimeError: called outside the block, or after `finish`.
            ValueError: the correction has a different configuration or different ranks; or as `rollcorr.policy_loss`.
        """
        if self._diffusion is not None:
            raise TypeError("this step is one of a diffusion model: call diffusion_loss")
        self._check_open("policy_loss()")
        if correction is not None:
            if correction.config != self.config:
                raise ValueError(f"correction was computed with {correction.config}, the step has config={self.config}")
            if correction.ranks[1] != self.ranks[1] or (self._normalized and correction.ranks[0] != self.ranks[0]):
                raise ValueError(
                    f"the correction is of {correction.ranks} ranks and the step of {self.ranks} (data-parallel, "
                    "context), and batch normalization and slices of sequences need the same ranks: give correct and "
                    "TrainingStep the same group and context_group"
                )

        # Pass "local", because `finish` divides by the counts of all micro-batches and ranks.
        output = policy_loss(
            policies,
            advantages,
            response_mask,
            config=self.config,
            loss=self.loss,
            correction=correction,
            whole_step=True,
            entropy=entropy,
            cu_seqlens=cu_seqlens,
            group="local",
            context_group=self.context_group,
        )
        self._unused.add(output.policy_gradient)
        return output

    def diffusion_loss(
        self, model_output: Mapping[str, Tensor], data: Mapping[str, Tensor], *, schedule: Sequence[float] | None = None
    ) -> PolicyLossOutput:
        """Compute the loss of a micro-batch of denoising steps; give it to `backward`.

        Args:
            model_output: tensors (b, w, …) of b samples and w steps, as in `rollcorr.diffusion.diffusion_loss`.
            data: this micro-batch's slices of the batch, in the same form.
            schedule: timestep values to break down the mismatch by (bypass mode); default: none.

        Returns:
            The loss of this micro-batch, 0-d, and its parts. `finish` returns the loss of the step.

        Raises:
            TypeError: the step trains on tokens.
            RuntimeError: called outside the block, or after `finish`.
            KeyError, ValueError: as `rollcorr.diffusion.diffusion_loss`.
        """
        if self._diffusion is None:
            raise TypeError("this step is one of tokens: call policy_loss, or give TrainingStep a DiffusionActorConfig")
        self._check_open("diffusion_loss()")
        output = self._diffusion.micro_batch_loss(model_output, data, schedule=schedule)
        self._unused.add(output.policy_gradient)
        return output

    def backward(self, output: PolicyLossOutput) -> None:
        """Add one micro-batch's gradients and counts. Does not synchronize.

        Args:
            output: the result of `policy_loss` or `diffusion_loss`, of this step or of the package.

        Raises:
            RuntimeError: called outside the block or after `finish`, or the forward pass ran with DDP's reducer armed.
            ValueError: the aggregation modes of the loss and the step differ.
        """
        self._check_open("backward()")
        averaged, regularization = output.averaged, output.regularization
        if averaged.mode != self._mode:
            raise ValueError(f"the loss was aggregated by {averaged.mode}, and the step is one of {self._mode}")

        # Convert means to sums, because sums of micro-batches and ranks add up.
        device = self._device
        policy = output.policy_gradient * amount_of(averaged.mode, averaged.policy_gradient, device)
        parts, terms = [policy], torch.zeros((), dtype=torch.float64, device=device)
        if regularization is not None:
            terms = regularization * amount_of(averaged.mode, averaged.regularization, device)
            parts = [policy, terms]
        if self._ratio is not None:
            parts = [policy * self._ratio.to(device) + terms]
        self._accumulate_parts(parts)

        original = count_denominators(
            averaged.response_mask, cu_seqlens=averaged.cu_seqlens, context_group=self.context_group
        )
        amounts = (
            output.loss_mask.sum(),
            (averaged.response_mask != 0).sum(),
            policy.detach(),
            terms.detach(),
            amount_of(self._mode, output.counts, device),
            amount_of(self._mode, original, device),
        )
        self._amounts.append(torch.stack([amount.to(device, torch.float64) for amount in amounts]))
        self._unused.discard(output.policy_gradient)

    def finish(self) -> StepOutcome:
        """Divide by the counts of the step, and sum gradients over ranks unless a wrapper has done so.

        Every rank must call it once. It synchronizes only for a diffusion model, whose gradients are removed when the
        step is skipped.

        Raises:
            RuntimeError: called outside the block or twice, or a loss of this step was not given to `backward`.
            ValueError: the counts of the step's correction and of its losses differ. In host memory only.
        """
        self._check_open("finish()")
        if self._unused:
            raise RuntimeError(
                f"{len(self._unused)} losses of this step were not given to step.backward(output), so the step cannot "
                "count and scale them: call it in place of loss.backward() or accelerator.backward(loss)"
            )

        # A rank without a micro-batch adds 0. In a context group, the counts already cover full sequences.
        own = torch.stack([torch.zeros(6, dtype=torch.float64, device=self._device), *self._amounts]).sum(0)
        own = torch.cat([sum_over(own[:4], self.context_group), own[4:]])
        kept, total, policy, terms, divisor, original = sum_over(own, self.group)
        if self._mode == "token-sum":
            divisor = original = torch.ones_like(kept)

        # If the ratio of the two counts was known beforehand, `backward` scaled the policy's gradient by it and added
        # both parts; the sum is divided by the count of KL and entropy.
        by_kept, by_original = rescaling(1.0, divisor), rescaling(1.0, original)
        if self._ratio is None:
            self._scale_and_reduce([by_kept, by_original])
        else:
            found = rescaling(original, divisor)
            if in_host_memory(found, self._ratio) and not torch.isclose(found, self._ratio, rtol=1e-5, equal_nan=True):
                raise ValueError(
                    "the losses of this step are of other rows than the correction that it was made with: give "
                    "TrainingStep the correction of exactly these rows, such as correction.mini_batch(rows)"
                )
            by_kept = by_original * self._ratio.to(by_original)
            self._scale_and_reduce([by_original, by_original])

        # For text, KL and entropy also train on rejected tokens.
        skipped = (total if self._regularized else kept) == 0
        if self._diffusion is not None:
            skipped = skipped | (kept < self._diffusion.min_keep_fraction * total)

            # Remove the gradients: with a gradient of 0, momentum and weight decay would still change the weights.
            if bool(skipped):
                for parameter in self.parameters:
                    parameter.grad = None
        return StepOutcome(policy * by_kept + terms * by_original, kept, total, skipped)
