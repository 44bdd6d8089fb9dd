"""What a file format must offer so that its rows can be read as a rollout log.

Parquet, JSONL and the pickles of other frameworks are three sources (`rollcorr.rollout_log.reader.SOURCES`). They know
the dumps in `rollcorr.rollout_log.frameworks`. Any other dump is one more class: pass it as `source=` to
`read_rollout_log` or `log_shards`. A dump of JSON lines only needs a subclass of `JsonlSource` whose `row` renames the
fields.
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
    """What ends a batch, whichever comes first. It bounds the memory of a reader, however long the rows are.

    Attributes:
        rows: most rows.
        tokens: about how many tokens, one row at least; where a shard knows how long its rows are.
        text_bytes: bytes of text, where rows are text; as Python objects they take about twice as much.
    """

    rows: int = 256
    tokens: int = 1 << 18
    text_bytes: int = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Consecutive rows of one file.

    Attributes:
        file: the file, as it was given.
        source: what reads it.
        rows: how many rows.
        first_row: position of the first one in the file.
        before: rows of the whole log before it, over all files.
        row_groups: the row groups of a Parquet file, from the first up to but without the second; None elsewhere.
        row_tokens: tokens of a row, or what its kept sets cost in tokens if that is more: the mean of the row group
            where it is largest. 0 where the source does not know.
    """

    file: str
    source: LogSource
    rows: int
    first_row: int = 0
    before: int = 0
    row_groups: tuple[int, int] | None = None
    row_tokens: int = 0


class LogSource:
    """A file format. Its state are the limits of its files, and others' names of columns; it can be pickled.

    Here a file is one shard, and a subclass says what its rows are. A format that can be read in parts overrides
    `shards` and `read`.

    Args:
        limits: what a file may hold.
        names: column of the log → its name in the file.

    Attributes:
        endings: how the names of its files end.

    Raises:
        ValueError: a name is no column of the log.
    """

    endings: tuple[str, ...]
    _most_size = "text_bytes"  # of `BatchLimits`: what the size of a row counts

    def __init__(self, limits: FileLimits | None = None, names: Mapping[str, str] | None = None) -> None:
        self.limits = limits or FileLimits()
        self.names = dict(names or {})
        check_column_names(self.names)

    def shards(self, path: Path, *, tokens: int) -> Iterator[Shard]:
        """Cut a file where it can be read apart, into pieces of about `tokens` tokens at least; none without rows.

        Args:
            path: the file.
            tokens: least tokens of a piece.

        Raises:
            RolloutLogError: the file is damaged or has a newer schema.
        """
        rows = self._count(path)
        if rows:
            yield Shard(file=str(path), source=self, rows=rows)

    def read(
        self, path: Path, *, columns: Sequence[str] | None, limits: BatchLimits, shard: Shard | None = None
    ) -> Iterator[RolloutBatch]:
        """The rows of a file, or of one of its shards, batch by batch; `columns` None is all of the schema.

        Args:
            path: the file.
            columns: which to read; None is all of the schema.
            limits: how much a batch may hold.
            shard: the part that is wanted. None: the whole file.

        Raises:
            RolloutLogError: the file is damaged, or a value does not fit its column.
        """
        held: list[Mapping[str, Any]] = []
        first_row = held_size = 0
        for row, size in self._rows(path):
            held.append(row)
            held_size += size
            if len(held) == limits.rows or held_size >= getattr(limits, self._most_size):
                yield self._batch(held, path, columns=columns, first_row=first_row)
                first_row, held, held_size = first_row + len(held), [], 0
        if held:
            yield self._batch(held, path, columns=columns, first_row=first_row)

    def fields(self, path: Path) -> tuple[str, ...]:
        """The names in the first row of a file, where that can be told."""
        return ()

    def _count(self, path: Path) -> int:
        """Rows of a file."""
        return sum(1 for _ in self._rows(path))

    def _rows(self, path: Path) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Each row of a file, and its size."""
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
    """Check the lists of one row of a dump: the first says how long they are.

    Args:
        lists: by their names in the file.
        file: for messages.
        row: for messages.

    Raises:
        RolloutLogError: one is no list, or has another length.
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
