"""Input validation at the boundary: tensors are checked once, before a kernel is chosen.

Torch broadcasts, and a GPU kernel does not check offsets. So every entry point calls these checks first, through
`rollcorr.core.layout.check_layout` if it takes a layout. Each error names the argument, its value and the fix. No
check reads a value on a device.

C and numpy read memory by address. `in_host_memory` and `why_no_address` decide which tensors they may read; torch
handles the rest.

The values of token ids, rows, offsets and masks become addresses, or select the counted tokens. In host memory every
call checks them without a sync, and an error names the position, the value, the limit and the fix. On a device no
value is read. Ids and offsets are clamped there: invalid ones produce invalid numbers, but no access out of bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""What log-probs, losses and logits are made of."""

INTEGERS = frozenset(
    getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
)

_REAL_DTYPES = FLOATING | INTEGERS | {torch.bool}
_PLAIN_TENSOR_TYPES = Tensor, torch.nn.Parameter
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
_get_dispatch_mode = torch._C._get_dispatch_mode  # returns torch's active tracing mode, or None
_is_tracing = torch._C._is_tracing
_transforms_are_active = torch._C._are_functorch_transforms_active
_TRACING_TENSOR_TYPES = ("FakeTensor", "FunctionalTensor")  # torch's substitutes for plain tensors while tracing

# What `why_no_address` returns inside a trace or a transform.
TRACED = "torch is tracing it, or transforming it by torch.func"

NO_LIMIT = 1 << 31
"""End of a range of ids or lengths without a known limit: greater than any int32."""

_NONNEGATIVE_DTYPES = frozenset(getattr(torch, name) for name in ("bool", "uint8", "uint16", "uint32", "uint64"))


def check_tensors(**tensors: object) -> None:
    """Check that the named arguments are dense real tensors on one device. Arguments that are None are skipped.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: it is sparse, nested, distributed, or of an unusable dtype; its memory was freed; or two arguments
            are on different devices.
    """
    first: tuple[str, torch.device] | None = None
    traced = is_traced()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type_name(tensor)}; give torch.as_tensor({name})")
        kind = type(tensor)
        if (
            kind not in _PLAIN_TENSOR_TYPES
            and _overrides_computation(tensor)
            and kind.__name__ not in _TRACING_TENSOR_TYPES
        ):
            raise ValueError(
                f"{name} is a {kind.__name__}, and plain tensors are needed; give its values, e.g. a DTensor's "
                "to_local()"
            )
        if tensor.is_nested or tensor.layout is not torch.strided:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ValueError(
                f"{name} is {layout}, and dense tensors are needed; give {name}.to_dense() or a padded tensor"
            )
        if tensor.dtype not in _REAL_DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; real numbers or bool are needed, e.g. {name}.float()")

        # Torch would read address 0, which kills the process.
        if not traced and not tensor.untyped_storage().nbytes() and tensor.numel():
            raise ValueError(f"the memory of {name} was freed (a sharded parameter?); gather it before the call")
        device = tensor.device
        if first is None:
            first = name, device
        elif device != first[1]:
            raise ValueError(
                f"{first[0]} is on {first[1]} and {name} is on {device}; move them to one device, e.g. "
                f"{name}.to({first[0]}.device)"
            )


def type_name(value: object) -> str:
    """Return the type name of a value for error messages: list, numpy.ndarray."""
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def check_floating(**tensors: Tensor | None) -> None:
    """Check that the named tensors are bfloat16, float16, float32 or float64. None is skipped.

    Raises:
        ValueError: names the first tensor of a different dtype.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATING:
            raise ValueError(
                f"{name} must be floating-point, got {tensor.dtype}; give bfloat16, float16, float32 or float64, e.g. "
                f"{name}.float()"
            )


def check_integers(**tensors: Tensor | None) -> None:
    """Check that the named tensors contain integers. None is skipped.

    Raises:
        ValueError: names the first tensor of a different dtype.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in INTEGERS:
            raise ValueError(f"{name} must hold integers, got {tensor.dtype}; convert it, e.g. {name}.long()")


def check_shape(name: str, tensor: Tensor, shape: torch.Size | tuple[int, ...], meaning: str) -> None:
    """Check that a tensor has exactly this shape; `meaning` describes it in the error, e.g. "one per sequence".

    Raises:
        ValueError: names both shapes.
    """
    if tensor.shape != shape:
        raise ValueError(f"{name} {tuple(tensor.shape)} must be {meaning}, {tuple(shape)}; nothing is broadcast")


def check_positive(name: str, value: float, hint: str = "") -> None:
    """Check that a number is finite and above 0.

    Args:
        name: argument that the error names.
        value: its value.
        hint: end of the error message.

    Raises:
        ValueError: the number is not finite or not above 0.
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be finite and > 0, got {value}{hint}")


def in_transform() -> bool:
    """Return whether a `torch.func` transform (vmap, grad, jvp, functionalize) runs: its tensors have no memory."""
    return not torch.compiler.is_compiling() and _transforms_are_active()


def is_traced() -> bool:
    """Return whether torch is recording or transforming operations, so every operation must go through torch."""
    return (
        torch.compiler.is_compiling()
        or _is_tracing()
        or _transforms_are_active()
        or _get_dispatch_mode(_FAKE) is not None
        or _get_dispatch_mode(_PROXY) is not None
    )


def in_host_memory(*tensors: Tensor) -> bool:
    """Return whether all tensors' values can be read without a sync: plain CPU tensors, outside of any trace."""
    return not is_traced() and all(type(x) in _PLAIN_TENSOR_TYPES and x.is_cpu for x in tensors)


def why_no_address(**tensors: Tensor) -> str | None:
    """Return why a kernel must not read these tensors by their addresses, or None if it may."""
    if is_traced():
        return TRACED
    for name, tensor in tensors.items():
        if type(tensor) not in _PLAIN_TENSOR_TYPES:
            return f"{name} is a {type(tensor).__name__}, whose memory it cannot read"
        if tensor.is_neg():
            return f"{name} is a view of the negative of its memory; call resolve_neg()"
        if not tensor.data_ptr() and tensor.numel() and not tensor.is_meta:
            return f"{name} has no memory; call clone()"
    return None


def plain(tensor: Tensor) -> Tensor:
    """Return the same tensor without a subclass that only adds methods to it."""
    if type(tensor) in _PLAIN_TENSOR_TYPES or _overrides_computation(tensor):
        return tensor
    return tensor.as_subclass(Tensor)


def _overrides_computation(tensor: Tensor) -> bool:
    """Return whether a subclass overrides computation, rather than only adding methods."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def usable_ids(name: str, ids: Tensor, *ranges: tuple[int, int], mask: Tensor | None = None) -> Tensor:
    """Return ids as int64, each within one of the ranges.

    Args:
        name: the argument's name, for errors.
        ids: integers of any shape.
        ranges: first id and the one after the last: (0, V), or one range for each slice of a vocabulary.
        mask: same shape, bool; where it is false an id may have any value, for instance −100. Defaults to all true.

    Returns:
        The shape of `ids`. Ids outside the mask are clamped; on a device, all ids.

    Raises:
        ValueError: the ids are not integers, or an id in host memory is outside all ranges.
    """
    ids = plain(ids)
    check_integers(**{name: ids})
    least, most = min(first for first, _ in ranges), max(stop for _, stop in ranges) - 1
    if in_host_memory(ids):
        # Use numpy arrays: on a small batch one torch operation is slower than all of these.
        values = ids.numpy()
        outside: Any = True
        for first, stop in ranges:
            outside &= (values < first) | (values >= stop)
        if mask is not None and outside.any():
            outside &= truth(mask).numpy()
        if outside.any():
            where, value = _first_bad(outside, values)
            slices = "" if len(ranges) == 1 else f", and in a rank's slice: {', '.join(map(str, sorted(ranges)))}"
            raise ValueError(
                f"{name} contains {value} at {where}, and must be from {least} to {most}{slices}; correct it, or leave "
                "the token out, by mask= where there is one"
            )
        if mask is None:
            return ids.to(torch.int64)
    return ids.to(torch.int64).clamp(least, most)


def truth(mask: Tensor, name: str = "mask") -> Tensor:
    """Return a mask as bool: true where it is not 0, with bytes 0 and 1 (torch keeps other bytes of a bool).

    Raises:
        ValueError: as `check_mask_values`.
    """
    check_mask_values(mask, name)
    return mask != 0


def check_mask_values(mask: Tensor, name: str = "mask") -> None:
    """Check that a mask in host memory contains no negative or non-finite value, such as labels or log-probs.

    Raises:
        ValueError: names the first such value.
    """
    if mask.dtype in _NONNEGATIVE_DTYPES or not mask.numel() or not in_host_memory(mask):
        return
    least, most = mask.detach().aminmax()
    if least >= 0 and most < torch.inf:
        return
    values = mask.double().numpy(force=True)
    where, value = _first_bad(~((values >= 0) & (values < torch.inf)), values)
    raise ValueError(
        f"{name} contains {value:g} at {where}, and must be 0 or a positive finite number, read as != 0: it may be "
        "labels (give labels != -100) or log-probs. The order is correct(train_log_prob, rollout_log_prob, "
        "response_mask)"
    )


def check_count(values: Tensor, mask: Tensor, name: str) -> None:
    """Check that there is one value for each true entry of a bool mask, where both are in host memory.

    Raises:
        ValueError: names both numbers.
    """
    if in_host_memory(values, mask) and (count := int(mask.sum())) != len(values):
        raise ValueError(f"{name} has {count} true entries for {len(values)} values; give one value for each of them")


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int, name: str = "cu_seqlens", of: str = "tokens") -> None:
    """Check the values of `cu_seqlens`: start at 0, never decrease, end at the token count.

    Reads values: free on the CPU, a sync on a device. Check device tensors only in loaders or on request.

    Args:
        cu_seqlens: (B + 1,) token offsets: the first token of each sequence, then the number of tokens.
        tokens: N, the number of packed tokens.
        name: the argument's name, for errors.
        of: noun for the counted items, for errors.

    Raises:
        ValueError: names the first invalid entry.
    """
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel():
        raise ValueError(f"{name} must be (B + 1,) with at least one entry, got {tuple(cu_seqlens.shape)}")
    offsets = cu_seqlens.numpy(force=True)
    falls = offsets[1:] < offsets[:-1]
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {offsets[0]}")
    if falls.any():
        i = int(falls.argmax())
        raise ValueError(f"{name} must not fall, but entry {i + 1} is {offsets[i + 1]} after {offsets[i]}")
    if offsets[-1] != tokens:
        raise ValueError(f"{name} must end at the number of {of}, {tokens}, got {offsets[-1]}")


def bounded_offsets(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return offsets that keep a kernel within the data, even for invalid input: (B + 1,) int64.

    In host memory only the dtype changes: `check_cu_seqlens` checks the values there. On a device, offsets are clamped
    to the data and made to rise from 0 to N, which leaves valid offsets unchanged.
    """
    if in_host_memory(cu_seqlens):
        return cu_seqlens.to(torch.int64)
    bounded = cu_seqlens.to(torch.int64).clamp(0, tokens).cummax(0).values
    bounded[-1:].fill_(tokens)
    bounded[:1].zero_()  # last, because a single entry is both first and last
    return bounded


def _first_bad(bad: Any, values: Any) -> tuple[str, float]:  # noqa: ANN401 (numpy arrays, which core does not import)
    """Return the position of the first true entry, and the value there."""
    if not bad.ndim:
        return "its only entry", values.item()
    place = tuple(int(axis[0]) for axis in bad.nonzero())
    where = f"index {place[0] if len(place) == 1 else place}"
    return f"row {place[0]}, column {place[1]}" if len(place) == 2 else where, values[place]
