"""Base class of file formats that can be read as a rollout log.

Parquet, JSONL and the pickles of other frameworks are three sources (`rollcorr.rollout_log.reader.SOURCES`). They
recognize the dumps in `rollcorr.rollout_log.frameworks`. For any other dump, write a class and pass it as `source=` to
`read_rollout_log` or `log_shards`. For a dump of JSON lines, a subclass of `JsonlSource` whose `row` renames the fields
is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.build import records_of_rows
from rollcorr.rollout_log.errors import FileLimits, log_error
from rollcorr.rollout_log.schema import COLUMNS, check_column_names, own_columns


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Size limits of a batch, which bound a reader's memory for rows of any length. The first limit reached applies.

    Attributes:
        rows: most rows.
        tokens: approximate most tokens, for shards with known row lengths; a batch contains at least one row.
        text_bytes: most bytes of text, for rows of text; as Python objects they need about twice as much.
    """

    rows: int = 256
    tokens: int = 1 << 18
    text_bytes: int = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Shard: consecutive rows of one file.

    Attributes:
        file: the file, as it was given.
        source: the source that reads it.
        rows: number of rows.
        first_row: position of the first row in the file; defaults to 0.
        before: rows of the log before this shard, over all files; defaults to 0.
        row_groups: half-open range of row groups, for a Parquet file; optional.
        row_tokens: mean tokens of a row, or the equivalent of its kept sets if that is more, in the row group with the
            largest mean. Defaults to 0, for a source without row lengths.
    """

    file: str
    source: LogSource
    rows: int
    first_row: int = 0
    before: int = 0
    row_groups: tuple[int, int] | None = None
    row_tokens: int = 0


class LogSource:
    """Base class of a file format. Its state is the limits of its files and their column names; it can be pickled.

    By default a file is one shard, and a subclass implements `_read_rows`. A format that can be read in parts overrides
    `shards` and `read`.

    Args:
        limits: the size limits of a file; defaults to `FileLimits()`.
        names: column of the log → its name in the file; optional.

    Attributes:
        endings: endings of its file names.

    Raises:
        ValueError: a name is no column of the log.
    """

    endings: tuple[str, ...]
    _most_size = "text_bytes"  # attribute of `BatchLimits` that bounds the sizes from `_read_rows`

    def __init__(self, limits: FileLimits | None = None, names: Mapping[str, str] | None = None) -> None:
        self.limits = limits or FileLimits()
        self.names = dict(names or {})
        check_column_names(self.names)

    def shards(self, path: Path, *, tokens: int) -> Iterator[Shard]:
        """Yield the shards of a file, with about `tokens` tokens or more each. A file without rows has no shard.

        Args:
            path: the file.
            tokens: least tokens of a shard.

        Raises:
            RolloutLogError: the file is damaged or has a newer schema.
        """
        rows = self._count_rows(path)
        if rows:
            yield Shard(file=str(path), source=self, rows=rows)

    def read(
        self, path: Path, *, columns: Sequence[str] | None, limits: BatchLimits, shard: Shard | None = None
    ) -> Iterator[RolloutBatch]:
        """Yield the rows of a file, or of one of its shards, in batches.

        Args:
            path: the file.
            columns: the columns to read, or `None` for all columns of the schema.
            limits: the size limits of a batch.
            shard: the part to read; defaults to the complete file.

        Raises:
            RolloutLogError: the file is damaged, or a value does not fit its column.
        """
        held: list[Mapping[str, Any]] = []
        first_row = held_size = 0
        for row, size in self._read_rows(path):
            held.append(row)
            held_size += size
            if len(held) == limits.rows or held_size >= getattr(limits, self._most_size):
                yield self._batch(held, path, columns=columns, first_row=first_row)
                first_row, held, held_size = first_row + len(held), [], 0
        if held:
            yield self._batch(held, path, columns=columns, first_row=first_row)

    def fields(self, path: Path) -> tuple[str, ...]:
        """Return the names in the first row of a file, or an empty tuple if the format does not support it."""
        return ()

    def _count_rows(self, path: Path) -> int:
        """Return the number of rows of a file."""
        return sum(1 for _ in self._read_rows(path))

    def _read_rows(self, path: Path) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Yield each row of a file, and its size."""
        raise NotImplementedError(f"{type(self).__name__} says neither how to read a file nor what its rows are")

    def _batch(
        self, rows: Sequence[Mapping[str, Any]], path: Path, *, columns: Sequence[str] | None, first_row: int
    ) -> RolloutBatch:
        if columns is None:
            columns = [*COLUMNS, *own_columns(name for row in rows for name in row)]
        records = records_of_rows(rows, columns=columns, file=str(path), first_row=first_row)
        self.limits.check_row_lengths(records, file=path, first_row=first_row)
        return RolloutBatch(records, str(path), first_row)


def check_lists(lists: Mapping[str, Any], *, file: str, row: int) -> None:
    """Check that the lists of one row of a dump have equal lengths.

    Args:
        lists: name in the file → list; the first one defines the length.
        file: path, for messages.
        row: position of the row, for messages.

    Raises:
        RolloutLogError: a value is no list, or has a different length.
    """
    for name, values in lists.items():
        if not isinstance(values, (list, np.ndarray)):
            raise log_error("type", f"{name} is a {type(values).__name__}, not a list", file=file, row=row)
        expected = len(next(iter(lists.values())))
        if len(values) != expected:
            raise log_error(
                "length",
                f"{name} has {len(values)} values for {expected} tokens",
                fix="the dump contradicts itself; write it again",
                file=file,
                row=row,
            )
