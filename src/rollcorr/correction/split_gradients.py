"""Gradients of a loss in two parts over micro-batches: one part is scaled at the end, when its denominator is known.

    .grad = Σ over ranks and micro-batches of  factor · ∇ policy_gradient + ∇ regularization

Two parts need two backward passes through one graph, and two sets of gradients. Some wrappers exchange gradients inside
a backward pass. In the meantime they must not do so in their own way:

    plain module    gradients stay on the rank; `finish` sums them over the groups, once
    DDP             the same: the reducer is off within the block, as in `no_sync()`. Otherwise it would exchange the
                    gradients of the first backward pass and miss those of the second
    FSDP2           every backward pass reduces its own part into the sharded `.grad`, even where
                    `set_requires_gradient_sync(False)` was called; `finish` turns FSDP's mean into the sum

docs/guides/distributed.md has the table of what users may do, and what is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    """The gradients of one optimizer step. The policy gradient is held apart until `finish` knows its factor.

    Subclasses say where the factor comes from. Gradients that were there before the block are refused, because they may
    or may not be summed over ranks already. Gradients of other losses within the block are not scaled. Under DDP and
    without a wrapper they are summed over the ranks with the rest.

    Args:
        model: the module that forward passes go through: the DDP or FSDP2 wrapper, not what it wraps.
        group: data-parallel ranks.
        context_group: ranks that hold other slices of the same sequences.

    Raises:
        ValueError: on entering the block, when gradients are not None, or the wrapper cannot be handled.
    """

    def __init__(
        self, model: nn.Module, *, group: ProcessGroup | None = None, context_group: ProcessGroup | None = None
    ) -> None:
        self.model = model
        self.group = group
        self.context_group = context_group
        self._open = ExitStack()
        self._state = "new"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RuntimeError(f"{type(self).__name__} is for one optimizer step: make another for the next")

        ranks = math.prod(g.size() for g in (self.group, self.context_group) if g is not None)
        self._ddp, self._fsdp = _wrappers(self.model)
        for module in self._ddp:
            _check_ddp(module, ranks)

        # FSDP2 divides by its ranks, and the sum over ranks is wanted: each parameter knows what to multiply by.
        averaged = _averaged(self._fsdp, ranks)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._averaged = [averaged.get(parameter, 1.0) for parameter in self.parameters]
        self._own = [parameter for parameter in self.parameters if parameter not in averaged]
        if any(parameter.grad is not None for parameter in self.parameters):
            raise ValueError(
                "there are gradients already, and they may or may not be summed over ranks: call "
                "optimizer.zero_grad(set_to_none=True) before the step"
            )

        self._policy: list[Tensor | None] = [None] * len(self.parameters)
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
            self._policy = []
            if error is None:
                raise RuntimeError("the block ended without finish(), and the policy gradient is lost: call it last")

    def _backward(self, policy_gradient: Tensor, regularization: Tensor | None) -> None:
        """Add the gradients of one micro-batch. Waits for nothing."""
        self._check_open("backward()")
        if any(module.require_forward_param_sync for module in self._ddp):
            raise RuntimeError(
                "the forward pass ran with DDP's reducer armed, so ranks would keep different gradients: run the "
                "forward passes inside the block too, through the wrapper that the step was given"
            )

        # The first pass writes into the gradients that are held apart, the second into the parameters' own.
        self._reduce_each_pass()
        self._swap()
        try:
            policy_gradient.backward(retain_graph=regularization is not None)
        finally:
            self._swap()
        if regularization is not None:
            self._reduce_each_pass()
            regularization.backward()

    def _finish(self, factor: Tensor) -> None:
        """Scale the policy gradient, add the other part, and sum over ranks what no wrapper has summed."""
        # FSDP2 has divided both parts by its ranks. The factor belongs to the policy gradient alone.
        for i, parameter in enumerate(self.parameters):
            policy, averaged = self._policy[i], self._averaged[i]
            if parameter.grad is not None and averaged != 1:
                local_part(parameter.grad).mul_(averaged)
            if policy is None:
                continue
            part = local_part(policy)
            part.mul_(factor.to(part.device) * averaged)
            parameter.grad = policy if parameter.grad is None else parameter.grad.add_(policy)
        self._policy, self._state = [], "finished"

        # What FSDP2 reduced is a sum over all ranks already.
        for group in (self.context_group, self.group):
            sum_gradients(self._own, group)

    def _check_open(self, call: str) -> None:
        if self._state != "open":
            raise RuntimeError(
                f"{call} belongs inside `with {type(self).__name__}(…) as step:`, before finish() and once per step"
            )

    def _swap(self) -> None:
        for i, parameter in enumerate(self.parameters):
            parameter.grad, self._policy[i] = self._policy[i], parameter.grad

    def _reduce_each_pass(self) -> None:
        """Let FSDP2 reduce in every pass. Unreduced, both parts would be added in one buffer for good."""
        for module in self._fsdp:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_requires_all_reduce(True, recurse=False)
            module.set_is_last_backward(True)


def _wrappers(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The modules of DDP and of FSDP2.

    Raises:
        ValueError: there is one of FSDP1.
    """
    # Without a process group there can be no wrapper.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [], []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise ValueError(
            "FullyShardedDataParallel reduces gradients in ways that cannot be held apart: wrap the model with "
            "torch.distributed.fsdp.fully_shard"
        )

    ddp = [module for module in modules if isinstance(module, DistributedDataParallel)]
    return ddp, [module for module in modules if isinstance(module, FSDPModule)]


def _check_ddp(module: Any, ranks: int) -> None:  # noqa: ANN401 - DDP's attributes are not typed
    if module.static_graph:
        raise ValueError("DDP(static_graph=True) knows no no_sync() and no second backward pass: leave it out")
    if module.process_group.size() != ranks:
        raise ValueError(_OTHER_RANKS.format("DDP", module.process_group.size(), ranks))


def _averaged(modules: list[Any], ranks: int) -> dict[Tensor, float]:
    """The parameters whose gradients FSDP2 reduces, and what it divides the sum over ranks by.

    FSDP2 has no public name for this number. Its parameter groups hold it, and their name depends on torch's version.
    """
    found: dict[Tensor, float] = {}
    for module in modules:
        # After a forward pass without a backward pass, parameters() of a root would be the gathered ones.
        module.reshard()
        for group in _parameter_groups(module):
            divisor = getattr(group, "gradient_divide_factor", None)
            mesh = group.mesh_info
            size = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
            if divisor is None and size != ranks:
                raise ValueError(_OTHER_RANKS.format("FSDP2", size, ranks))
            found |= {p.sharded_param: float(size if divisor is None else divisor) for p in group.fsdp_params}
    return found


def _parameter_groups(module: Any) -> Iterator[Any]:  # noqa: ANN401 - private to torch, and not typed
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return (group for group in groups if group is not None)


_OTHER_RANKS = (
    "{} reduces gradients over {} ranks, and group and context_group together have {}: give as group the data-parallel "
    "ranks of the wrapper, e.g. torch.distributed.group.WORLD"
)
