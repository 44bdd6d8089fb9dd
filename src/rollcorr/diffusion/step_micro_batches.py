"""An optimizer step over micro-batches, steps and ranks: the policy gradient is divided by what was kept, at last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.core.aggregation import Denominators
from rollcorr.correction.losses import PolicyLossOutput
from rollcorr.correction.micro_batches import BypassGradients
from rollcorr.correction.process_groups import sum_denominators, sum_gradients, sum_over
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


class DiffusionGradients:
    """Gradients of one optimizer step, divided by all steps while they come in and by the denominator in the end.

    How many steps are kept is known after the last micro-batch only (in bypass mode it depends on π_θ). Dividing each
    micro-batch by its own count would weigh steps by what else was in their micro-batch. The KL to the reference is
    held apart meanwhile: rejection does not concern it.

    Start from gradients that are None.

    Example:
        ```
        gradients = DiffusionGradients(model.parameters(), config, total_steps=samples * window)
        for micro_batch in micro_batches:
            gradients.backward(diffusion_loss(config, model(…), micro_batch, total_steps=gradients.total_steps))
        outcome = gradients.finish()
        if not outcome.skipped:
            clip_grad_norm_(…); optimizer.step()
        ```

    Args:
        parameters: the tensors whose `.grad` the loss fills.
        config: the actor's.
        total_steps: steps (samples × window) of the optimizer step, rejected ones too, over every rank.

    Raises:
        ValueError: total_steps is not above 0.
    """

    def __init__(self, parameters: Iterable[Tensor], config: DiffusionActorConfig, *, total_steps: float) -> None:
        if not total_steps > 0:
            raise ValueError(f"total_steps must be samples × window over every rank, > 0; got {total_steps}")
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.total_steps = float(total_steps)
        self._config = config
        self._gradients = BypassGradients(self.parameters, Denominators(self.total_steps, 0.0), mode="token-mean")
        self._kept: list[Tensor] = []

    def backward(self, output: PolicyLossOutput) -> None:
        """Add the gradients and counts of one micro-batch. Waits for nothing."""
        self._gradients.backward(output)
        self._kept.append(output.loss_mask.sum(dtype=torch.float64))

    def finish(self, group: ProcessGroup | None = None) -> StepOutcome:
        """Rescale, sum over the ranks, and say what became of the step. Waits for the device, once.

        Args:
            group: the data-parallel group: counts and gradients are summed over it. Under DDP, call `backward` inside
                `no_sync()`, so that they are summed once.
        """
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        zero = torch.zeros((), dtype=torch.float64, device=device)
        kept = sum_over(torch.stack([zero, *(x.to(device) for x in self._kept)]).sum().reshape(1), group)
        counts = sum_denominators(self._gradients.counts, group, device=device)
        factor = self._gradients.finish(counts)
        sum_gradients(self.parameters, group)
        self._kept = []
        scale, steps = torch.stack([factor.to(device), kept.squeeze(0)]).tolist()
        skipped = steps == 0 or steps < self._config.min_keep_fraction * self.total_steps
        if skipped:
            for parameter in self.parameters:
                parameter.grad = None
        return StepOutcome(scale, steps, self.total_steps, skipped)
