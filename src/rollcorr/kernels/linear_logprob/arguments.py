"""What `linear_log_prob` refuses, with the fix. Shapes and types only: nothing here waits for the device."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from rollcorr.core.boundary import check_floating, check_integers, in_transform, type_name
from rollcorr.core.boundary import check_tensors as check_kinds
from rollcorr.core.logprobs import check_temperature as check_scalar_temperature
from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.linear_logprob.problem import wide_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Value = TypeVar("Value")


def flat(value: Value) -> Value:
    """A tensor in one row; anything else as it is."""
    return cast(Value, value.flatten()) if isinstance(value, Tensor) else value


def wide_temperature(hidden: Tensor, weight: Tensor, temperature: float | Tensor) -> float | Tensor:
    """A number as it is; one for each token in a row, in the type of the logits."""
    if not isinstance(temperature, Tensor):
        return temperature
    return temperature.flatten().to(wide_type(hidden, weight))


def check_tensors(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, bias: Tensor | None, accumulate_into: Tensor | None, impl: str
) -> None:
    """Raise a ValueError unless the operands fit each other; a TypeError if one is no tensor."""
    operands = {"hidden": hidden, "weight": weight, "bias": bias, "accumulate_into": accumulate_into}
    check_kinds(**operands, token_ids=token_ids)
    check_floating(**operands)
    check_integers(token_ids=token_ids)
    if impl != "reference" and in_transform():
        raise ValueError(
            f"impl={impl!r} does not work inside a transform of torch.func; use impl='reference', which makes all "
            "logits"
        )
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[-1:]:
        raise ValueError(f"hidden {tuple(hidden.shape)} must be (…, d) and weight {tuple(weight.shape)} (V, d)")
    if hidden.shape[:-1] != token_ids.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} must be token_ids {tuple(token_ids.shape)} with d added")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must have one entry for each of the weight's {len(weight)} rows")
    if accumulate_into is None:
        return
    if accumulate_into.shape != weight.shape:
        raise ValueError(f"accumulate_into {tuple(accumulate_into.shape)} and weight {tuple(weight.shape)} differ")
    inputs = [hidden, weight] if bias is None else [hidden, weight, bias]
    if torch.is_grad_enabled() and not any(x.requires_grad for x in inputs):
        raise ValueError(
            "accumulate_into would get nothing: neither hidden, weight nor bias requires a gradient; leave it out, or "
            "let the hidden states require one"
        )


def check_temperature(temperature: float | Tensor, token_ids: Tensor, impl: str) -> None:
    """Raise a ValueError unless it is a number above 0, or one for each token whose gradient nobody asks for."""
    if not isinstance(temperature, Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, Real):
            kind = type_name(temperature)
            raise TypeError(f"temperature must be a number or a tensor, got {kind}; give torch.as_tensor(temperature)")
        check_scalar_temperature(temperature)
        return
    check_kinds(token_ids=token_ids, temperature=temperature)
    if temperature.shape != token_ids.shape:
        raise ValueError(f"temperature {tuple(temperature.shape)} and token_ids {tuple(token_ids.shape)} differ")
    check_floating(temperature=temperature)
    if temperature.requires_grad and torch.is_grad_enabled() and impl != "reference":
        raise ValueError(
            f"temperature requires a gradient, and impl={impl!r} gives it none; give temperature.detach(), or use "
            "impl='reference', which makes all logits"
        )


def check_choice_of_tokens(name: str, value: Tensor | bool | None, token_ids: Tensor) -> None:
    """Raise a ValueError if a tensor is not one bool for each token; a TypeError if it is neither that nor a bool."""
    if value is None or isinstance(value, bool):
        return
    check_kinds(**{"token_ids": token_ids, name: value})
    if value.shape != token_ids.shape:
        raise ValueError(f"{name} {tuple(value.shape)} and token_ids {tuple(token_ids.shape)} differ")
    if value.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, got {value.dtype}")


def check_options(
    token_ids: Tensor,
    kept: KeptSets | None,
    log_kept_mass: bool | Tensor,
    group: ProcessGroup | None,
    first_id: int,
    chunk: int | None,
    impl: str,
) -> None:
    """Raise a ValueError if options contradict each other."""
    tokens = token_ids.numel()
    if kept is not None:
        check_kinds(token_ids=token_ids, **{"kept.ids": kept.ids, "kept.offsets": kept.offsets})
    if kept is not None and len(kept) != tokens:
        raise ValueError(
            f"kept sets are of {len(kept)} tokens, token_ids has {tokens}; one set a token, or KeptSets.padded(mask) "
            "for a padded batch"
        )
    if kept is None and log_kept_mass is not False:
        raise ValueError("log_kept_mass needs kept sets; give kept=, or leave it out")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 vocabulary entry, got {chunk}")
    if group is None and first_id != 0:
        raise ValueError(f"first_id is {first_id} without a vocab_group; a whole head begins at 0")
    if group is not None and impl == "reference":
        raise ValueError("impl='reference' needs the whole head: gather it first, or use impl='auto'")
