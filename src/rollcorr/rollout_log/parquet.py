"""The Parquet form: row groups that are streamed, and counted from the footer alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from rollcorr.config.checks import in_one_line
from rollcorr.rollout_log.arrow import pa, pq
from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.column_names import columns_of_fields, near_names
from rollcorr.rollout_log.errors import RolloutLogError, log_error
from rollcorr.rollout_log.file_limits import FileLimits, limit_error
from rollcorr.rollout_log.parquet_pages import DamagedParquetError, Footer, pages_of, read_footer, row_starts
from rollcorr.rollout_log.schema import COLUMNS, TOKEN_COLUMNS, VERSION_KEY, check_version, conform, own_fields
from rollcorr.rollout_log.source import BatchLimits, FileSource, Shard

# Bytes that a column reads ahead. Without it, or with Arrow's own pre-buffering, a whole row group of any size is held.
_READ_BUFFER = 1 << 16
# Ids of kept sets that take about as much memory as a token with its log-probs, when both are looked at.
_KEPT_IDS_PER_TOKEN = 8
# Values of all columns together that are read at once. Arrow takes up to 14 bytes for each while it decodes.
_BATCH_VALUES = 1 << 24
# Bytes of text that the rows read at once may have, if each repeats the largest page of texts.
_BATCH_TEXT = 1 << 26
# Columns of the file that the columns of the schema may consist of. This library's files have 39.
_MOST_LEAVES = 256
_WIDEST_VALUE = 16


class ParquetSource(FileSource):
    """Parquet files: this library's, and those of others, by the names of the schema or by names of their own.

    Args:
        limits: what a file may hold.
        names: column of the log → its name in the file.

    Raises:
        ValueError: a name is no column of the log.
    """

    endings: tuple[str, ...] = (".parquet",)

    def shards(self, path: Path, *, tokens: int) -> Iterator[Shard]:
        """As many row groups as make up `tokens`, one at least; from the footer.

        Args:
            path: the file.
            tokens: least tokens of a piece, where a file can be cut.
        """
        with self._open(path) as opened:
            columns = columns_of_fields(opened.file.schema_arrow.names, self.names)
            sizes = [_size(opened, group, columns) for group in range(len(opened.footer.rows))]

        first_row = start = 0
        while start < len(sizes):
            end, rows, held, longest = start, 0, 0, 0
            while end < len(sizes) and held < tokens:
                group_rows, group_tokens = sizes[end]
                rows, held = rows + group_rows, held + group_tokens
                longest = max(longest, group_tokens // max(group_rows, 1))
                end += 1
            if rows:
                yield Shard(
                    file=str(path),
                    source=self,
                    rows=rows,
                    first_row=first_row,
                    row_groups=(start, end),
                    row_tokens=longest,
                )
            first_row, start = first_row + rows, end

    def read(
        self, path: Path, *, columns: Sequence[str] | None, limits: BatchLimits, shard: Shard | None = None
    ) -> Iterator[RolloutBatch]:
        """The rows of a file, or of a shard of it, whose row groups say how many rows make too many tokens.

        Args:
            path: the file.
            columns: which to read; None is all of the schema.
            limits: how much a batch may hold.
            shard: the part that is wanted. None: the whole file.

        Raises:
            RolloutLogError: the file is damaged, or a value does not fit its column.
        """
        groups, first_row, rows = None, 0, limits.rows
        if shard is not None and shard.row_groups is not None:
            groups, first_row = list(range(*shard.row_groups)), shard.first_row
            rows = min(rows, max(1, limits.tokens // max(shard.row_tokens, 1)))

        with self._open(path) as opened:
            file = opened.file
            schema = file.schema_arrow
            own = [*own_fields(schema), *(column for column in self.names if column not in COLUMNS)]
            wanted = [*COLUMNS, *own] if columns is None else columns
            found = columns_of_fields(schema.names, self.names)
            names = [name for name in schema.names if found.get(name) in wanted]
            if not names:
                raise self._without(wanted, path, file.schema_arrow.names)

            plan = _Plan(path, opened, {name: found[name] for name in names}, self.limits)
            for piece in plan.pieces(range(len(opened.footer.rows)) if groups is None else groups):
                size = plan.batch_rows(piece, rows)
                for records in file.iter_batches(batch_size=size, columns=names, row_groups=piece):
                    if self.names:
                        records = records.rename_columns([found[name] for name in records.schema.names])
                    whole = conform(records, file=str(path), first_row=first_row)
                    self.limits.check_row_lengths(whole, file=path, first_row=first_row)
                    yield RolloutBatch(whole, str(path), first_row)
                    first_row += len(records)

    def fields(self, path: Path) -> tuple[str, ...]:
        """The names of the columns of a file."""
        with self._open(path) as opened:
            return tuple(opened.file.schema_arrow.names)

    def _without(self, wanted: Iterable[str], path: Path, fields: Sequence[str]) -> RolloutLogError:
        """The error for a file with none of the columns: what to write, where it has names that are near."""
        near = near_names(list(wanted), fields)
        option = ",".join(f"{column}={field}" for column, field in near.items())
        title = f"none of the columns {', '.join(wanted)}; it has {in_one_line(list(fields))}"
        return log_error("missing", title, fix=f"use --columns {option}" if near else "", file=path)

    @contextmanager
    def _open(self, path: Path) -> Iterator[_Opened]:
        """An open Parquet file of a version that can be read. What is wrong with it is told with its name."""
        fix = "copy or write it again; the writer of this library leaves whole files only"
        # Arrow would take a dot for a field of a structure, and the pages of that are not checked.
        for column, field in self.names.items():
            if "." in field:
                title = f"the name {field[:60]!r} of {column} has a dot"
                raise log_error("columns", title, fix="rename that column of the file", file=path)
        try:
            with path.open("rb", buffering=0) as pages:
                state = os.fstat(pages.fileno())
                footer = _footer(str(path), state.st_size, state.st_mtime_ns, self.limits)
                self.limits.check_rows(sum(footer.rows), file=path)
                with pq.ParquetFile(
                    path, buffer_size=_READ_BUFFER, pre_buffer=False, page_checksum_verification=True
                ) as file:
                    check_version((file.metadata.metadata or {}).get(VERSION_KEY.encode()), file=str(path))
                    if (len(file.schema), file.metadata.num_rows) != (footer.leaves, sum(footer.rows)):
                        raise DamagedParquetError("the footer contradicts itself")
                    yield _Opened(file, pages, footer)
        except (
            pa.ArrowException,
            OSError,
            DamagedParquetError,
            UnicodeDecodeError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            title = f"not a whole Parquet file: {in_one_line(error)}"
            raise log_error("unreadable", title, fix=fix, file=path) from error


class _Opened(NamedTuple):
    """An open file: as Arrow reads it, as bytes, and what its footer says."""

    file: pq.ParquetFile
    pages: BinaryIO
    footer: Footer


@lru_cache(maxsize=2)
def _footer(path: str, size: int, changed: int, limits: FileLimits) -> Footer:
    """The footer of a file, read once for all of its shards as long as the file does not change."""
    with Path(path).open("rb", buffering=0) as file:
        return read_footer(file, limits=limits, path=path)


class _Plan:
    """How many rows of a file may be read at once, from the headers of its pages.

    Args:
        path: the file, for messages.
        opened: the same, open.
        columns: the columns that are read: name in the file → column of the log.
        limits: what the file may hold.

    Raises:
        RolloutLogError: a column has a form that no column of the schema can have.
    """

    def __init__(self, path: Path, opened: _Opened, columns: Mapping[str, str], limits: FileLimits) -> None:
        file, self._pages, self._footer = opened
        self._path, self._limits = path, limits
        leaves = [(index, file.schema.column(index)) for index in range(len(file.schema))]
        parts = [(index, leaf, _top(leaf, columns)) for index, leaf in leaves]
        self._leaves = [(index, leaf, name) for index, leaf, name in parts if name is not None]
        if len(self._leaves) > _MOST_LEAVES:
            title = f"its columns consist of {len(self._leaves):,} parts; the limit is {_MOST_LEAVES}"
            raise log_error("type", title, fix="keep to the columns of the schema", file=path)
        fields = {column: name for name, column in columns.items()}
        for _, leaf, column in self._leaves:
            nested = leaf.max_repetition_level > 1
            of_texts = leaf.max_repetition_level == 1 and leaf.physical_type == "BYTE_ARRAY"
            wide = leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > _WIDEST_VALUE
            if nested or of_texts or wide:
                found = file.schema_arrow.field(fields[column]).type
                title = f"{in_one_line(str(found))} cannot be read as {COLUMNS[column].type}"
                raise log_error("type", title, file=path, column=column)

    def pieces(self, groups: Iterable[int]) -> Iterator[list[int]]:
        """Consecutive row groups that are read together: as many as can be decoded at once, one at least."""
        piece: list[int] = []
        held = 0
        for group in groups:
            values = self._list_values(group)
            if piece and held + values > _BATCH_VALUES:
                yield piece
                piece, held = [], 0
            piece.append(group)
            held += values
        if piece:
            yield piece

    def batch_rows(self, piece: Sequence[int], rows: int) -> int:
        """Most rows of a batch of these row groups: `rows`, or fewer where they are long.

        Raises:
            RolloutLogError: a row, or a page, exceeds its limit.
            DamagedParquetError: the headers of the pages contradict the footer.
        """
        largest_text = 0
        for group in piece:
            largest_text = max(largest_text, self._check_pages(group))
        rows = max(1, min(rows, _BATCH_TEXT // max(largest_text, 1)))

        # Where all rows together can be decoded at once, their lengths need not be known before.
        if sum(self._list_values(group) for group in piece) > _BATCH_VALUES:
            for group in piece:
                rows = self._rows_that_fit(group, rows)
        return rows

    def _list_values(self, group: int) -> int:
        chunks = self._footer.groups[group]
        return sum(chunks[index].values for index, leaf, _ in self._leaves if leaf.max_repetition_level)

    def _check_pages(self, group: int) -> int:
        """Check the pages of a row group; returns the bytes of the largest texts that a row of it may have."""
        chunks, rows = self._footer.groups[group], self._footer.rows[group]
        largest, largest_text = 0, 0
        for index, leaf, column in self._leaves:
            chunk = chunks[index]
            if leaf.max_repetition_level == 0 and chunk.values != rows:
                title = f"{column} has {chunk.values:,} values in row group {group} of {rows:,} rows"
                raise DamagedParquetError(title)
            size = max((max(page.size, page.stored) for page in pages_of(self._pages, chunk)), default=0)
            largest += size
            if leaf.physical_type == "BYTE_ARRAY":
                largest_text += size
        if largest > self._limits.page_bytes:
            found = f"the pages of row group {group} decompress to {largest:,} bytes at once"
            raise limit_error("page_bytes", found, self._limits.page_bytes, file=self._path)
        return largest_text

    def _rows_that_fit(self, group: int, rows: int) -> int:
        """At most `rows`, so many that no batch of a row group has too many values.

        Raises:
            RolloutLogError: a row has too many of them.
        """
        chunks, group_rows = self._footer.groups[group], self._footer.rows[group]
        if not group_rows:
            return rows
        before = sum(self._footer.rows[:group])
        values = np.zeros(group_rows, np.int64)
        for index, leaf, column in self._leaves:
            if leaf.max_repetition_level:
                chunk = chunks[index]
                starts = row_starts(self._pages, chunk, rows=group_rows)
                lengths = np.diff(starts, append=chunk.values)
                name, limit = self._limits.of_row(column)
                if lengths.max() > limit:
                    row = int(lengths.argmax())
                    found = f"{int(lengths[row]):,} values in one row"
                    raise limit_error(name, found, limit, file=self._path, row=before + row, column=column)
                values += lengths

        while rows > 1 and np.add.reduceat(values, np.arange(0, len(values), rows)).max() > _BATCH_VALUES:
            rows = max(1, rows // 2)
        return rows


def _top(leaf: pq.ColumnSchema, columns: Mapping[str, str]) -> str | None:
    """The column of the log that a leaf belongs to."""
    return columns.get(leaf.path.split(".")[0])


def _size(opened: _Opened, group: int, columns: Mapping[str, str]) -> tuple[int, int]:
    """Rows of a row group, and its tokens or what kept sets cost in tokens. Empty and null lists count as 1."""
    schema, chunks = opened.file.schema, opened.footer.groups[group]
    values = {_top(schema.column(index), columns): chunk.values for index, chunk in enumerate(chunks)}
    tokens = max((values[name] for name in TOKEN_COLUMNS if name in values), default=0)
    return opened.footer.rows[group], max(tokens, values.get("kept_ids", 0) // _KEPT_IDS_PER_TOKEN)
