"""Count what torch is asked to do: operations, waits for the device, bytes moved, memory held. The same for any code.

    with Counts() as counts:
        correct(...)
    print(counts.operations, counts.waits, counts.uploads, counts.transfers, counts.bytes_moved)

The benchmarks and the tests share this counter (`tests/fake_cuda.py` counts what a GPU would be asked to do).

Counts are taken where operations are dispatched, so they do not depend on the machine; views and empty memory are not
work. Operations in other threads are not seen: call `torch.set_num_threads(1)` first. What a compiled library does with
the memory that it is given is not seen either.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
"""Operations whose result has to reach the host, or whose shape follows from values."""

EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_WORK = EMPTY | {"promote_types", "detach", "alias", "device", "lift_fresh"}
WRITE_ONLY = {"copy_", "fill_", "zero_", "_to_copy"}

_INSIDE = str(Path(torch.__file__).parent) + os.sep, __file__

MOVED = {"_to_copy", "copy_", "index", "index_put_", "_index_put_impl_"}
"""Operations that move even a single number of the host to the device before they start. Others take it as it is."""


class Counts(TorchDispatchMode):
    """What was asked of torch while this was active.

    Attributes:
        operations: dispatched operations, without views and the making of empty memory: kernels, on a GPU.
        allocations: how often new memory was needed.
        waits: those that need a value on the host. Each one stops a GPU's queue.
        transfers: copies from another device to the host. Each one waits, too.
        uploads: copies of the host's ordinary memory to another device. Each one waits until the copy is done.
        culprits: for each wait, transfer and upload, its kind, the operation, and the line that asked for it.
        bytes_read: size of every operand, as often as it is read.
        bytes_written: size of every result.
        peak_bytes: the most memory held at a time in tensors made here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.allocations = self.bytes_read = self.bytes_written = self.peak_bytes = 0
        self.waits = self.transfers = self.uploads = 0
        self.culprits: list[str] = []
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._noted = 0  # bytes in `_held`, where some may be gone

    @property
    def bytes_moved(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, and do it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = _tensors((args, kwargs))
        known = {_storage(x) for x in given}
        if name in WAITS or _selects_by_mask(name, args):
            # Counted before it is done: without a device there may be no value.
            self.waits += 1
            self._blame("wait", name, given)

        result = func(*args, **kwargs)
        if not func.is_view:
            self._hold([x for x in _tensors(result) if _storage(x) not in known])
        if func.is_view or name in NO_WORK:
            return result
        self.operations += 1
        self._count_copies(name, given, _tensors(result))
        self._count_bytes(func, name, args, kwargs, result)
        return result

    def _count_copies(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        """Count what crosses between the host and another device."""
        on_host = [x for x in given if x.device.type == "cpu"]
        on_device = len(on_host) < len(given)
        if on_device and any(x.device.type == "cpu" for x in made):
            self.transfers += 1
            self._blame("transfer", name, given)

        # A single number of the host is an argument of most kernels. More than one has to be copied for any of them.
        moved = [x for x in on_host if x.dim() or name in MOVED]
        if moved and any(x.device.type != "cpu" for x in made):
            self.uploads += 1
            self._blame("upload", name, made)

    def _blame(self, kind: str, name: str, tensors: list[Tensor]) -> None:
        """Note the device, and the innermost line outside of torch and of this file."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
            frame = frame.f_back
        where = "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        device = next((x.device.type for x in tensors if x.device.type != "cpu"), "cpu")
        self.culprits.append(f"{kind}: {name} ({device}){where}")

    def _count_bytes(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        written = {id(x) for x in _tensors(result)}
        for i, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name, args[i] if i < len(args) else None)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if not (writes and (argument.is_out or name in WRITE_ONLY)):
                self.bytes_read += sum(map(_size, _tensors(given)))
            if writes:
                self.bytes_written += sum(map(_size, _tensors(given)))
                written -= {id(x) for x in _tensors(given)}
        self.bytes_written += sum(_size(x) for x in _tensors(result) if id(x) in written)

    def _hold(self, made: list[Tensor]) -> None:
        """Note new memory, and see whether more is held than ever."""
        self.allocations += len({_storage(tensor) for tensor in made})
        for tensor in made:
            storage = tensor.untyped_storage()
            self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._noted += storage.nbytes()

        # What is gone is looked for only where a new most is possible.
        if self._noted > self.peak_bytes:
            self._held = {key: (ref, size) for key, (ref, size) in self._held.items() if not ref.expired()}
            self._noted = sum(size for _, size in self._held.values())
            self.peak_bytes = max(self.peak_bytes, self._noted)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    """Bytes that differ: a dimension that is repeated without memory counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def _selects_by_mask(name: str, args: Any) -> bool:
    """Indexing by a bool mask: how much is selected follows from values."""
    return name in ("index", "index_put_") and any(x.dtype == torch.bool for x in _tensors(args[1]))
