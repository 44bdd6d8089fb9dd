"""The boundary: what may enter as a tensor, checked once before any kernel is chosen.

A compiled kernel takes an address, a GPU kernel does not check offsets, and torch broadcasts. So every entry point
calls these checks first, through `rollcorr.core.layout.check_layout` where there is a layout. A tensor that cannot be
used is refused in one sentence that names the argument, what it is, and what to give instead. Nothing here reads a
value on a device. Values are read only where they lie in plain memory of the host (`in_host_memory`), which waits for
nothing.
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

_REAL = FLOATING | INTEGERS | {torch.bool}
_PLAIN = Tensor, torch.nn.Parameter
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
_active_mode = torch._C._get_dispatch_mode  # of torch's tracing, or None
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by a transform of torch.func
_TRACED = ("FakeTensor", "FunctionalTensor")  # torch's own, which stand for plain tensors while it traces


def check_tensors(**tensors: object) -> bool:
    """Check that the named arguments are dense real tensors with their memory in place, all on one device.

    Subclasses that only add methods are allowed, and so are the tensors of `torch.func`, `torch.compile` and
    `FakeTensorMode`. An argument that is None is not checked.

    Returns:
        Whether all are ordinary tensors (`is_ordinary`), outside of any trace. Then other checks have little to do.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: it is sparse, nested, distributed, or of an unusable dtype; its memory was freed; or two arguments
            are on different devices.
    """
    first: tuple[str, torch.device] | None = None
    compiling = torch.compiler.is_compiling()
    fake_mode = None if compiling else _active_mode(_FAKE)
    ordinary = not compiling and fake_mode is None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type_name(tensor)}; give torch.as_tensor({name})")

        # Nearly every tensor of nearly every call is an ordinary one, for which one question is enough.
        if not (ordinary and is_ordinary(tensor)):
            ordinary = False
            _check_kind(name, tensor)

            # While torch.compile traces, no tensor has memory, and all of them are fake.
            if not compiling:
                _check_fake(name, tensor, fake_mode)
                _check_memory(name, tensor)

        device = tensor.device
        if first is None:
            first = name, device
        elif device != first[1]:
            raise _different_devices(first, (name, device))
    return ordinary


def check_one_device(**tensors: Tensor) -> None:
    """Check that the named tensors are on one device; for tensors of any kind, such as a sharded one.

    Raises:
        ValueError: names the first two that are not.
    """
    (first, device), *others = ((name, tensor.device) for name, tensor in tensors.items())
    for name, other in others:
        if other != device:
            raise _different_devices((first, device), (name, other))


def _different_devices(one: tuple[str, torch.device], other: tuple[str, torch.device]) -> ValueError:
    return ValueError(
        f"{one[0]} is on {one[1]} and {other[0]} is on {other[1]}; move them to one device, e.g. "
        f"{other[0]}.to({one[0]}.device)"
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


def is_transformed(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jvp, functionalize) holds this tensor: it has no memory.

    torch.compile does not ask: what it traces has no memory in any case.
    """
    if torch.compiler.is_compiling():
        return False
    return _is_wrapped(tensor)


def in_host_memory(*tensors: Tensor) -> bool:
    """Whether the values of all of these can be read without a wait: plain CPU tensors, outside of any trace.

    Inside a transform of `torch.func` whatever is computed from them, were it a copy, has no memory.
    """
    if why_no_kernel() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(why_no_address(x) is None and x.is_cpu for x in tensors)


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor can say where its memory is; it says 0 where there is none: on meta, or without elements."""
    return type(tensor) in _PLAIN and not _is_wrapped(tensor)


def why_no_address(tensor: Tensor) -> str | None:
    """Why a kernel that reads memory by its address must not have this tensor, or None. As the end of "it is …"."""
    if type(tensor) not in _PLAIN:
        return f"a {type(tensor).__name__}, whose memory it cannot read"
    if _is_wrapped(tensor):
        return "inside a transform of torch.func, where it has no memory"
    if tensor.is_neg():
        return "a view of the negative of its memory; call resolve_neg()"
    if tensor._is_zerotensor():
        return "a tensor of zeros without memory; call clone()"
    return None


def why_no_kernel() -> str | None:
    """Why no kernel that torch does not see may run now, or None: what it computes would be missing from a trace."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if is_jit_tracing():
        return "torch.jit.trace is tracing"
    if _active_mode(_FAKE) is not None or _active_mode(_PROXY) is not None:
        return "torch is tracing with fake tensors or proxies"
    return None


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` records what is done."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def plain(tensor: Tensor) -> Tensor:
    """The same tensor without a subclass that only adds methods to it."""
    if type(tensor) in _PLAIN or _dispatches(tensor):
        return tensor
    return tensor.as_subclass(Tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a subclass holds the values in its own way, such as a DTensor. torch's own, of its tracing, do not."""
    return _dispatches(tensor) and type(tensor).__name__ not in _TRACED


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor passes all the checks below, outside of a trace: dense, of real numbers, with memory of its own.

    Some that pass them are not ordinary: those of a subclass, without elements, or on a device without memory.
    """
    return (
        type(tensor) is Tensor
        and tensor.dtype in _REAL
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not _is_wrapped(tensor)
        and tensor.data_ptr() != 0
    )


def _check_kind(name: str, tensor: Tensor) -> None:
    kind = type(tensor).__name__
    if type(tensor) is not Tensor and torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name} is an {kind}, which has no shape yet; run its module once first")
    if _dispatches(tensor) and kind not in _TRACED:
        raise ValueError(
            f"{name} is a {kind}, and plain tensors are needed; give its values, e.g. a DTensor's to_local()"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"{name} is {layout}, and dense tensors are needed; give {name}.to_dense() or a padded tensor")
    if tensor.dtype not in _REAL:
        raise ValueError(f"{name} is {tensor.dtype}; real numbers or bool are needed, e.g. {name}.float()")


def _check_memory(name: str, tensor: Tensor) -> None:
    """A sharded parameter has no memory while it is not gathered; the address then is 0."""
    if _dispatches(tensor) or tensor.is_meta or is_transformed(tensor):
        return
    if tensor.data_ptr() == 0 and tensor.numel() and not tensor._is_zerotensor():
        raise ValueError(f"the memory of {name} was freed (a sharded parameter?); gather it before the call")


def _check_fake(name: str, tensor: Tensor, mode: Any) -> None:  # noqa: ANN401 (torch has no public type for a mode)
    """Fake tensors stay in their mode, and others out of it: what is made on the way is fake there, and real here."""
    is_fake = type(tensor) is not Tensor and type(tensor).__name__ == "FakeTensor"
    if is_fake and mode is None:
        raise ValueError(f"{name} is a FakeTensor outside of a FakeTensorMode; make the call inside the mode")
    if mode is not None and not is_fake and not mode.allow_non_fake_inputs and not is_transformed(tensor):
        raise ValueError(f"{name} is a real tensor inside a FakeTensorMode; convert it with mode.from_tensor({name})")


def _dispatches(tensor: Tensor) -> bool:
    """Whether a subclass computes in its own way, rather than only adding methods."""
    kind = type(tensor)
    if kind in _PLAIN:
        return False
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
