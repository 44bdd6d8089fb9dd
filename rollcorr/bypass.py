"""Bypass mode over micro-batches: what is kept is known at the end, so the policy gradient is rescaled there, once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rollcorr.config import LossAggMode
from rollcorr.core.aggregation import Denominators
from rollcorr.policy_loss import PolicyLossOutput


class BypassGradients:
    """Policy gradients of micro-batches, divided by what turned out to be kept: grad ← grad · original / kept.

    In bypass mode rejection depends on π_θ, so the kept count is known only after the last micro-batch. Micro-batches
    are therefore divided by the original count, and this class rescales the sum once, before clipping. KL and entropy
    do not depend on the kept count: their gradients are held apart meanwhile, at the price of a second backward pass
    (through the same graph) and a second set of gradients, and only when there are such terms.

    Start from gradients that are None or zero; whatever else is in them is rescaled too.

    Example:
        ```
        gradients = BypassGradients(model.parameters(), original, mode="token-mean")
        for micro_batch in micro_batches:
            gradients.backward(policy_loss(…, denominators=original))
        gradients.finish()          # over ranks: gradients.finish(counts summed over ranks)
        clip_grad_norm_(…); optimizer.step()
        ```

    Args:
        parameters: the tensors whose `.grad` the loss fills.
        original: the denominators that every micro-batch was given.
        mode: how losses are aggregated (`aggregation_mode`); it decides which denominator is replaced.
    """

    def __init__(self, parameters: Iterable[Tensor], original: Denominators, *, mode: LossAggMode) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.original = original
        self.mode = mode
        self.counts = Denominators(0.0, 0.0)
        self._apart: list[Tensor | None] = [None] * len(self.parameters)

    def backward(self, output: PolicyLossOutput) -> None:
        """Add one micro-batch's gradients, and its counts to `self.counts`. Waits for nothing."""
        self.counts = self.counts + output.counts
        if output.regularization is None:
            output.policy_gradient.backward()
            return
        output.policy_gradient.backward(retain_graph=True)
        self._swap()
        try:
            output.regularization.backward()
        finally:
            self._swap()

    def finish(self, counts: Denominators | None = None) -> Tensor:
        """Rescale, put the parts together, and forget them.

        Args:
            counts: `self.counts` summed over ranks; None: this process is alone.

        Returns:
            The factor, 0-d float64; 0 when nothing was kept.
        """
        counts = self.counts if counts is None else counts
        factor = self._factor(counts)
        for i, parameter in enumerate(self.parameters):
            gradient, apart = parameter.grad, self._apart[i]
            if gradient is not None:
                gradient.mul_(factor.to(gradient.device))
            parameter.grad = apart if gradient is None else gradient if apart is None else gradient.add_(apart)
        self.counts, self._apart = Denominators(0.0, 0.0), [None] * len(self.parameters)
        return factor

    def _factor(self, counts: Denominators) -> Tensor:
        if self.mode == "token-sum":
            return torch.ones((), dtype=torch.float64, device="cpu")
        tokens = self.mode == "token-mean"
        original = _double(self.original.tokens if tokens else self.original.sequences)
        kept = _double(counts.tokens if tokens else counts.sequences)
        return torch.where(kept > 0, original.to(kept.device) / kept.clamp(min=1e-300), 0.0)

    def _swap(self) -> None:
        for i, parameter in enumerate(self.parameters):
            parameter.grad, self._apart[i] = self._apart[i], parameter.grad


def _double(amount: Tensor | float) -> Tensor:
    """A tensor where it is, a number on the host, whatever torch's default device is."""
    device = amount.device if isinstance(amount, Tensor) else "cpu"
    return torch.as_tensor(amount, dtype=torch.float64, device=device)
