"""Bypass mode over micro-batches: what is kept is known only at the end, so the policy gradient is rescaled there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.config.conversion import resolve
from rollcorr.core.aggregation import Denominators
from rollcorr.correction.denominators import aggregation_mode, count_denominators, rescaling, sum_denominators
from rollcorr.correction.losses import PolicyLogProbs, PolicyLossOutput, loss_config_of, policy_loss
from rollcorr.correction.process_groups import check_groups
from rollcorr.correction.split_gradients import SplitGradients

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BypassGradients(SplitGradients):
    """One optimizer step in bypass mode: ∇ = original / kept · ∇ policy gradient + ∇ (KL and entropy terms).

    In bypass mode rejection depends on π_θ, so the kept count is known only after the last micro-batch of the last
    rank. Micro-batches are therefore divided by the original counts, and the sum of their policy gradients is rescaled
    once, before clipping. KL and entropy do not depend on the kept count, so their gradients are held apart until
    then. Only when there are such terms, this costs a second backward pass (through the same graph) and a second set
    of gradients.

    After `finish`, `.grad` is the gradient of the whole step on every rank (FSDP2: the rank's shard of it). It is a sum
    over ranks, and needs no further factor or reduction. `model` may be a plain module, DDP or FSDP2, with or without
    `no_sync()` inside the block. docs/guides/distributed.md says what is refused.

    Example:
        ```
        optimizer.zero_grad()
        with BypassGradients(model, config, response_mask, loss=loss_config, group=data_parallel) as step:
            for rows in micro_batches:
                policies = PolicyLogProbs(
                    log_prob=log_prob_of(model, rows), rollout_log_prob=rollout_log_prob[rows]
                )
                output = step.policy_loss(policies, advantages[rows], response_mask[rows])
                step.backward(output)
            step.finish()
        clip_grad_norm_(…); optimizer.step()
        ```

    Args:
        model: the module that forward passes go through: the DDP or FSDP2 wrapper, not what it wraps.
        config: the correction, in bypass mode: a configuration, a preset's name or a dictionary.
        response_mask: this rank's tokens of the whole optimizer step, (B, T), or (N,) when packed. They are counted
            over the ranks here, so every rank must construct a step, even one without tokens.
        loss: clip constants, aggregation and coefficients. None: the defaults.
        group: data-parallel ranks. None: this process is alone.
        context_group: ranks that hold other slices of the same sequences.
        cu_seqlens: (B + 1,) token offsets of the mask, only when packed.

    Raises:
        ValueError: the configuration is not in bypass mode, or a rank is in both groups; on entering the block, when
            gradients are not None, or the wrapper's ranks are not those of the groups.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RolloutCorrectionConfig | Mapping[str, Any] | str,
        response_mask: Tensor,
        *,
        loss: LossConfig | None = None,
        group: ProcessGroup | None = None,
        context_group: ProcessGroup | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        super().__init__(model, group=group, context_group=context_group)
        check_groups(group, context_group)
        settings = resolve(config)
        if settings is None or not settings.bypass_mode:
            raise ValueError(
                f"config={config!r} is not in bypass mode, so what is kept is known beforehand: call "
                "policy_loss(…, denominators=…), or set bypass_mode=True"
            )
        self.config, self.loss = settings, loss_config_of(loss)

        # The response mask is known before the first forward pass, and so are its counts. The kept counts follow.
        self.original = count_denominators(
            response_mask, cu_seqlens=cu_seqlens, group=group, context_group=context_group
        )
        self.counts = Denominators(0.0, 0.0)
        self._device = response_mask.device

    def policy_loss(
        self,
        policies: PolicyLogProbs,
        advantages: Tensor,
        response_mask: Tensor,
        *,
        entropy: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> PolicyLossOutput:
        """The loss of a micro-batch, divided by the original counts of the step.

        Args:
            policies: log π_θ with its graph, and log μ, nats, (B, T), or (N,) when packed.
            advantages: same shape, or per sequence, (B,).
            response_mask: this micro-batch's tokens, same shape; read as ≠ 0.
            entropy: of π_θ per token, nats, same shape. Only with an entropy coefficient.
            cu_seqlens: (B + 1,) token offsets, only when packed.

        Returns:
            The loss in its parts; give it to `backward`.

        Raises:
            ValueError: as `rollcorr.policy_loss`.
        """
        return policy_loss(
            policies,
            advantages,
            response_mask,
            config=self.config,
            loss=self.loss,
            denominators=self.original,
            entropy=entropy,
            cu_seqlens=cu_seqlens,
            context_group=self.context_group,
        )

    def backward(self, output: PolicyLossOutput) -> None:
        """Add one micro-batch's gradients, and its counts to `counts`. Waits for nothing.

        Raises:
            RuntimeError: outside the block, after `finish`, or the forward pass ran with DDP's reducer armed.
        """
        self._backward(output.policy_gradient, output.regularization)
        self.counts = self.counts + output.counts

    def finish(self) -> Tensor:
        """Rescale the policy gradient, add the other part, and sum over ranks. Every rank calls it, once.

        Returns:
            The factor original / kept, 0-d float64, the same on every rank; 0 when nothing was kept.
        """
        self._check_open("finish()")

        # The counts of a context group are those of whole sequences already: only the data-parallel ranks add up.
        factor = self._factor(sum_denominators(self.counts, self.group, device=self._device))
        self._finish(factor)
        return factor

    def _factor(self, kept: Denominators) -> Tensor:
        mode = aggregation_mode(self.config, self.loss)
        if mode == "token-sum":
            # A plain sum was divided by nothing, so there is nothing to replace.
            return torch.ones((), dtype=torch.float64, device=self._device)
        if mode == "token-mean":
            return rescaling(self.original.tokens, kept.tokens)
        return rescaling(self.original.sequences, kept.sequences)
