"""A GPU without a GPU: tensors on a fake `cuda` device, which have shapes, dtypes and a device, but no values.

    with fake_cuda():
        log_prob = torch.zeros(4, 8, device="cuda")
        with counting.Counts() as counts:
            output = …
            backward(output.loss)

Reading a value is an error there, so nothing on the way can wait for the device unnoticed. What a wait would not show
by itself, a copy of the host's memory to the device, is counted (`benchmarks/counting.py`).

torch supports this where there is a GPU. Without one two things are missing, and this file has both: a guard that does
nothing stands in for CUDA's, which a build for CPUs lacks and which ends the process where the driver is missing;
and `backward` walks the graph, because the autograd engine asks for the streams of a device that is not there.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

CPU, CUDA = 0, 1  # c10::DeviceType
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


@contextmanager
def fake_cuda() -> Iterator[None]:
    """A mode in which "cuda" is a device without values, and in which `Tensor.backward` works."""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(_guard_of_a_device_that_is_not_there())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(mock.patch.object(Tensor, "backward", backward))
        stack.enter_context(mock.patch.object(torch._C, "_will_engine_execute_node", lambda node: node is not None))
        yield


@contextmanager
def numbers_are_one() -> Iterator[None]:
    """Within `fake_cuda`: a value that is read is 1, where it would be an error."""
    with _Ones():
        yield


class _Ones(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _guard_of_a_device_that_is_not_there() -> Iterator[None]:
    """Register the CPU's no-op device guard for CUDA, because indexing needs a guard."""
    folder = Path(torch.__file__).parent / "lib"
    (library,) = (path for path in folder.glob("*c10.*") if path.suffix in (".so", ".dylib", ".dll"))
    guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(ctypes.CDLL(str(library)), GUARDS)
    before, guards[CUDA] = guards[CUDA], guards[CPU]
    try:
        yield
    finally:
        guards[CUDA] = before


def backward(loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
    """Run the operations of `loss.backward()` without autograd's engine: call the nodes one by one, in order."""
    root = loss.grad_fn
    assert root is not None, "the loss carries no gradient"
    waiting = _users(root)
    arrived: dict[object, dict[int, Tensor]] = defaultdict(dict)
    arrived[root][0] = torch.ones_like(loss) if gradient is None else gradient
    ready = [root]
    with torch.no_grad():
        while ready:
            node = ready.pop()
            inputs = arrived.pop(node, {})
            if hasattr(node, "variable"):
                leaf = node.variable
                if inputs:
                    leaf.grad = inputs[0] if leaf.grad is None else leaf.grad.add_(inputs[0])
                continue
            width = len(node._input_metadata)  # one for each output of the node, used or not
            call = node if callable(node) else node.apply  # a node of a function in Python is an object with `apply`
            outputs = call(*(inputs.get(i) for i in range(width))) if inputs else ()
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            for i, (user, place) in enumerate(node.next_functions):
                if user is None:
                    continue
                if i < len(outputs) and outputs[i] is not None:
                    held, part = arrived[user], _as_expected(outputs[i], user._input_metadata[place])
                    held[place] = part if place not in held else held[place] + part
                waiting[user] -= 1
                if not waiting[user]:
                    ready.append(user)


def _as_expected(gradient: Tensor, value: Any) -> Tensor:
    """Return the gradient in the shape and dtype of its input; broadcast dimensions are summed."""
    shape = tuple(value.shape)
    gradient = gradient if tuple(gradient.shape) == shape else gradient.sum_to_size(shape)
    return gradient.to(value.dtype)


def _users(root: object) -> dict[object, int]:
    """Count the incoming edges of each node of the graph."""
    count: dict[object, int] = defaultdict(int)
    seen, stack = {root}, [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            count[node] += 1
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return count
