"""Plain copy of a sharded or adapted policy, for engines: FSDP2's shards gathered, PEFT's adapters merged.

Gathering is a collective, so every rank calls it in the same order. It gathers one parameter at a time: the policy's
device never holds more than one full parameter beside its shards, unless the copy is on that device as well.

The copy is compared with the policy on the probe, because a lost adapter or shard would otherwise reach the engine and
its reference alike, and no later check would see it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rollcorr.engines.base import TokenBatch, check_weight_sync, noise_floor
from rollcorr.engines.response_scoring import copied_model, make_probe, score_probe, score_responses

# Attributes that wrappers add to modules. With FSDP2's, `generate` of transformers would wait for the other ranks.
_OF_WRAPPERS = ("__composable_api", "_fsdp_", "_is_fsdp_")


@torch.no_grad()
def gather_policy(model: nn.Module, *, device: torch.device | str | None = None) -> nn.Module:
    """Return a plain model with the weights of a sharded or adapted policy; a plain policy is returned itself.

    `Engine.update_weights` calls this function. Call it yourself on ranks without an engine, with `device="meta"`.

    Args:
        model: the trainer's policy: FSDP2 (`fully_shard`), a `PeftModel`, or both; unchanged. Dropout is off meanwhile.
        device: where the copy is stored. Defaults to the device of the policy. On "meta" this rank takes part
            and stores nothing.

    Returns:
        A model with full, merged parameters. Merged ones are at least float32, so that they are rounded only once.

    Raises:
        ValueError: the wrapper is FSDP1, the adapters cannot be merged, or a parameter is quantized.
        WeightSyncError: copy and policy score the probe differently.
    """
    units = _fsdp_modules(model)
    for unit in units:
        unit.reshard()  # after a forward pass without a backward pass, parameters are still whole and may be outdated
    sharded = bool(units) or any(map(_is_sharded, model.parameters()))
    adapted = hasattr(model, "peft_config")
    if not (sharded or adapted):
        return model
    _check_mergeable(model, adapted=adapted)

    # Every rank gathers every parameter in the same order, including ranks that store nothing.
    device = next(model.parameters()).device if device is None else torch.device(device)
    parameters = {}
    for parameter in model.parameters():
        whole = _full_tensor(parameter)
        dtype = torch.promote_types(whole.dtype, torch.float32) if adapted else whole.dtype
        whole = whole.to(device, dtype, copy=True)
        parameters[id(parameter)] = nn.Parameter(whole, requires_grad=False)

    with evaluating(model):
        probe = make_probe(model)
        expected, compute_dtype = (_score_sharded if sharded else _score_adapted)(model, probe)
        for unit in units:
            unit.reshard()
        plain: Any = _unwrapped_copy(model, parameters) if sharded else copied_model(model, parameters)

    plain = plain.to(device).eval()
    if device.type == "meta":
        return plain
    if adapted:
        plain = plain.merge_and_unload()
        vars(plain).pop("peft_config", None)  # older releases of peft leave it, and it would look like an adapter
    found = score_probe(plain, probe, dtype=compute_dtype)
    check_weight_sync(found, expected, tolerance=noise_floor(expected, compute_dtype), where="its plain copy")
    return plain


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager that turns off dropout; on leaving, each module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` wrapped; refuse FSDP1, whose parameters are flattened."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("FSDP1 flattens parameters: wrap the policy with torch.distributed.fsdp.fully_shard")
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _full_tensor(parameter: Tensor) -> Tensor:
    """Return the full values of a parameter. Every rank must call it for a DTensor."""
    tensor: Any = parameter.detach()
    whole: Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor
    return whole


def _check_mergeable(model: nn.Module, *, adapted: bool) -> None:
    if adapted and not hasattr(model, "merge_and_unload"):
        raise ValueError(
            f"the adapters of {type(model).__name__} cannot be merged into its weights: use adapters of "
            "peft.get_peft_model with merge_and_unload, such as LoRA"
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name} is quantized ({parameter.dtype}): load the policy without quantization")


def _score_adapted(model: nn.Module, probe: TokenBatch) -> tuple[Tensor, torch.dtype]:
    """Score the probe with separate adapters, in float32: rounding to bfloat16 would hide a small adapter."""
    return score_probe(model, probe, dtype=torch.float32), torch.float32


def _score_sharded(model: Any, probe: TokenBatch) -> tuple[Tensor, torch.dtype]:  # noqa: ANN401 (a transformers model)
    """Score the probe through FSDP2 on every rank; also return the dtype that its mixed precision computes in."""
    compute_dtypes: list[torch.dtype] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, _: compute_dtypes.append(module.weight.dtype)
    )
    try:
        return score_responses(model, probe).log_prob, compute_dtypes[0]
    finally:
        handle.remove()


def _unwrapped_copy(model: nn.Module, parameters: dict[int, Any]) -> nn.Module:
    """Copy a sharded model without its wrappers and hooks. `parameters`: replacements by `id`, as in `copied_model`."""
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 changes a module's class; the first base class that is not FSDP2's is the original.
    twins: dict[int, nn.Module] = {}
    for module in model.modules():
        original: Any = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
        twins[id(module)] = original.__new__(original)

    # Hooks and composable states refer to process groups, which cannot be copied.
    memo: dict[int, Any] = {**parameters, **twins}
    for module in model.modules():
        for name, value in vars(module).items():
            if "_hooks" in name:
                vars(twins[id(module)])[name] = type(value)()
            elif name != "forward" and not name.startswith(_OF_WRAPPERS):
                vars(twins[id(module)])[name] = copy.deepcopy(value, memo)
    return twins[id(model)]
