"""An optimizer step over micro-batches, steps and ranks: the policy gradient is divided by what was kept, at last."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rollcorr.correction.denominators import rescaling
from rollcorr.correction.losses import PolicyLossOutput
from rollcorr.correction.process_groups import sum_over
from rollcorr.correction.split_gradients import SplitGradients
from rollcorr.diffusion.options import DiffusionActorConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StepOutcome(NamedTuple):
    """What became of an optimizer step.

    Attributes:
        factor: what the policy gradient was scaled by: all steps / the denominator.
        kept: steps in the loss.
        total: steps that were sampled.
        skipped: too little was kept: the gradients are gone, so leave the optimizer step out, and count it.
    """

    factor: float
    kept: float
    total: float
    skipped: bool

    @property
    def kept_fraction(self) -> float:
        """Kept / total."""
        return self.kept / self.total if self.total else 0.0


class DiffusionGradients(SplitGradients):
    """Gradients of one optimizer step, divided by all steps while they come in and by the denominator in the end.

    How many steps are kept is known after the last micro-batch only (in bypass mode it depends on π_θ). Dividing each
    micro-batch by its own count would weigh steps by what else was in their micro-batch. The KL to the reference is
    held apart meanwhile: rejection does not concern it.

    Wrappers, ranks and what is refused are as in `rollcorr.correction.micro_batches.BypassGradients`.

    Example:
        ```
        optimizer.zero_grad()
        with DiffusionGradients(model, config, total_steps=samples * window, group=data_parallel) as step:
            for micro_batch in micro_batches:
                step.backward(diffusion_loss(config, model(…), micro_batch, total_steps=step.total_steps))
            outcome = step.finish()
        if not outcome.skipped:
            clip_grad_norm_(…); optimizer.step()
        ```

    Args:
        model: the module that forward passes go through: the DDP or FSDP2 wrapper, not what it wraps.
        config: the actor's.
        total_steps: steps (samples × window) of the optimizer step, rejected ones too, over every rank.
        group: the data-parallel group: counts and gradients are summed over it. None: this process is alone.

    Raises:
        ValueError: total_steps is not above 0; on entering the block, when gradients are not None, or the wrapper's
            ranks are not those of the group.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DiffusionActorConfig,
        *,
        total_steps: float,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, group=group)
        if not total_steps > 0:
            raise ValueError(f"total_steps must be samples × window over every rank, > 0; got {total_steps}")
        self.total_steps = float(total_steps)
        self._config = config
        self._counts: list[Tensor] = []

    def backward(self, output: PolicyLossOutput) -> None:
        """Add the gradients and counts of one micro-batch. Waits for nothing."""
        self._backward(output.policy_gradient, output.regularization)
        kept = output.loss_mask.sum(dtype=torch.float64)
        self._counts.append(
            torch.stack([torch.as_tensor(output.counts.tokens, device=kept.device).to(kept.dtype), kept])
        )

    def finish(self) -> StepOutcome:
        """Rescale, sum over the ranks, and say what became of the step. Waits for the device, once."""
        self._check_open("finish()")
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        zero = torch.zeros(2, dtype=torch.float64, device=device)
        amount, kept = sum_over(torch.stack([zero, *(x.to(device) for x in self._counts)]).sum(0), self.group)
        factor = rescaling(self.total_steps, amount)
        self._finish(factor)
        scale, steps = torch.stack([factor, kept]).tolist()
        skipped = steps == 0 or steps < self._config.min_keep_fraction * self.total_steps
        if skipped:
            for parameter in self.parameters:
                parameter.grad = None
        return StepOutcome(scale, steps, self.total_steps, skipped)
