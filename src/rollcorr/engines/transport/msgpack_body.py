"""Parse MessagePack without a dependency: nil, booleans, numbers, texts, bytes, lists and maps; no extension types."""

from __future__ import annotations

import struct
from typing import Any

from rollcorr.engines.base import EngineAnswerError
from rollcorr.engines.transport.answer_body import BYTES_PER_CONTAINER

# First byte → value or struct format of a number.
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}

# First byte → format of the length that follows, and the kind of the value.
_SIZED = {0xC4: (">B", "bytes"), 0xC5: (">H", "bytes"), 0xC6: (">I", "bytes")}
_SIZED |= {0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text")}
_SIZED |= {0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map")}


def parse_msgpack(body: bytearray, problem: str | None, *, limit: int, where: str) -> Any:  # noqa: ANN401
    """Parse a body from `read_body` as MessagePack; raise the `problem` that `read_body` found, if any.

    Raises:
        EngineAnswerError: the body is incomplete or not MessagePack, is nested too deeply, or contains more lists and
            maps than the memory limit allows.
    """
    try:
        if problem is None:
            reader = _Reader(bytes(body), containers=limit // BYTES_PER_CONTAINER)
            value = reader.value()
            if reader.place == len(body):
                return value
            problem = f"in MessagePack that ends at byte {reader.place} of {len(body)}"
    except (struct.error, UnicodeDecodeError, ValueError, TypeError) as error:
        problem = f"with invalid MessagePack: {error}"
    except RecursionError:
        problem = "with MessagePack that is nested too deeply"
    raise EngineAnswerError(f"{where} was answered {problem}") from None


class _Reader:
    """A place in a body, and how many lists and maps may follow."""

    def __init__(self, body: bytes, *, containers: int) -> None:
        self.body, self.place, self.containers = body, 0, containers

    def value(self) -> Any:  # noqa: ANN401
        """Return the value at the place, and move behind it."""
        first = self._take(1)[0]
        if first < 0x80 or first >= 0xE0:
            return first if first < 0x80 else first - 0x100
        if first < 0xC0:
            small = {0x80: ("map", 15), 0x90: ("list", 15)}.get(first & 0xF0, ("text", 31))
            return self._read_sized_value(small[0], first & small[1])
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            return self._number(_NUMBERS[first])
        if first in _SIZED:
            form, kind = _SIZED[first]
            return self._read_sized_value(kind, self._number(form))
        raise ValueError(f"byte {first:#x} is an extension type")

    def _number(self, form: str) -> Any:  # noqa: ANN401
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _read_sized_value(self, kind: str, size: int) -> Any:  # noqa: ANN401
        if kind == "bytes":
            return self._take(size)
        if kind == "text":
            return self._take(size).decode("utf-8")

        # Bound the memory before anything is built: an empty list needs one byte in the body and 56 in Python.
        self.containers -= 1
        if self.containers < 0:
            raise ValueError("more lists and maps than the limit holds; raise max_answer_bytes")
        if size > len(self.body) - self.place:
            raise ValueError(f"it ends at byte {len(self.body)}")
        if kind == "list":
            return [self.value() for _ in range(size)]
        return {self.value(): self.value() for _ in range(size)}

    def _take(self, size: int) -> bytes:
        taken = self.body[self.place : self.place + size]
        if len(taken) < size:
            raise ValueError(f"it ends at byte {len(self.body)}")
        self.place += size
        return taken
