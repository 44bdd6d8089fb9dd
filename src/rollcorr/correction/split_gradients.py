"""Accumulate the gradients of a loss in parts: each part is scaled at the end, when its denominator is known.

    .grad = Σ over ranks and micro-batches of  f₁ · ∇ policy_gradient + f₂ · ∇ regularization + ∇ other losses

Two parts need two backward passes through one graph, and two sets of gradients. Some wrappers reduce gradients inside
a backward pass, so their reduction is changed until `_scale_and_reduce`:

    plain module    gradients stay on the rank; `_scale_and_reduce` sums them over the groups, once
    DDP             the same: the reducer is off within the block, as in `no_sync()`. Otherwise it would reduce the
                    gradients of the first backward pass and miss the second
    FSDP2           every backward pass reduces its own part into the sharded `.grad`, even where
                    `set_requires_gradient_sync(False)` was called; `_scale_and_reduce` turns FSDP's mean into the sum

docs/guides/distributed.md contains the table of supported and rejected uses.
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
    """The gradients of one optimizer step, in parts, until `_scale_and_reduce` receives a factor for each part.

    `TrainingStep` computes the factors. Gradients that exist before the block raise, because it is unknown whether they
    are summed over ranks. Gradients of other losses within the block are not scaled. Under DDP and without a wrapper
    they are also summed over the ranks.

    Args:
        model: the module of the forward passes: the DDP or FSDP2 wrapper, not the wrapped module.
        group: data-parallel ranks.
        context_group: ranks with other slices of the same sequences.
        accumulation: the Accelerator that runs the backward passes; optional.

    Raises:
        TypeError: `accumulation` is not an Accelerator, but for instance a number of micro-batches.
        ValueError: the wrapper is not supported; on entering the block: gradients exist, or the ranks of the wrapper
            and of the groups differ.
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
        self._ddp, self._fsdp = _find_wrappers(model)
        if accumulation is not None and not hasattr(accumulation, "gradient_accumulation_steps"):
            raise TypeError(
                f"accumulation must be the accelerate.Accelerator of the loop; got {accumulation!r}. Micro-batches are "
                "counted as they come, so without one leave it out"
            )
        kind = getattr(accumulation, "distributed_type", None)
        if str(getattr(kind, "value", kind)) in ("DEEPSPEED", "MEGATRON_LM"):
            raise ValueError(_OWNS_GRADIENTS_ERROR.format(kind))
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
                raise ValueError(_OTHER_RANKS_ERROR.format("DDP", module.process_group.size(), ranks))

        # FSDP2 divides by its ranks, but the sum over ranks is needed: record the divisor of each parameter.
        self._fsdp_divisors = _fsdp_divisors(self._fsdp, ranks)
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

        # An error of the block itself is more informative than this one.
        if unfinished:
            self._held = []
            if error is None:
                raise RuntimeError("the block ended without finish(), and the gradients are lost: call it last")

    def _accumulate_parts(self, parts: Sequence[Tensor]) -> None:
        """Add the gradients of one micro-batch, each part to its own set. Only FSDP2 reduces here."""
        if any(module.require_forward_param_sync for module in self._ddp):
            raise RuntimeError(
                "the forward pass ran with DDP's reducer armed, so ranks would keep different gradients: run the "
                "forward passes inside the block too, through the wrapper that the step was given"
            )

        # A backward pass writes into `.grad`, so the set of its part is swapped in.
        for held, part in zip(self._held, parts, strict=False):
            # FSDP2 must reduce in every pass. Unreduced parts would be added to one buffer.
            for module in self._fsdp:
                module.set_requires_gradient_sync(True, recurse=False)
                module.set_requires_all_reduce(True, recurse=False)
                module.set_is_last_backward(True)
            self._swap_gradients(held)
            try:
                if self.accumulation is None:
                    part.backward(retain_graph=part is not parts[-1])
                else:
                    undivided = part * self.accumulation.gradient_accumulation_steps
                    self.accumulation.backward(undivided, retain_graph=part is not parts[-1])
            finally:
                self._swap_gradients(held)

    def _scale_and_reduce(self, factors: Sequence[Tensor]) -> None:
        """Scale each part, add the gradients of other losses, and sum over ranks unless a wrapper has done so."""
        # FSDP2 has divided all gradients by its ranks. The factors apply to the parts only.
        for i, parameter in enumerate(self.parameters):
            averaged = self._fsdp_divisors.get(parameter, 1.0)
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

        # Gradients that FSDP2 reduced are a sum over all ranks already.
        unreduced = [parameter for parameter in self.parameters if parameter not in self._fsdp_divisors]
        for group in (self.context_group, self.group):
            sum_gradients(unreduced, group)

    def _check_open(self, call: str) -> None:
        if self._state != "open":
            raise RuntimeError(
                f"{call} belongs inside `with {type(self).__name__}(…) as step:`, before finish() and once per step"
            )

    def _swap_gradients(self, held: list[Tensor | None]) -> None:
        for i, parameter in enumerate(self.parameters):
            parameter.grad, held[i] = held[i], parameter.grad


def _find_wrappers(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the DDP and the FSDP2 modules of a model.

    Raises:
        ValueError: a module is a DeepSpeed engine or wrapped by FSDP1.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else [model]

    # Compare class names, so that DeepSpeed need not be installed.
    if any(base.__name__ == "DeepSpeedEngine" for module in modules for base in type(module).__mro__):
        raise ValueError(_OWNS_GRADIENTS_ERROR.format("a DeepSpeedEngine"))

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


def _fsdp_divisors(modules: list[Any], ranks: int) -> dict[Tensor, float]:
    """Return the parameters whose gradients FSDP2 reduces, each with FSDP2's divisor of the sum over ranks.

    FSDP2 has no public API for the divisor. It is a field of its parameter groups, whose name depends on torch's
    version.
    """
    found: dict[Tensor, float] = {}
    for module in modules:
        # After a forward pass without a backward pass, parameters() of a root would return gathered parameters.
        module.reshard()
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            divisor = getattr(group, "gradient_divide_factor", None)
            mesh = group.mesh_info
            size = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
            if divisor is None and size != ranks:
                raise ValueError(_OTHER_RANKS_ERROR.format("FSDP2", size, ranks))
            found |= {p.sharded_param: float(size if divisor is None else divisor) for p in group.fsdp_params}
    return found


_OTHER_RANKS_ERROR = (
    "{} reduces gradients over {} ranks, and group and context_group together have {}: give as group the data-parallel "
    "ranks of the wrapper, e.g. torch.distributed.group.WORLD"
)

_OWNS_GRADIENTS_ERROR = (
    "{} owns its backward passes and its gradients, so they cannot be held apart and scaled: use the functional form, "
    "policy_loss(…, correction=correct(…, group=…)[rows]), or group=… and whole_step=True in bypass mode, multiply the "
    "loss by the ranks and the accumulated micro-batches, and call engine.backward(loss): docs/guides/distributed.md"
)
