"""The Parquet form: row groups that are streamed, and counted from the footer alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollcorr.rollout_log.arrow import pa, pq
from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.errors import log_error
from rollcorr.rollout_log.schema import COLUMNS, TOKEN_COLUMNS, VERSION_KEY, check_version, conform, own_fields
from rollcorr.rollout_log.source import BatchLimits, Shard

# Bytes that a column reads ahead. Without it, or with Arrow's own pre-buffering, a whole row group of any size is held.
_READ_BUFFER = 1 << 16
# Ids of kept sets that take about as much memory as a token with its log-probs, when both are looked at.
_KEPT_IDS_PER_TOKEN = 8


class ParquetSource:
    """Parquet files: this library's, and those of others that use the names of the schema."""

    endings: tuple[str, ...] = (".parquet",)

    def shards(self, path: Path, *, tokens: int) -> Iterator[Shard]:
        """As many row groups as make up `tokens`, one at least; from the footer."""
        with _open(path) as file:
            sizes = [_size(file.metadata.row_group(group)) for group in range(file.metadata.num_row_groups)]

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
        """The rows of a file, or of a shard of it, whose row groups say how many rows make too many tokens."""
        groups, first_row, rows = None, 0, limits.rows
        if shard is not None and shard.row_groups is not None:
            groups, first_row = list(range(*shard.row_groups)), shard.first_row
            rows = min(rows, max(1, limits.tokens // max(shard.row_tokens, 1)))

        with _open(path) as file:
            wanted = [*COLUMNS, *own_fields(file.schema_arrow)] if columns is None else columns
            names = [name for name in file.schema_arrow.names if name in wanted]
            if not names:
                title = f"none of the columns {', '.join(wanted)}; it has {file.schema_arrow.names}"
                raise log_error("missing", title, file=path)
            for records in file.iter_batches(batch_size=rows, columns=names, row_groups=groups):
                yield RolloutBatch(conform(records, file=str(path), first_row=first_row), str(path), first_row)
                first_row += len(records)


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    """An open Parquet file of a version that can be read. What Arrow says of a damaged file is told with its name."""
    try:
        with pq.ParquetFile(path, buffer_size=_READ_BUFFER, pre_buffer=False) as file:
            check_version((file.metadata.metadata or {}).get(VERSION_KEY.encode()), file=str(path))
            yield file
    except (pa.ArrowException, OSError) as error:
        fix = "copy or write it again; the writer of this library leaves whole files only"
        raise log_error("unreadable", f"not a whole Parquet file: {error}", fix=fix, file=path) from error


def _size(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Rows of a row group, and its tokens or what kept sets cost in tokens. Empty and null lists count as 1."""
    columns = [group.column(i) for i in range(group.num_columns)]
    values = {column.path_in_schema.split(".")[0]: column.num_values for column in columns}
    tokens = max((values[name] for name in TOKEN_COLUMNS if name in values), default=0)
    return group.num_rows, max(tokens, values.get("kept_ids", 0) // _KEPT_IDS_PER_TOKEN)
