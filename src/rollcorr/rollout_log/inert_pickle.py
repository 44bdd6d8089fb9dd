"""Load untrusted pickles, and files of `torch.save`, without importing or executing code.

A pickle is a program. `load_pickle` builds only data: numbers, texts, bytes, lists, tuples and dictionaries. A name
becomes a `Name`, a call becomes a `Call`, and operations that would modify an object are dropped.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rollcorr.config.checks import in_one_line
from rollcorr.rollout_log.errors import FileLimits, RolloutLogError, limit_error, log_error


class DamagedPickleError(ValueError):
    """Error for a truncated or invalid pickle."""


@dataclass(frozen=True)
class Name:
    """Name of a class or function in a pickle."""

    module: str
    name: str


@dataclass(frozen=True)
class Reference:
    """Persistent id of an object outside the pickle: torch stores the storages of tensors separately."""

    key: object


@dataclass(eq=False)
class Call:
    """Object that a pickle would construct: call `function` with `arguments`, then set its `state`."""

    function: object
    arguments: object
    state: object = None

    def _ignore_items(self, *items: object) -> None:
        """Drop items of an object that subclasses a list or dictionary: no reader uses them."""

    append = extend = add = __setitem__ = _ignore_items


def load_pickle(data: bytes, *, limits: FileLimits, file: object) -> object:
    """Load a pickle as plain data.

    Raises:
        DamagedPickleError: the pickle is truncated or invalid.
        RolloutLogError: the pickle contains more objects than the limit.
    """
    reader = _InertUnpickler(io.BytesIO(data))
    reader.left, reader.limit, reader.file = limits.pickle_objects, limits.pickle_objects, file
    try:
        return reader.load()
    except RolloutLogError:
        raise
    except _DAMAGE_ERRORS as error:
        raise DamagedPickleError(f"{type(error).__name__}: {in_one_line(error, characters=200)}") from error
    finally:
        # A stored error would keep the loaded data alive through its traceback.
        for held in ("stack", "metastack", "memo"):
            getattr(reader, held, []).clear()


# Exceptions of the unpickler for invalid bytes.
_DAMAGE_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    struct.error,
)

# Opcodes that need objects outside the pickle, that allocate memory before they read, or that are obsolete.
_REFUSED_OPCODES = b"".join(
    (
        pickle.EXT1,
        pickle.EXT2,
        pickle.EXT4,
        pickle.NEXT_BUFFER,
        pickle.UNICODE,
        pickle.READONLY_BUFFER,
        pickle.BYTEARRAY8,
    )
)
# Memory of an object, in units of a number in a list (40 bytes). An entry of the memo also counts.
_CONTAINER, _MEMO = 4, 3
_TEXT_BYTES = 8
_OPCODE_COSTS = {
    **dict.fromkeys(pickle.EMPTY_LIST + pickle.EMPTY_DICT + pickle.EMPTY_SET + pickle.LIST + pickle.DICT, _CONTAINER),
    **dict.fromkeys(pickle.FROZENSET + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3, _CONTAINER),
    **dict.fromkeys(pickle.GLOBAL + pickle.STACK_GLOBAL + pickle.REDUCE + pickle.INST + pickle.OBJ, _CONTAINER),
    **dict.fromkeys(pickle.NEWOBJ + pickle.NEWOBJ_EX + pickle.PERSID + pickle.BINPERSID + pickle.MARK, _CONTAINER),
    **dict.fromkeys(pickle.PUT + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE, _MEMO),
    **dict.fromkeys(pickle.STOP, 0),
}


class _InertUnpickler(pickle._Unpickler):
    """Pure-Python unpickler of the standard library, with every operation that runs code replaced."""

    left: int
    limit: int
    file: object
    stack: list[Any]
    read: Callable[[int], bytes]

    def find_class(self, module: str, name: str) -> object:
        return Name(str(module), str(name))

    def persistent_load(self, pid: object) -> object:
        return Reference(pid)

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = Call(self.stack[-1], arguments)

    def _newobj_ex(self) -> None:
        self.stack.pop()
        self._reduce()

    def charge(self, cost: int) -> None:
        """Count the memory of an object, and raise above the limit."""
        self.left -= cost
        if self.left < 0:
            raise limit_error(
                "pickle_objects", f"more than {self.limit:,} objects in the pickle", self.limit, file=self.file
            )

    def _text(self, size_form: str = "<I") -> None:
        (size,) = struct.unpack(size_form, self.read(struct.calcsize(size_form)))
        # One wide character makes every character four bytes long, so charge a text before decoding it.
        self.charge(size // _TEXT_BYTES)
        self.stack.append(str(self.read(size), "utf-8", "surrogatepass"))

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state

    def _instantiate(self, klass: object, args: object) -> None:
        self.stack.append(Call(klass, args))


def _with_cost(step: Callable[[Any], None], cost: int) -> Callable[[Any], None]:
    def counted(reader: _InertUnpickler) -> None:
        reader.charge(cost)
        step(reader)

    return counted


_INERT_HANDLERS: Mapping[int, Callable[[Any], None]] = {
    pickle.REDUCE[0]: _InertUnpickler._reduce,
    pickle.NEWOBJ[0]: _InertUnpickler._reduce,
    pickle.NEWOBJ_EX[0]: _InertUnpickler._newobj_ex,
    pickle.BUILD[0]: _InertUnpickler._build,
    pickle.BINUNICODE[0]: _InertUnpickler._text,
    pickle.BINUNICODE8[0]: lambda reader: reader._text("<Q"),
}
_InertUnpickler.dispatch = {
    code: _with_cost(_INERT_HANDLERS.get(code, step), _OPCODE_COSTS.get(code, 1))
    for code, step in pickle._Unpickler.dispatch.items()
    if code not in _REFUSED_OPCODES
}


_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}


class TorchArchive:
    """File of `torch.save` with its `content` as plain data. `array` converts a `Call` to the values of its tensor.

    Args:
        file: a path, or the bytes in a file object.
        name: the file, for messages.
        limits: the size limits of a file.

    Raises:
        DamagedPickleError: the file has a different format.
        RolloutLogError: its pickle exceeds a limit.
    """

    def __init__(self, file: Path | BinaryIO, *, name: object, limits: FileLimits) -> None:
        self._name, self._limits = name, limits
        try:
            self._zip = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise DamagedPickleError(f"not a file of torch.save: {error}") from error

        # torch never compresses; a compressed entry could expand to gigabytes.
        entries = {entry.filename: entry for entry in self._zip.infolist()}
        pickles = [entry for path, entry in entries.items() if path.endswith("/data.pkl")]
        if len(pickles) != 1 or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise DamagedPickleError("not a file of torch.save: its archive has another form")
        self._entries, self._root = entries, pickles[0].filename.removesuffix("data.pkl")
        check_pickle_bytes(pickles[0].file_size, file=name, limits=limits)
        self.content = load_pickle(self._read_entry(pickles[0].filename), limits=limits, file=name)

    def array(self, tensor: object, *, limit: str = "row_tokens") -> np.ndarray | None:
        """Return the values of a tensor of this file, or `None` for any other object.

        `limit` is the attribute of `FileLimits` that bounds their number; defaults to `row_tokens`.

        Raises:
            DamagedPickleError: the tensor does not fit its storage, or is not contiguous.
            RolloutLogError: the tensor has more values than the limit.
        """
        if not isinstance(tensor, Call) or tensor.function != Name("torch._utils", "_rebuild_tensor_v2"):
            return None
        match tensor.arguments:
            case (
                Reference(("storage", Name("torch", storage), str() as key, *_)),
                int() as offset,
                tuple() as shape,
                tuple() as stride,
                *_,
            ) if storage in _DTYPES and all(type(size) is int and size >= 0 for size in (offset, *shape, *stride)):
                dtype = _DTYPES[storage]
            case _:
                raise DamagedPickleError("a tensor of an unknown form")
        # Check the size before any value is read.
        count = math.prod(shape)
        most = getattr(self._limits, limit)
        if count > most:
            raise limit_error(limit, f"a tensor of {count:,} values", most, file=self._name)
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        if len(stride) != len(shape) or any(
            size != 1 and step != expected for size, step, expected in zip(shape, stride, steps, strict=True)
        ):
            raise DamagedPickleError("a tensor that is not contiguous")

        size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        data = self._read_entry(f"{self._root}data/{key}", first=offset * size, count=count * size)
        return decode(data, dtype).reshape(shape)

    def _read_entry(self, path: str, *, first: int = 0, count: int | None = None) -> bytes:
        entry = self._entries.get(path)
        if entry is None:
            raise DamagedPickleError(f"the archive has no {path}")
        wanted = entry.file_size if count is None else count
        # zipfile verifies the checksum only of an entry that is read completely.
        try:
            with self._zip.open(entry) as stream:
                if first:
                    stream.seek(first)
                data = stream.read(wanted)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
            raise DamagedPickleError(f"{path}: {error}") from error
        if len(data) != wanted:
            raise DamagedPickleError(f"{path} has fewer bytes than its tensor")
        return data


def decode(data: bytes, dtype: str) -> np.ndarray:
    """Decode bytes as numbers; bfloat16 becomes float32.

    Raises:
        ValueError: the length of the bytes is no multiple of a value's size.
    """
    if dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
        return wide.view("<f4")
    return np.frombuffer(data, dtype)


def check_pickle_bytes(size: int, *, file: object, limits: FileLimits) -> None:
    """Check the size of a pickle before it is read.

    Raises:
        RolloutLogError: the size exceeds the limit.
    """
    if size > limits.pickle_bytes:
        raise limit_error("pickle_bytes", f"a pickle of {size:,} bytes", limits.pickle_bytes, file=file)


def unreadable(error: DamagedPickleError, path: Path) -> Exception:
    """Build the error for a damaged file."""
    return log_error(
        "unreadable",
        str(error),
        fix="was it cut off while it was copied? Files older than torch 1.6 must be saved again",
        file=path,
    )
