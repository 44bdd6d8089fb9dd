"""Check the sizes of Parquet pages before Arrow decodes them.

A row group contains its number of values, but a damaged or malicious file may state a false number. Each page has a
header with its number of values and its decompressed size. Arrow trusts the headers and allocates memory accordingly.
So this module reads them first: a few bytes per page. A page header does not contain the number of values per row. For
large row groups, the repetition levels are therefore decoded as well; runs of equal levels are never expanded.

Format: https://github.com/apache/parquet-format (page headers in Thrift's compact protocol, levels as hybrids of runs
and packed bits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from rollcorr.rollout_log.arrow import pa
from rollcorr.rollout_log.errors import FileLimits, limit_error

MAGIC = (b"PAR1", b"PARE")
DATA_PAGE, INDEX_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = range(4)
RLE = 3
MOST_CHUNKS = 1 << 19
"""Most column chunks of a file. A chunk needs at least three bytes in a footer, and 700 in Arrow's memory."""
UNCOMPRESSED = 0
CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 5: "lz4_raw", 6: "zstd", 7: "lz4_raw"}

_FLAGS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
_FIXED_SIZE_BYTES = {**dict.fromkeys(_FLAGS, 0), _BYTE: 1, _DOUBLE: 8}
"""Types of Thrift's compact protocol, and bytes of a value. The type of a flag contains its value."""
_I32, _I64, _LIST = 5, 6, 9
_HEADER_READ_BYTES = (1 << 9, 1 << 16, 1 << 20)
"""Bytes to read for a page's header, in the order of attempts: statistics rarely make it long."""


class DamagedParquetError(ValueError):
    """Error for bytes that contradict each other or the format."""


class Chunk(NamedTuple):
    """Column chunk: the values of one column in one row group.

    Attributes:
        codec: compression of its pages, a key of `CODECS` or UNCOMPRESSED.
        values: number of values in the footer; null values and empty lists included.
        start: offset of its first page in the file, bytes.
        end: offset of the end of its last page, bytes.
    """

    codec: int
    values: int
    start: int
    end: int


class Footer(NamedTuple):
    """Row groups in a footer.

    pyarrow's view of a column chunk aborts the process if the chunk's statistics contradict the schema, with an
    uncaught C++ exception. So this module parses the footer itself.

    Attributes:
        leaves: number of leaf columns, which contain the values.
        rows: rows of each row group.
        groups: the chunks of each row group, one for each leaf.
    """

    leaves: int
    rows: tuple[int, ...]
    groups: tuple[tuple[Chunk, ...], ...]


class Page(NamedTuple):
    """Header of a page of a column chunk.

    Attributes:
        kind: DATA_PAGE, DICTIONARY_PAGE or DATA_PAGE_V2.
        values: number of values, null values and empty lists included.
        stored: bytes in the file, after the header.
        size: bytes when decompressed.
        body: offset of its content in the file, bytes.
        levels: bytes of its repetition levels, which are not compressed; only in version 2.
        level_encoding: encoding of the repetition levels.
    """

    kind: int
    values: int
    stored: int
    size: int
    body: int
    levels: int
    level_encoding: int


@lru_cache(maxsize=2)
def read_footer(path: str, size: int, changed: int, limits: FileLimits) -> Footer:
    """Read the footer of a Parquet file. The result is cached for all shards until the file changes.

    Args:
        path: the file.
        size: size of the file, bytes.
        changed: time of its last change, ns.
        limits: limits with the bytes of the footer.

    Raises:
        RolloutLogError: the footer is longer than its limit.
        DamagedParquetError: the footer is missing or contradicts itself.
    """
    with Path(path).open("rb", buffering=0) as file:
        tail = _read(file, max(size - 8, 0), 8)
        if len(tail) < 8 or tail[4:] not in MAGIC:
            raise DamagedParquetError(f"it has {size} bytes and does not end in PAR1")
        footer = int.from_bytes(tail[:4], "little")
        if footer > limits.footer_bytes:
            raise limit_error("footer_bytes", f"a footer of {footer:,} bytes", limits.footer_bytes, file=path)
        if footer > size - 8:
            raise DamagedParquetError(f"it has {size} bytes, and its footer {footer:,}")
        try:
            return _parse_footer(_Thrift(_read(file, size - 8 - footer, footer)))
        except IndexError:
            raise DamagedParquetError("the footer is cut off") from None


def _parse_footer(thrift: _Thrift) -> Footer:
    leaves = 0
    rows: list[int] = []
    groups: list[tuple[Chunk, ...]] = []

    def chunks(thrift: _Thrift) -> tuple[Chunk, ...]:
        count = thrift.list_header()[1]
        if count != leaves:
            raise DamagedParquetError(f"a row group has {count:,} columns, the schema {leaves:,}")
        if leaves * len(groups) > MOST_CHUNKS:
            raise DamagedParquetError(f"more than {MOST_CHUNKS:,} column chunks; write larger row groups")
        return tuple(_parse_chunk(thrift) for _ in range(count))

    for number, kind in thrift.fields():
        if (number, kind) == (2, _LIST):  # the schema; a nested column has its number of children
            elements = (thrift.struct({(5, _I32): _Thrift.integer}) for _ in range(thrift.list_header()[1]))
            leaves = sum(element.get(5, 0) == 0 for element in elements)
        elif (number, kind) == (4, _LIST):
            for _ in range(thrift.list_header()[1]):
                group = thrift.struct({(1, _LIST): chunks, (3, _I64): _Thrift.integer})
                if 1 not in group or group.get(3, -1) < 0:
                    raise DamagedParquetError("a row group lacks its columns or its number of rows")
                rows.append(group[3])
                groups.append(group[1])
        else:
            thrift.skip(kind)
    return Footer(leaves=leaves, rows=tuple(rows), groups=tuple(groups))


def _parse_chunk(thrift: _Thrift) -> Chunk:
    chunk = thrift.struct(_CHUNK_FIELDS).get(3, {})
    codec, values, stored, start = (chunk.get(number, -1) for number in (4, 5, 7, 9))
    if min(values, stored, start) < 0:
        raise DamagedParquetError("a column chunk lacks its place or its number of values")
    if 0 < chunk.get(11, 0) < start:
        start = chunk[11]  # the dictionary comes first
    return Chunk(codec, values, start, start + stored)


def pages_of(file: BinaryIO, chunk: Chunk) -> Iterator[Page]:
    """Yield the pages of a column chunk that Arrow would read, in order.

    Raises:
        DamagedParquetError: the headers contradict each other or the chunk.
    """
    position, left = chunk.start, chunk.values
    while left > 0:
        if position >= chunk.end:
            raise DamagedParquetError(f"the pages of a column chunk lack {left:,} of its {chunk.values:,} values")
        page = _read_header(file, position)
        if page.kind in (DATA_PAGE, DATA_PAGE_V2):
            left -= page.values
        if left < 0:
            raise DamagedParquetError(
                f"the pages of a column chunk have {-left:,} values more than its row group says {chunk.values:,}"
            )
        yield page
        position = page.body + page.stored


def row_starts(file: BinaryIO, chunk: Chunk, *, rows: int) -> np.ndarray:
    """Compute the index of the first value of each row of a list column: (rows,) int64.

    Raises:
        DamagedParquetError: the levels cannot be decoded, or contain a different number of rows.
    """
    parts: list[np.ndarray] = []
    before = found = 0
    for page in pages_of(file, chunk):
        if page.kind == DICTIONARY_PAGE:
            continue
        for zeros in _zero_positions(_repetition_levels(file, chunk, page), page.values, most=rows):
            found += len(zeros)
            if found > rows:
                raise DamagedParquetError(f"a column has more rows than the {rows:,} of its row group")
            parts.append(before + zeros)
        before += page.values
    starts = np.concatenate([np.zeros(0, np.int64), *parts])
    if len(starts) != rows or (rows and starts[0] != 0):
        raise DamagedParquetError(f"a column has {len(starts):,} rows, its row group {rows:,}")
    return starts


def _read(file: BinaryIO, position: int, size: int) -> bytes:
    """Read bytes of a file; fewer at its end."""
    file.seek(position)
    return file.read(size)


def _read_header(file: BinaryIO, position: int) -> Page:
    """Read the header of the page at a position."""
    for size in _HEADER_READ_BYTES:
        thrift = _Thrift(_read(file, position, size))
        with suppress(IndexError):
            return _parse_header(thrift, position)
    raise DamagedParquetError(f"the header of the page at byte {position} has no end")


def _parse_header(thrift: _Thrift, position: int) -> Page:
    header = thrift.struct(_PAGE_HEADER_FIELDS)
    kind, size, stored = (header.get(number, -1) for number in (1, 2, 3))

    # Each kind of page has its own header, which begins with the number of values. Field 4 is the encoding of the
    # repetition levels in version 1; field 6 is their size in version 2.
    details = header.get(5 + max(kind, 0), {})
    values, levels = details.get(1, 0), details.get(6, 0)
    if kind not in (DATA_PAGE, INDEX_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2) or min(size, stored, values, levels) < 0:
        raise DamagedParquetError(f"there is no page at byte {position}")
    if kind == DICTIONARY_PAGE and values > size:
        raise DamagedParquetError(f"the dictionary at byte {position} has {values:,} values in {size:,} bytes")
    return Page(kind, values, stored, size, position + thrift.position, levels, details.get(4, RLE))


def _repetition_levels(file: BinaryIO, chunk: Chunk, page: Page) -> bytes:
    """Return the encoded repetition levels of a page."""
    body = _read(file, page.body, page.stored)
    if len(body) < page.stored:
        raise DamagedParquetError(f"the page at byte {page.body} is cut off")
    if page.kind == DATA_PAGE_V2:
        return body[: page.levels]
    if page.level_encoding != RLE:
        raise DamagedParquetError("repetition levels in the encoding that was given up in 2013")

    if chunk.codec != UNCOMPRESSED:
        codec = CODECS.get(chunk.codec)
        if codec is None:
            raise DamagedParquetError("row groups of this size cannot be checked in this compression; use zstd")
        body = pa.decompress(body, page.size, codec=codec, asbytes=True)
    length = int.from_bytes(body[:4], "little")
    return bytes(body[4 : 4 + length])


def _zero_positions(levels: bytes, count: int, *, most: int) -> Iterator[np.ndarray]:
    """Yield the positions of zeros in one-bit levels, run by run.

    A run of ones has a constant cost; a run of zeros yields at most `most` + 1 positions.
    """
    thrift = _Thrift(levels)
    first = 0
    while first < count:
        try:
            head = thrift.varint()
            packed = head & 1
            run = thrift.take(head >> 1 if packed else 1)
        except IndexError:
            raise DamagedParquetError(f"the levels of a page end after {first:,} of {count:,} values") from None

        if packed:
            bits = np.unpackbits(np.frombuffer(run, np.uint8), bitorder="little")
            length = min(len(bits), count - first)
            zeros = np.flatnonzero(bits[:length] == 0)
        else:
            length = min(head >> 1, count - first)
            zeros = np.zeros(0, np.int64) if run[0] else np.arange(min(length, most + 1))
        if length == 0:
            raise DamagedParquetError("a run of no levels")
        yield first + zeros
        first += length


class _Thrift:
    """Parser of Thrift's compact protocol. Reading past the end raises IndexError.

    Args:
        content: the bytes.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = 0

    def byte(self) -> int:
        value = self._content[self.position]
        self.position += 1
        return value

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start = self.position
        self.position += count
        if self.position > len(self._content):
            raise IndexError(self.position)
        return self._content[start : self.position]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise DamagedParquetError("an integer of more than 64 bits")

    def integer(self) -> int:
        """Parse a signed integer of any width."""
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and type of each field of a struct. The caller reads or skips each value."""
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            if not 0 <= number < 1 << 15:  # Arrow keeps 16 bits, and would read a different field
                raise DamagedParquetError(f"a field of the number {number}")
            yield number, head & 15

    def struct(self, wanted: _FieldParsers) -> dict[int, Any]:
        """Return the wanted fields of a struct by number; skip fields with other numbers or types."""
        found: dict[int, Any] = {}
        for number, kind in self.fields():
            read = wanted.get((number, kind))
            if read is None:
                self.skip(kind)
            else:
                found[number] = read(self)
        return found

    def list_header(self) -> tuple[int, int]:
        """Return the type and the number of the elements of a list."""
        head = self.byte()
        count = head >> 4
        return head & 15, self.varint() if count == 15 else count

    def skip(self, kind: int) -> None:
        """Skip a value."""
        if kind in _INTEGERS:
            self.varint()
        elif kind in _FIXED_SIZE_BYTES or kind == _BINARY:
            self.take(_FIXED_SIZE_BYTES[kind] if kind in _FIXED_SIZE_BYTES else self.varint())
        elif kind in _LISTS:
            element, count = self.list_header()
            for _ in range(count):
                # In a list, a flag is one byte.
                self.skip(_BYTE if element in _FLAGS else element)
        elif kind == _STRUCT:
            self.struct({})
        else:
            raise DamagedParquetError(f"a value of the unknown type {kind}")


_FieldParsers = Mapping[tuple[int, int], Callable[[_Thrift], Any]]
"""(Number, type) of a field → function that reads its value."""


def _integer_fields(*fields: tuple[int, int]) -> _FieldParsers:
    return dict.fromkeys(fields, _Thrift.integer)


# Codec, number of values, bytes in the file, first page, dictionary.
_COLUMN_METADATA_FIELDS = _integer_fields((4, _I32), (5, _I64), (7, _I64), (9, _I64), (11, _I64))
_CHUNK_FIELDS: _FieldParsers = {(3, _STRUCT): partial(_Thrift.struct, wanted=_COLUMN_METADATA_FIELDS)}

# Kind, size, and bytes in the file. Then the number of values, with the encoding or the bytes of the repetition levels.
_PAGE_HEADER_FIELDS: _FieldParsers = {
    **_integer_fields((1, _I32), (2, _I32), (3, _I32)),
    (5 + DATA_PAGE, _STRUCT): partial(_Thrift.struct, wanted=_integer_fields((1, _I32), (4, _I32))),
    (5 + DICTIONARY_PAGE, _STRUCT): partial(_Thrift.struct, wanted=_integer_fields((1, _I32))),
    (5 + DATA_PAGE_V2, _STRUCT): partial(_Thrift.struct, wanted=_integer_fields((1, _I32), (6, _I32))),
}
