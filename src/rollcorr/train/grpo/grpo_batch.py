"""The batch of a GRPO step, and the result of the step.

Symbols: B responses, T padded response length; log-probs in nats.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollcorr.correction.result import Correction
from rollcorr.engines.base import Rollout
from rollcorr.train.grpo.actor import Actor
from rollcorr.train.grpo.tasks import Reward


@dataclass(frozen=True, eq=False, kw_only=True)
class GrpoBatch:
    """One step's responses with the trainer's scores; tensors are (B, T) unless noted otherwise.

    Attributes:
        rollout: tokens and log μ, as the engine reported them.
        actor: spec of the trainer's log-probs of these tokens.
        rewards: reward of each response, length B.
        group_ids: index of its problem, (B,).
        old_log_prob: log π_old; None in bypass mode.
        ref_log_prob: log-probs of the reference policy, over the full vocabulary; None without a KL penalty.
        correction: weights and mask from π_old / μ; None in bypass mode or without a correction.
        advantages: (B,).
        metrics: metrics of the sampling and the rewards: name → number.
    """

    rollout: Rollout
    actor: Actor
    rewards: list[Reward]
    group_ids: Tensor
    old_log_prob: Tensor | None = None
    ref_log_prob: Tensor | None = None
    correction: Correction | None = None
    advantages: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def response_mask(self) -> Tensor:
        """Return the (B, T) bool mask, true on sampled tokens."""
        return self.rollout.tokens.response_mask

    def on_device(self, rows: Tensor) -> Tensor:
        """Return row numbers on the batch's device, without waiting for it."""
        return rows.to(self.group_ids.device, non_blocking=True)

    def without_tokens(self) -> GrpoBatch:
        """Return an empty copy: a rank without rows runs it, so that it joins every collective."""
        nothing = torch.zeros_like(self.response_mask)
        rollout = dataclasses.replace(
            self.rollout, tokens=dataclasses.replace(self.rollout.tokens, response_mask=nothing)
        )
        correction = self.correction and dataclasses.replace(self.correction, loss_mask=nothing, response_mask=nothing)
        return dataclasses.replace(self, rollout=rollout, correction=correction)


@dataclass(frozen=True, eq=False)
class StepResult:
    """Result of a step: metrics, batch, and log π_θ of the batch in the first epoch, (B, T).

    Attributes:
        metrics: name → number.
        batch: the sampled, scored and corrected batch.
        log_prob: log π_θ, nats, (B, T).
    """

    metrics: dict[str, float]
    batch: GrpoBatch
    log_prob: Tensor
