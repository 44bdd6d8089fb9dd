"""Count what torch is asked to do: operations, waits for the device, bytes moved, memory held. The same for any code.

    with Counts() as counts:
        correct(...)
    print(counts.operations, counts.waits, counts.bytes_moved)

Counts are taken where operations are dispatched, so they do not depend on the machine; views and empty memory are not
work. Operations in other threads are not seen: call `torch.set_num_threads(1)` first. What a compiled library does with
the memory that it is given is not seen either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
"""Operations whose result has to reach the host, or whose shape follows from values."""

NO_WORK = {"promote_types", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"}
WRITE_ONLY = {"copy_", "fill_", "zero_", "_to_copy"}


class Counts(TorchDispatchMode):
    """What was asked of torch while this was active.

    Attributes:
        operations: dispatched operations, without views and the making of empty memory: kernels, on a GPU.
        waits: those that need a value on the host. Each one stops a GPU's queue.
        transfers: copies from another device to the host.
        bytes_read: size of every operand, as often as it is read.
        bytes_written: size of every result.
        peak_bytes: the most memory held at a time in tensors made here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = self.transfers = self.bytes_read = self.bytes_written = self.peak_bytes = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes_moved(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, and do it."""
        kwargs = kwargs or {}
        known = {_storage(x) for x in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view:
            self._hold([x for x in _tensors(result) if _storage(x) not in known])
        if func.is_view or name in NO_WORK:
            return result
        self.operations += 1
        self.waits += name in WAITS or _selects_by_mask(name, args)
        self._count_bytes(func, name, args, kwargs, result)
        return result

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
        inputs = [x for x in _tensors((args, kwargs)) if x.device.type != "cpu"]
        self.transfers += bool(inputs) and any(x.device.type == "cpu" for x in _tensors(result))

    def _hold(self, made: list[Tensor]) -> None:
        """Note new memory, forget what is gone, and see whether more is held than ever."""
        for tensor in made:
            storage = tensor.untyped_storage()
            self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {key: (ref, size) for key, (ref, size) in self._held.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._held.values()))


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
