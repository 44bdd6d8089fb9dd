"""Shards: rollout logs cut where they can be read apart, at row groups of Parquet files and at files.

Where the cuts are depends on the log alone, never on who reads it. So sums over shards, merged in their order, are the
same for any number of readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollcorr.rollout_log.arrow import pq
from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.jsonl import count_lines, read_lines
from rollcorr.rollout_log.reader import Paths, log_files, log_suffix, open_parquet, read_row_groups, with_mask
from rollcorr.rollout_log.schema import TOKEN_COLUMNS

SHARD_TOKENS = 1 << 20
"""Tokens that a shard has at least, unless its file ends: less work than that is not worth handing out."""
BATCH_TOKENS = 1 << 18
"""About how many tokens are in memory at once."""
_KEPT_IDS_A_TOKEN = 8
"""Ids of kept sets that take about as much memory as a token with its log-probs, when both are looked at."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Consecutive rows of one file.

    Attributes:
        file: the file, as it was given.
        rows: how many rows.
        first_row: position of the first one in the file.
        before: rows of the whole log before it, over all files.
        row_groups: the row groups of a Parquet file, from the first up to but without the second; None for JSONL.
        row_tokens: tokens of a row, or what its kept sets cost in tokens if that is more: the mean of the row group
            where it is largest; 0 for JSONL, where nobody knows.
    """

    file: str
    rows: int
    first_row: int
    before: int
    row_groups: tuple[int, int] | None
    row_tokens: int


def log_shards(paths: Paths, *, tokens: int = SHARD_TOKENS) -> list[Shard]:
    """The shards of one or many logs, in the order of their rows; from the footers of Parquet files.

    A shard is as many row groups as make up `tokens`, one at least, and never spans two files. A JSONL file is one
    shard. Files without rows have none.

    Raises:
        RolloutLogError: no log there, or a file that is damaged or has a newer schema.
    """
    shards: list[Shard] = []
    before = 0
    for file in log_files(paths):
        of_file = list(_shards_of(file, before, tokens))
        before += sum(shard.rows for shard in of_file)
        shards += of_file
    return shards


def read_shard(
    shard: Shard, *, columns: Iterable[str], batch_size: int = 256, batch_tokens: int = BATCH_TOKENS
) -> Iterator[RolloutBatch]:
    """The rows of a shard, batch by batch.

    Args:
        shard: from `log_shards`.
        columns: the columns to read; `response_mask` is always read along with a token column.
        batch_size: most rows of a batch.
        batch_tokens: about how many tokens a batch may have; one row at least, and the rows of a JSONL file are
            bounded by their text instead.

    Raises:
        ValueError: an unknown column.
        RolloutLogError: as `read_rollout_log`.
    """
    wanted, path = with_mask(columns), Path(shard.file)
    if shard.row_groups is None:
        return read_lines(path, columns=wanted, batch_size=batch_size)
    rows = min(batch_size, max(1, batch_tokens // max(shard.row_tokens, 1)))
    return read_row_groups(
        path, columns=wanted, batch_size=rows, row_groups=range(*shard.row_groups), first_row=shard.first_row
    )


def _shards_of(path: Path, before: int, tokens: int) -> Iterator[Shard]:
    if log_suffix(path) != ".parquet":
        rows = count_lines(path)
        if rows:
            yield Shard(file=str(path), rows=rows, first_row=0, before=before, row_groups=None, row_tokens=0)
        return
    with open_parquet(path) as file:
        sizes = [_size(file.metadata.row_group(group)) for group in range(file.metadata.num_row_groups)]
    first_row = start = 0
    while start < len(sizes):
        end, rows, held, longest = start, 0, 0, 0
        while end < len(sizes) and held < tokens:
            rows, held = rows + sizes[end][0], held + sizes[end][1]
            longest = max(longest, sizes[end][1] // max(sizes[end][0], 1))
            end += 1
        if rows:
            yield Shard(
                file=str(path),
                rows=rows,
                first_row=first_row,
                before=before + first_row,
                row_groups=(start, end),
                row_tokens=longest,
            )
        first_row, start = first_row + rows, end


def _size(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Rows of a row group, and its tokens or what kept sets cost in tokens. Empty and null lists count as 1."""
    columns = [group.column(i) for i in range(group.num_columns)]
    values = {column.path_in_schema.split(".")[0]: column.num_values for column in columns}
    tokens = max((values[name] for name in TOKEN_COLUMNS if name in values), default=0)
    return group.num_rows, max(tokens, values.get("kept_ids", 0) // _KEPT_IDS_A_TOKEN)
