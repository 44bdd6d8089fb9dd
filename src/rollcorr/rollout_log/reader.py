"""Reading rollout logs: files in a fixed order, batch by batch, with memory bounded by a batch."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollcorr.rollout_log.arrow import pa, pq
from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.errors import Problem, RolloutLogError
from rollcorr.rollout_log.jsonl import count_lines, read_lines
from rollcorr.rollout_log.schema import COLUMNS, TOKEN_COLUMNS, VERSION_KEY, check_columns, check_version, conform

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# Bytes that a column reads ahead. Without it, or with Arrow's own pre-buffering, a whole row group of any size is held.
_READ_BUFFER = 1 << 16


def read_rollout_log(
    paths: Paths, *, columns: Iterable[str] | None = None, batch_size: int = 256
) -> Iterator[RolloutBatch]:
    """The rows of one or many logs, batch by batch; a batch never spans two files.

    Args:
        paths: files, directories or glob patterns (`**` too), one or a sequence. See `log_files` for the order.
        columns: the columns to read; None is all. `response_mask` is always read along with a token column.
        batch_size: most rows of a batch: what is in memory at once.

    Raises:
        ValueError: an unknown column, or a batch size below 1.
        RolloutLogError: no log there, a file that is damaged or has a newer schema, or a column of the wrong type.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    wanted = None if columns is None else with_mask(columns)
    files = log_files(paths)  # found now, not at the first batch: a wrong path is told where it was written
    return (batch for file in files for batch in _read_file(file, wanted, batch_size))


def count_rows(paths: Paths) -> int:
    """Rows of one or many logs: from the footer of Parquet files, by counting lines in JSONL.

    Raises:
        RolloutLogError: as `read_rollout_log`.
    """
    return sum(_count_file(file) for file in log_files(paths))


def log_files(paths: Paths) -> list[Path]:
    """The files of one or many logs, in the order they are read.

    Paths keep their order; the files of a directory or pattern come in natural order (step_9 before step_10). A
    directory gives its .parquet, .jsonl and .jsonl.gz files, or, if it is a run, those of its `rollouts` folder.
    Hidden files, among them the unfinished ones of a writer, are passed over.

    Raises:
        RolloutLogError: nothing is there, or a file has another ending.
    """
    found: dict[Path, None] = {}
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        files = _expand(Path(path))
        if not files:
            message = f"no rollout log here; looked for {', '.join(SUFFIXES)}"
            raise RolloutLogError(Problem(code="missing", message=message, file=str(path)))
        found.update(dict.fromkeys(files))
    return list(found)


def log_suffix(path: Path) -> str:
    """Which of `SUFFIXES` a path ends in.

    Raises:
        RolloutLogError: none of them.
    """
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return suffix
    raise RolloutLogError(
        Problem(code="suffix", message=f"a rollout log ends in {', '.join(SUFFIXES)}", file=str(path))
    )


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        return sorted((file for file in folder.iterdir() if _is_log(file)), key=_natural)
    if path.exists():
        log_suffix(path)
        return [path]
    return sorted((file for file in map(Path, glob.glob(str(path), recursive=True)) if _is_log(file)), key=_natural)


def _is_log(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.name.endswith(SUFFIXES)


def _natural(path: Path) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(path))]


def with_mask(columns: Iterable[str]) -> list[str]:
    """Columns of the log, with `response_mask` beside any token column.

    Raises:
        ValueError: an unknown column.
    """
    names = [columns] if isinstance(columns, str) else list(columns)
    check_columns(names)
    return [*names, "response_mask"] if set(names) & set(TOKEN_COLUMNS) else names


def _read_file(path: Path, columns: list[str] | None, batch_size: int) -> Iterator[RolloutBatch]:
    if log_suffix(path) == ".parquet":
        return read_row_groups(path, columns=columns, batch_size=batch_size)
    return read_lines(path, columns=columns, batch_size=batch_size)


def read_row_groups(
    path: Path, *, columns: list[str] | None, batch_size: int, row_groups: range | None = None, first_row: int = 0
) -> Iterator[RolloutBatch]:
    """Batches of a Parquet file, or of consecutive row groups of it, the first of which starts at `first_row`.

    Raises:
        RolloutLogError: as `read_rollout_log`.
    """
    with open_parquet(path) as file:
        names = [name for name in file.schema_arrow.names if name in (COLUMNS if columns is None else columns)]
        if not names:
            message = f"none of the columns {', '.join(columns or COLUMNS)}; it has {file.schema_arrow.names}"
            raise RolloutLogError(Problem(code="missing", message=message, file=str(path)))
        groups = None if row_groups is None else list(row_groups)
        for records in file.iter_batches(batch_size=batch_size, columns=names, row_groups=groups):
            yield RolloutBatch(conform(records, file=str(path), first_row=first_row), str(path), first_row)
            first_row += len(records)


def _count_file(path: Path) -> int:
    if log_suffix(path) != ".parquet":
        return count_lines(path)
    with open_parquet(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """An open Parquet file of a version that can be read; what Arrow says of a damaged file, with its name."""
    try:
        with pq.ParquetFile(path, buffer_size=_READ_BUFFER, pre_buffer=False) as file:
            check_version((file.metadata.metadata or {}).get(VERSION_KEY.encode()), file=str(path))
            yield file
    except (pa.ArrowException, OSError) as error:
        message = f"not a whole Parquet file: {error}"
        hint = "copy or write it again; the writer of this library leaves whole files only"
        raise RolloutLogError(Problem(code="unreadable", message=message, hint=hint, file=str(path))) from error
