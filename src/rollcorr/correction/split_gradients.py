"""Gradients of a loss in parts over micro-batches: each part is scaled at the end, when its denominator is known.

    .grad = Σ over ranks and micro-batches of  f₁ · ∇ policy_gradient + f₂ · ∇ regularization + ∇ other losses

Two parts need two backward passes through one graph, and two sets of gradients. Some wrappers exchange gradients inside
a backward pass. In the meantime they must not do so in their own way:

    plain module    gradients stay on the rank; `_finish` sums them over the groups, once
    DDP             the same: the reducer is off within the block, as in `no_sync()`. Otherwise it would exchange the
                    gradients of the first backward pass and miss those of the second
    FSDP2           every backward pass reduces its own part into the sharded `.grad`, even where
                    `set_requires_gradient_sync(False)` was called; `_finish` turns FSDP's mean into the sum

docs/guides/distributed.md has the table of what users may do, and what is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollcorr.correction.process_groups import local_part, sum_gradients

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self


class SplitGradients:
    """The gradients of one optimizer step. Parts are held apart until `_finish` gets a factor for each.

    `TrainingStep` counts the factors. Gradients that exist before the block raise, because they may or may not be
    summed over ranks already. Gradients of other losses within the block are not scaled. Under DDP and without a
    wrapper they are summed over the ranks with the rest.

    Args:
        model: the module that forward passes go through: the DDP or FSDP2 wrapper, not what it wraps.
        group: data-parallel ranks.
        context_group: ranks that hold other slices of the same sequences.
        accumulation: the Accelerator that runs the backward passes.

    Raises:
        TypeError: `accumulation` is no Accelerator, but for instance a number of micro-batches.
        ValueError: the wrapper cannot be handled; on entering the block, when gradients are not None, or the wrapper
            has other ranks than the groups.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group: ProcessGroup | None,
        context_group: ProcessGroup | None,
        accumulation: Any = None,  # noqa: ANN401 - accelerate is not typed
    ) -> None:
        self.model, self.accumulation = model, accumulation
        self.group, self.context_group = group, context_group
        self.ranks = tuple(1 if g is None else g.size() for g in (group, context_group))
        self._ddp, self._fsdp = _wrappers(model)
        if accumulation is not None and not hasattr(accumulation, "gradient_accumulation_steps"):
            raise TypeError(
                f"accumulation must be the accelerate.Accelerator of the loop; got {accumulation!r}. Micro-batches are "
                "counted as they come, so without one leave it out"
            )
        kind = getattr(accumulation, "distributed_type", None)
        if str(getattr(kind, "value", kind)) in ("DEEPSPEED", "MEGATRON_LM"):
            raise ValueError(_OWNS_GRADIENTS.format(kind))
        self._open = ExitStack()
        self._state = "new"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RuntimeError(f"{type(self).__name__} is for one optimizer step: make another for the next")

        ranks = math.prod(self.ranks)
        for module in self._ddp:
            if module.static_graph:
                raise ValueError("DDP(static_graph=True) knows no no_sync() and no second backward pass: leave it out")
            if module.process_group.size() != ranks:
                raise ValueError(_OTHER_RANKS.format("DDP", module.process_group.size(), ranks))

        # FSDP2 divides by its ranks, and the sum over ranks is wanted: each parameter knows what to multiply by.
        self._averaged = _averaged(self._fsdp, ranks)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._device = self.parameters[0].device if self.parameters else torch.device("cpu")
        if any(parameter.grad is not None for parameter in self.parameters):
            raise ValueError(
                "there are gradients already, and they may or may not be summed over ranks: call "
                "optimizer.zero_grad(set_to_none=True) before the step"
            )

        self._held: list[list[Tensor | None]] = [[None] * len(self.parameters) for _ in range(2)]
        for module in self._ddp:
            self._open.enter_context(module.no_sync())
        self._state = "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished, self._state = self._state == "open", "done"
        self._open.close()

        # An error of the block itself says more than this one would.
        if unfinished:
            self._held = []
            if error is None:
                raise RuntimeError("the block ended without finish(), and the gradients are lost: call it last")

    def _backward(self, parts: Sequence[Tensor]) -> None:
        """Add the gradients of one micro-batch, each part to its own set. Waits for nothing."""
        if any(module.require_forward_param_sync for module in self._ddp):
            raise RuntimeError(
                "the forward pass ran with DDP's reducer armed, so ranks would keep different gradients: run the "
                "forward passes inside the block too, through the wrapper that the step was given"
            )

        # A backward pass writes into `.grad`, so the set of its part is swapped in.
        for held, part in zip(self._held, parts, strict=False):
            # FSDP2 reduces in every pass. Unreduced, both parts would be added in one buffer for good.
            for module in self._fsdp:
                module.set_requires_gradient_sync(True, recurse=False)
                module.set_requires_all_reduce(True, recurse=False)
                module.set_is_last_backward(True)
            self._swap(held)
            try:
                if self.accumulation is None:
                    part.backward(retain_graph=part is not parts[-1])
                else:
                    undivided = part * self.accumulation.gradient_accumulation_steps
                    self.accumulation.backward(undivided, retain_graph=part is not parts[-1])
            finally:
                self._swap(held)

    def _finish(self, factors: Sequence[Tensor]) -> None:
        """Scale each part, add the gradients of other losses, and sum over ranks what no wrapper has summed."""
        # FSDP2 has divided everything by its ranks. The factors belong to the parts only.
        for i, parameter in enumerate(self.parameters):
            averaged = self._averaged.get(parameter, 1.0)
            if parameter.grad is not None and averaged != 1:
                local_part(parameter.grad).mul_(averaged)
            for held, factor in zip(self._held, factors, strict=True):
                gradient = held[i]
                if gradient is None:
                    continue
                part = local_part(gradient)
                part.mul_(factor.to(part.device) * averaged)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held, self._state = [], "finished"

        # What FSDP2 reduced is a sum over all ranks already.
        own = [parameter for parameter in self.parameters if parameter not in self._averaged]
        for group in (self.context_group, self.group):
            sum_gradients(own, group)

    def _check_open(self, call: str) -> None:
        if self._state != "open":
            raise RuntimeError(
                f"{call} belongs inside `with {type(self).__name__}(…) as step:`, before finish() and once per step"
            )

    def _swap(self, held: list[Tensor | None]) -> None:
        for i, parameter in enumerate(self.parameters):
            parameter.grad, held[i] = held[i], parameter.grad


def _wrappers(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The modules of DDP and of FSDP2.

    Raises:
        ValueError: there is one of DeepSpeed or of FSDP1.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else [model]

    # DeepSpeed need not be installed to know its engine: the name of the class is enough.
    if any(base.__name__ == "DeepSpeedEngine" for module in modules for base in type(module).__mro__):
        raise ValueError(_OWNS_GRADIENTS.format("a DeepSpeedEngine"))

    # Without a process group there can be no wrapper.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [], []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise ValueError(
            "FullyShardedDataParallel reduces gradients in ways that cannot be held apart: wrap the model with "
            "torch.distributed.fsdp.fully_shard"
        )

    ddp = [module for module in modules if isinstance(module, DistributedDataParallel)]
    return ddp, [module for module in modules if isinstance(module, FSDPModule)]


def _averaged(modules: list[Any], ranks: int) -> dict[Tensor, float]:
    """The parameters whose gradients FSDP2 reduces, and what it divides the sum over ranks by.

    FSDP2 has no public name for this number. Its parameter groups hold it, and their name depends on torch's version.
    """
    found: dict[Tensor, float] = {}
    for module in modules:
        # After a forward pass without a backward pass, parameters() of a root would be the gathered ones.
        module.reshard()
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            divisor = getattr(group, "gradient_divide_factor", None)
            mesh = group.mesh_info
            size = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
            if divisor is None and size != ranks:
                raise ValueError(_OTHER_RANKS.format("FSDP2", size, ranks))
            found |= {p.sharded_param: float(size if divisor is None else divisor) for p in group.fsdp_params}
    return found


_OTHER_RANKS = (
    "{} reduces gradients over {} ranks, and group and context_group together have {}: give as group the data-parallel "
    "ranks of the wrapper, e.g. torch.distributed.group.WORLD"
)

_OWNS_GRADIENTS = (
    "{} owns its backward passes and its gradients, so they cannot be held apart and scaled: use the functional form, "
    "policy_loss(…, correction=correct(…, group=…)[rows]), or group=… and whole_step=True in bypass mode, multiply the "
    "loss by the ranks and the accumulated micro-batches, and call engine.backward(loss): docs/guides/distributed.md"
)
