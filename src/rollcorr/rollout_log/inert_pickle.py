"""Pickles of strangers as plain data: nothing that a pickle names is imported, called or changed.

A pickle is a program. `load_pickle` follows it only as far as data goes: numbers, texts, bytes, lists, tuples and
dictionaries. A name becomes a `Name`, a call of something becomes a `Call`, and what would change an object is dropped.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rollcorr.config.checks import in_one_line
from rollcorr.rollout_log.file_limits import FileLimits, limit_error


class DamagedPickleError(ValueError):
    """A pickle that breaks off, or that is none."""


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Reference:
    """What a pickle expects to be elsewhere: torch keeps the storages of tensors beside it."""

    key: object


@dataclass(eq=False)
class Call:
    """An object that a pickle would make: by calling `function` with `arguments`, and then setting its `state`."""

    function: object
    arguments: object
    state: object = None

    # Items of a list or dictionary of a class of its own; nobody asks for them.
    def append(self, item: object) -> None:
        """Drop an item."""

    def extend(self, items: object) -> None:
        """Drop items."""

    def add(self, item: object) -> None:
        """Drop an item."""

    def __setitem__(self, key: object, value: object) -> None:
        """Drop an item."""


def load_pickle(data: bytes, *, limits: FileLimits, file: object) -> object:
    """The content of a pickle, as plain data.

    Raises:
        DamagedPickleError: it breaks off, or it is none.
        RolloutLogError: it has more objects than the limit.
    """
    reader = _InertUnpickler(io.BytesIO(data))
    reader.left = limits.pickle_objects
    try:
        return reader.load()
    except _TooManyObjectsError:
        found = f"more than {limits.pickle_objects:,} objects in the pickle"
        raise limit_error("pickle_objects", found, limits.pickle_objects, file=file) from None
    except _DAMAGE as error:
        raise DamagedPickleError(f"{type(error).__name__}: {in_one_line(error, characters=200)}") from error
    finally:
        # An error that is kept would keep what was read, through its traceback.
        for held in ("stack", "metastack", "memo"):
            getattr(reader, held, []).clear()


class _TooManyObjectsError(Exception):
    pass


# What the reading of bytes that are no pickle comes to.
_DAMAGE = (
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

# Opcodes that need something outside the pickle, that reserve memory before they read, or that nobody writes any more.
_REFUSED = (
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.NEXT_BUFFER,
    pickle.UNICODE,
    pickle.READONLY_BUFFER,
    pickle.BYTEARRAY8,
)
# What an object takes, in units of a number in a list (40 bytes). An entry of the memo counts too.
_CONTAINER, _MEMO = 4, 3
_TEXT_BYTES = 8
_COSTS = {
    **dict.fromkeys((pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.LIST, pickle.DICT), _CONTAINER),
    **dict.fromkeys((pickle.FROZENSET, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3), _CONTAINER),
    **dict.fromkeys((pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.INST, pickle.OBJ), _CONTAINER),
    **dict.fromkeys((pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.PERSID, pickle.BINPERSID, pickle.MARK), _CONTAINER),
    **dict.fromkeys((pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE), _MEMO),
}


class _InertUnpickler(pickle._Unpickler):
    """The unpickler of the standard library in Python, with every step that does something replaced."""

    left: int = 0
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

    def _text(self) -> None:
        (size,) = struct.unpack("<I", self.read(4))
        self._append_text(size)

    def _long_text(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self._append_text(size)

    def _append_text(self, size: int) -> None:
        # One wide character makes four bytes of each, so a text is charged before it is decoded.
        self.left -= size // _TEXT_BYTES
        if self.left < 0:
            raise _TooManyObjectsError
        self.stack.append(str(self.read(size), "utf-8", "surrogatepass"))

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state

    def _instantiate(self, klass: object, args: object) -> None:
        self.stack.append(Call(klass, args))


def _counted(step: Callable[[Any], None], cost: int) -> Callable[[Any], None]:
    def counted(reader: _InertUnpickler) -> None:
        reader.left -= cost
        if reader.left < 0:
            raise _TooManyObjectsError
        step(reader)

    return counted


def _dispatch() -> Iterator[tuple[int, Callable[[Any], None]]]:
    inert = {
        pickle.REDUCE[0]: _InertUnpickler._reduce,
        pickle.NEWOBJ[0]: _InertUnpickler._reduce,
        pickle.NEWOBJ_EX[0]: _InertUnpickler._newobj_ex,
        pickle.BUILD[0]: _InertUnpickler._build,
        pickle.BINUNICODE[0]: _InertUnpickler._text,
        pickle.BINUNICODE8[0]: _InertUnpickler._long_text,
    }
    costs = {code[0]: cost for code, cost in _COSTS.items()}
    refused = {code[0] for code in _REFUSED}
    for code, step in pickle._Unpickler.dispatch.items():
        if code == pickle.STOP[0]:
            yield code, step
        elif code not in refused:
            yield code, _counted(inert.get(code, step), costs.get(code, 1))


_InertUnpickler.dispatch = dict(_dispatch())
