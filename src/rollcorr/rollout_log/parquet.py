"""Parquet format: stream row groups, and count rows from the footer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rollcorr.config.checks import in_one_line
from rollcorr.rollout_log.arrow import pa, pq
from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.errors import FileLimits, limit_error, log_error
from rollcorr.rollout_log.frameworks import columns_of_fields, near_names
from rollcorr.rollout_log.parquet_pages import Chunk, DamagedParquetError, Footer, pages_of, read_footer, row_starts
from rollcorr.rollout_log.schema import COLUMNS, TOKEN_COLUMNS, VERSION_KEY, check_version, conform, own_fields
from rollcorr.rollout_log.source import BatchLimits, LogSource, Shard

# Bytes that a column reads ahead. Without it, or with Arrow's pre-buffering, a complete row group is in memory.
_READ_BUFFER_BYTES = 1 << 16
# This many ids of kept sets need about as much memory as one token with its log-probs.
_KEPT_IDS_PER_TOKEN = 8
# Values of all columns together that are read at once. Arrow needs up to 14 bytes for each while it decodes.
_MAX_BATCH_VALUES = 1 << 24
# Bytes of text that the rows read at once may have, if each repeats the largest page of texts.
_MAX_BATCH_TEXT_BYTES = 1 << 26
# Largest number of leaf columns of a file that belong to the schema's columns. This library's files have 39.
_MAX_LEAVES = 256
_MAX_VALUE_BYTES = 16
_Leaves = list[tuple[int, Any, str]]


class ParquetSource(LogSource):
    """Source for Parquet files: this library's, and foreign files with the schema's names or with `names`.

    Args:
        limits: the size limits of a file; defaults to `FileLimits()`.
        names: column of the log → its name in the file; optional.

    Raises:
        ValueError: a name is no column of the log.
    """

    endings: tuple[str, ...] = (".parquet",)

    def shards(self, path: Path, *, tokens: int) -> Iterator[Shard]:
        """Yield shards of consecutive row groups with at least `tokens` tokens, computed from the footer.

        Args:
            path: the file.
            tokens: least tokens of a shard; the last one may have fewer.
        """
        with self._open(path) as (file, _, footer):
            leaves = _leaves(file, columns_of_fields(file.schema_arrow.names, self.names))
            sizes = [_tokens_of_group(chunks, leaves) for chunks in footer.groups]

        first_row = 0
        for groups in _group_runs(sizes, tokens):
            rows = [footer.rows[group] for group in groups]
            if any(rows):
                yield Shard(
                    file=str(path),
                    source=self,
                    rows=sum(rows),
                    first_row=first_row,
                    row_groups=(groups.start, groups.stop),
                    row_tokens=max(sizes[group] // max(footer.rows[group], 1) for group in groups),
                )
            first_row += sum(rows)

    def read(
        self, path: Path, *, columns: Sequence[str] | None, limits: BatchLimits, shard: Shard | None = None
    ) -> Iterator[RolloutBatch]:
        """Yield the rows of a file, or of a shard, in batches. A shard's row groups bound the tokens of a batch.

        Args:
            path: the file.
            columns: the columns to read, or `None` for all columns of the schema.
            limits: the size limits of a batch.
            shard: the part to read; defaults to the complete file.

        Raises:
            RolloutLogError: the file is damaged, or a value does not fit its column.
        """
        groups, first_row, rows = None, 0, limits.rows
        if shard is not None and shard.row_groups is not None:
            groups, first_row = range(*shard.row_groups), shard.first_row
            rows = min(rows, max(1, limits.tokens // max(shard.row_tokens, 1)))

        with self._open(path) as (file, pages, footer):
            schema = file.schema_arrow
            own = [*own_fields(schema), *(column for column in self.names if column not in COLUMNS)]
            wanted = [*COLUMNS, *own] if columns is None else columns
            found = columns_of_fields(schema.names, self.names)
            found = {name: found[name] for name in schema.names if found.get(name) in wanted}
            if not found:
                near = near_names(list(wanted), schema.names)
                option = ",".join(f"{column}={field}" for column, field in near.items())
                raise log_error(
                    "missing",
                    f"none of the columns {', '.join(wanted)}; it has {in_one_line(schema.names)}",
                    fix=f"use --columns {option}" if near else "",
                    file=path,
                )

            leaves = _leaves(file, found)
            _check_types(leaves, schema, path)
            groups = range(len(footer.rows)) if groups is None else groups
            plan = _ReadPlan(path, pages, footer, leaves, self.limits)
            # Join row groups until they reach half of the values that can be decoded at once.
            for run in _group_runs([plan.list_values(group) for group in groups], _MAX_BATCH_VALUES // 2):
                piece = list(groups[run.start : run.stop])
                size = plan.batch_rows(piece, rows)
                for records in file.iter_batches(batch_size=size, columns=list(found), row_groups=piece):
                    records = records.rename_columns([found[name] for name in records.schema.names])
                    whole = conform(records, file=str(path), first_row=first_row)
                    self.limits.check_row_lengths(whole, file=path, first_row=first_row)
                    yield RolloutBatch(whole, str(path), first_row)
                    first_row += len(records)

    def fields(self, path: Path) -> tuple[str, ...]:
        """Return the names of a file's columns."""
        with self._open(path) as (file, _, _):
            return tuple(file.schema_arrow.names)

    @contextmanager
    def _open(self, path: Path) -> Iterator[tuple[pq.ParquetFile, BinaryIO, Footer]]:
        """Context manager that yields a Parquet file, its bytes, and its footer. It checks the schema version.

        Every error names the file.
        """
        # Arrow would parse a dot as a field of a structure, whose pages are not checked.
        for column, field in self.names.items():
            if "." in field:
                raise log_error(
                    "columns",
                    f"the name {field[:60]!r} of {column} has a dot",
                    fix="rename that column of the file",
                    file=path,
                )
        try:
            with path.open("rb", buffering=0) as pages:
                state = os.fstat(pages.fileno())
                footer = read_footer(str(path), state.st_size, state.st_mtime_ns, self.limits)
                self.limits.check_rows(sum(footer.rows), file=path)
                with pq.ParquetFile(
                    path, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
                ) as file:
                    check_version((file.metadata.metadata or {}).get(VERSION_KEY.encode()), file=str(path))
                    if (len(file.schema), file.metadata.num_rows) != (footer.leaves, sum(footer.rows)):
                        raise DamagedParquetError("the footer contradicts itself")
                    yield file, pages, footer
        except (
            pa.ArrowException,
            OSError,
            DamagedParquetError,
            UnicodeDecodeError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            raise log_error(
                "unreadable",
                f"not a whole Parquet file: {in_one_line(error)}",
                fix="copy or write it again; the writer of this library leaves whole files only",
                file=path,
            ) from error


def _leaves(file: pq.ParquetFile, columns: Mapping[str, str]) -> _Leaves:
    """Return the leaf columns of a file: position in a row group, Parquet type, and column of the log.

    Args:
        file: an open file.
        columns: the columns to include: name in the file → column of the log.
    """
    forms = [(index, file.schema.column(index)) for index in range(len(file.schema))]
    tops = [(index, form, form.path.split(".")[0]) for index, form in forms]
    return [(index, form, columns[top]) for index, form, top in tops if top in columns]


def _check_types(leaves: _Leaves, schema: pa.Schema, path: Path) -> None:
    """Check that each leaf column has a type that the schema can represent.

    Raises:
        RolloutLogError: a type does not fit.
    """
    if len(leaves) > _MAX_LEAVES:
        raise log_error(
            "type",
            f"its columns consist of {len(leaves):,} parts; the limit is {_MAX_LEAVES}",
            fix="keep to the columns of the schema",
            file=path,
        )
    for _, leaf, column in leaves:
        nested = leaf.max_repetition_level > 1
        of_texts = leaf.max_repetition_level == 1 and leaf.physical_type == "BYTE_ARRAY"
        wide = leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > _MAX_VALUE_BYTES
        if nested or of_texts or wide:
            found = schema.field(leaf.path.split(".")[0]).type
            raise log_error(
                "type", f"{in_one_line(str(found))} cannot be read as {COLUMNS[column].type}", file=path, column=column
            )


def _tokens_of_group(chunks: Sequence[Chunk], leaves: _Leaves) -> int:
    """Compute the tokens of a row group, or the equivalent of its kept sets. Empty and null lists count as 1."""
    values = {column: chunks[index].values for index, _, column in leaves}
    tokens = max((values[name] for name in TOKEN_COLUMNS if name in values), default=0)
    return max(tokens, values.get("kept_ids", 0) // _KEPT_IDS_PER_TOKEN)


def _group_runs(sizes: Sequence[int], least: int) -> Iterator[range]:
    """Yield runs of consecutive positions whose sizes sum to at least `least`; the last run may have less."""
    start = held = 0
    for position, size in enumerate(sizes, 1):
        held += size
        if held >= least or position == len(sizes):
            yield range(start, position)
            start, held = position, 0


class _ReadPlan:
    """Plan of the number of rows to read at once, from the headers of a file's pages."""

    def __init__(self, path: Path, pages: BinaryIO, footer: Footer, leaves: _Leaves, limits: FileLimits) -> None:
        self._path, self._pages, self._footer, self._leaves, self._limits = path, pages, footer, leaves, limits

    def list_values(self, group: int) -> int:
        """Compute the number of values in all lists of a row group."""
        chunks = self._footer.groups[group]
        return sum(chunks[index].values for index, leaf, _ in self._leaves if leaf.max_repetition_level)

    def batch_rows(self, piece: Sequence[int], rows: int) -> int:
        """Compute the most rows of a batch of these row groups: `rows`, or fewer if rows are long.

        Raises:
            RolloutLogError: a row, or a page, exceeds its limit.
            DamagedParquetError: the headers of the pages contradict the footer.
        """
        largest_text = max(self._check_pages(group) for group in piece)
        rows = max(1, min(rows, _MAX_BATCH_TEXT_BYTES // max(largest_text, 1)))

        # If all rows can be decoded at once, their lengths are not needed.
        if sum(self.list_values(group) for group in piece) > _MAX_BATCH_VALUES:
            for group in piece:
                rows = self._rows_that_fit(group, rows)
        return rows

    def _check_pages(self, group: int) -> int:
        """Check the pages of a row group.

        Returns:
            Bytes of the largest texts that one of its rows may have.
        """
        chunks, rows = self._footer.groups[group], self._footer.rows[group]
        largest: dict[int, int] = {}
        for index, leaf, column in self._leaves:
            chunk = chunks[index]
            if leaf.max_repetition_level == 0 and chunk.values != rows:
                raise DamagedParquetError(f"{column} has {chunk.values:,} values in row group {group} of {rows:,} rows")
            largest[index] = max((max(page.size, page.stored) for page in pages_of(self._pages, chunk)), default=0)
        at_once = sum(largest.values())
        if at_once > self._limits.page_bytes:
            raise limit_error(
                "page_bytes",
                f"the pages of row group {group} decompress to {at_once:,} bytes at once",
                self._limits.page_bytes,
                file=self._path,
            )
        return sum(largest[index] for index, leaf, _ in self._leaves if leaf.physical_type == "BYTE_ARRAY")

    def _rows_that_fit(self, group: int, rows: int) -> int:
        """Compute the largest batch size up to `rows` at which each batch of a row group fits the limit on values.

        Raises:
            RolloutLogError: a row exceeds the limit.
        """
        chunks, group_rows = self._footer.groups[group], self._footer.rows[group]
        if not group_rows:
            return rows
        before = sum(self._footer.rows[:group])
        values = np.zeros(group_rows, np.int64)
        lists = [(chunks[index], column) for index, leaf, column in self._leaves if leaf.max_repetition_level]
        for chunk, column in lists:
            lengths = np.diff(row_starts(self._pages, chunk, rows=group_rows), append=chunk.values)
            self._limits.check_lengths(lengths, column, file=self._path, first_row=before)
            values += lengths

        while rows > 1 and np.add.reduceat(values, np.arange(0, len(values), rows)).max() > _MAX_BATCH_VALUES:
            rows = max(1, rows // 2)
        return rows
