"""The boundary: what may enter as a tensor, checked once before any kernel is chosen.

Torch broadcasts, and a GPU kernel does not check offsets. So every entry point calls these checks first, through
`rollcorr.core.layout.check_layout` where there is a layout. Each error names the argument, its value and the fix. No
check reads a value on a device.

C and numpy read memory by its address. `in_host_memory` and `why_no_address` say which tensors they may read; all
others stay with torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""What log-probs, losses and logits are made of."""

INTEGERS = frozenset(
    getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
)

_REAL = FLOATING | INTEGERS | {torch.bool}
_PLAIN = Tensor, torch.nn.Parameter
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
_active_mode = torch._C._get_dispatch_mode  # of torch's tracing, or None
_STAND_INS = ("FakeTensor", "FunctionalTensor")  # torch's own, for plain tensors that it traces


def check_tensors(**tensors: object) -> None:
    """Check that the named arguments are dense real tensors on one device. An argument that is None is not checked.

    Raises:
        TypeError: an argument is no tensor.
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
        if kind not in _PLAIN and _dispatches(tensor) and kind.__name__ not in _STAND_INS:
            raise ValueError(
                f"{name} is a {kind.__name__}, and plain tensors are needed; give its values, e.g. a DTensor's "
                "to_local()"
            )
        if tensor.is_nested or tensor.layout is not torch.strided:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ValueError(
                f"{name} is {layout}, and dense tensors are needed; give {name}.to_dense() or a padded tensor"
            )
        if tensor.dtype not in _REAL:
            raise ValueError(f"{name} is {tensor.dtype}; real numbers or bool are needed, e.g. {name}.float()")

        # Torch would read address 0, which ends the process.
        if not traced and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise ValueError(f"the memory of {name} was freed (a sharded parameter?); gather it before the call")
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise ValueError(
                f"{first[0]} is on {first[1]} and {name} is on {tensor.device}; move them to one device, e.g. "
                f"{name}.to({first[0]}.device)"
            )


def type_name(value: object) -> str:
    """The type of a value as errors name it: list, numpy.ndarray."""
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def check_floating(**tensors: Tensor | None) -> None:
    """Check that the named tensors are bfloat16, float16, float32 or float64. None is not checked.

    Raises:
        ValueError: names the first that is not.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATING:
            raise ValueError(
                f"{name} must be floating-point, got {tensor.dtype}; give bfloat16, float16, float32 or float64, e.g. "
                f"{name}.float()"
            )


def check_integers(**tensors: Tensor | None) -> None:
    """Check that the named tensors hold integers. None is not checked.

    Raises:
        ValueError: names the first that does not.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in INTEGERS:
            raise ValueError(f"{name} must hold integers, got {tensor.dtype}; convert it, e.g. {name}.long()")


def check_shape(name: str, tensor: Tensor, shape: torch.Size | tuple[int, ...], meaning: str) -> None:
    """Check that a tensor has exactly this shape; `meaning` says what it is, e.g. "one per sequence".

    Raises:
        ValueError: names both shapes.
    """
    if tensor.shape != shape:
        raise ValueError(f"{name} {tuple(tensor.shape)} must be {meaning}, {tuple(shape)}; nothing is broadcast")


def check_positive(name: str, value: float) -> None:
    """Check that a number is finite and above 0.

    Raises:
        ValueError: it is not.
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be finite and > 0, got {value}")


def in_transform() -> bool:
    """Return whether a transform of `torch.func` (vmap, grad, jvp, functionalize) runs: its tensors have no memory."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Return whether torch records or transforms operations, so that it must see each of them."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    modes = _active_mode(_FAKE), _active_mode(_PROXY)
    return torch._C._are_functorch_transforms_active() or modes != (None, None)


def in_host_memory(*tensors: Tensor) -> bool:
    """Return whether the values of all tensors can be read without a wait: plain CPU tensors, outside of any trace."""
    return not is_traced() and all(type(x) in _PLAIN and x.is_cpu for x in tensors)


def why_no_address(**tensors: Tensor) -> str | None:
    """Return why a kernel must not read these tensors by their addresses, or None."""
    if is_traced():
        return "torch is tracing it, or transforming it by torch.func"
    for name, tensor in tensors.items():
        if type(tensor) not in _PLAIN:
            return f"{name} is a {type(tensor).__name__}, whose memory it cannot read"
        if tensor.is_neg():
            return f"{name} is a view of the negative of its memory; call resolve_neg()"
        if tensor.numel() and not tensor.data_ptr() and not tensor.is_meta:
            return f"{name} has no memory; call clone()"
    return None


def plain(tensor: Tensor) -> Tensor:
    """Return the same tensor without a subclass that only adds methods to it."""
    if type(tensor) in _PLAIN or _dispatches(tensor):
        return tensor
    return tensor.as_subclass(Tensor)


def _dispatches(tensor: Tensor) -> bool:
    """Return whether a subclass computes in its own way, rather than only adding methods."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
