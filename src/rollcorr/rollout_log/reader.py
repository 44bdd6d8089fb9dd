"""Read rollout logs: files in a fixed order, batch by batch, with memory bounded by a batch.

`SOURCES` contains the formats that are recognized by a file's ending. `source=` reads any other format.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.errors import FileLimits, log_error
from rollcorr.rollout_log.frameworks import FRAMEWORKS, how_to_log
from rollcorr.rollout_log.jsonl import JsonlSource
from rollcorr.rollout_log.parquet import ParquetSource
from rollcorr.rollout_log.pickled import PickledSource
from rollcorr.rollout_log.schema import with_mask
from rollcorr.rollout_log.source import BatchLimits, LogSource, Shard
from rollcorr.run_directory.directory import RunDirectory

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def path_texts(paths: Paths) -> list[str]:
    """Convert one or several paths to texts."""
    return [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


OWN_SOURCES: tuple[LogSource, ...] = (ParquetSource(), JsonlSource())
"""Formats of this library."""
SOURCES: tuple[LogSource, ...] = (*OWN_SOURCES, PickledSource())
"""Formats of this library and of foreign dumps."""
_NO_ROLLOUTS_ERROR = (
    "this run kept no rollouts: it has metrics, and no log-probs of tokens",
    "let it keep them: rollouts=RolloutSample() of the Monitor, log.rollouts of `rollcorr train`; or name rollout logs",
)
SHARD_TOKENS = 1 << 20
"""Default minimum of tokens in a shard, unless its file ends: smaller shards cost more overhead than they save."""


def read_rollout_log(
    paths: Paths,
    *,
    columns: Iterable[str] | None = None,
    batch_size: int = 256,
    source: LogSource | None = None,
    file_limits: FileLimits | None = None,
    column_names: Mapping[str, str] | None = None,
) -> Iterator[RolloutBatch]:
    """Read the rows of logs in batches; a batch never spans two files.

    Args:
        paths: files, directories or glob patterns (also `**`), one or a sequence. Paths keep their order; the files of
            a directory or pattern are in natural order (step_9 before step_10).
        columns: the columns to read; defaults to all. A token column always adds `response_mask`.
        batch_size: most rows of a batch, which bounds the memory; defaults to 256.
        source: the format of the files; defaults to the format of their endings.
        file_limits: size limits of a file; defaults to `FileLimits()`. A `source` has its own.
        column_names: column of the log → its name in foreign files; optional. The dumps in `FRAMEWORKS` do not need
            it. A `source` has its own.

    Returns:
        An iterator over the batches.

    Raises:
        ValueError: an unknown column, one name for two columns, or a batch size below 1.
        RolloutLogError: no log there, a file that is damaged or has a newer schema, or a column of the wrong type.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    wanted, limits = None if columns is None else with_mask(columns), BatchLimits(rows=batch_size)
    # Find the files now, not at the first batch, so that an invalid path fails in the caller's line.
    files = log_files(paths, source=source)
    sources = _sources(source, file_limits, column_names)
    return (batch for file in files for batch in source_of(file, sources).read(file, columns=wanted, limits=limits))


def log_shards(
    paths: Paths,
    *,
    tokens: int = SHARD_TOKENS,
    source: LogSource | None = None,
    file_limits: FileLimits | None = None,
    column_names: Mapping[str, str] | None = None,
) -> list[Shard]:
    """Return the shards of logs, in the order of their rows. Each shard can be read independently.

    The cuts depend only on the log, not on the readers. So sums over shards, merged in their order, are the same for
    any number of readers. A shard of a Parquet file contains consecutive row groups with at least `tokens` tokens in
    total, computed from the footers. Any other file is one shard. A shard never spans two files, and files without
    rows have no shard. A shard contains the `file_limits` and the `column_names`.

    Args:
        paths: files, directories or patterns.
        tokens: least tokens of a shard of a Parquet file; defaults to `SHARD_TOKENS`.
        source: the format of the files; defaults to the format of each file's ending.
        file_limits: size limits of a file; defaults to `FileLimits()`.
        column_names: column of the log → its name in the files; optional.

    Raises:
        RolloutLogError: no log there, or a file that is damaged or has a newer schema.
    """
    shards: list[Shard] = []
    before = 0
    sources = _sources(source, file_limits, column_names)
    for file in log_files(paths, source=source):
        of_file = list(source_of(file, sources).shards(file, tokens=tokens))
        shards += [replace(shard, before=before + shard.first_row) for shard in of_file]
        before += sum(shard.rows for shard in of_file)
    return shards


def read_shard(
    shard: Shard, *, columns: Iterable[str] | None, batch_size: int = 256, batch_tokens: int = BatchLimits.tokens
) -> Iterator[RolloutBatch]:
    """Read the rows of a shard in batches.

    Args:
        shard: from `log_shards`.
        columns: the columns to read, or `None` for all. A token column always adds `response_mask`.
        batch_size: most rows of a batch; defaults to 256.
        batch_tokens: approximate most tokens of a batch, which contains at least one row. For a JSONL file, the bytes
            of text are bounded instead. Defaults to `BatchLimits.tokens`.

    Returns:
        An iterator over the batches.

    Raises:
        ValueError: an unknown column.
        RolloutLogError: as `read_rollout_log`.
    """
    return shard.source.read(
        Path(shard.file),
        columns=None if columns is None else with_mask(columns),
        limits=BatchLimits(rows=batch_size, tokens=batch_tokens),
        shard=shard,
    )


def count_rows(paths: Paths, *, source: LogSource | None = None) -> int:
    """Count the rows of logs: from the footer of Parquet files, by counting lines in JSONL.

    Args:
        paths: files, directories or patterns.
        source: the format of the files; defaults to the format of each file's ending.

    Raises:
        RolloutLogError: as `read_rollout_log`.
    """
    return sum(shard.rows for shard in log_shards(paths, source=source))


def log_files(paths: Paths, *, source: LogSource | None = None) -> list[Path]:
    """Return the files of logs, in reading order.

    Paths keep their order; the files of a directory or pattern are in natural order (step_9 before step_10). In a
    directory, select the files with the endings of its source, by default .parquet, .jsonl and .jsonl.gz. In a run
    directory, select them in its `rollouts` folder. Skip pickles (.pt, .pkl) in a folder with such files: they are
    checkpoints. Next to a framework's dumps with log-probs, skip its dumps without, by their names. Skip hidden files,
    which include the unfinished files of a writer.

    Args:
        paths: files, directories or patterns.
        source: the format of the files; defaults to the format of each file's ending.

    Raises:
        RolloutLogError: no log exists there, or a file has an unknown ending.
    """
    sources = SOURCES if source is None else (source,)
    found: dict[Path, None] = {}
    for path in path_texts(paths):
        try:
            files = _expand_directory(Path(path), sources)
        except PermissionError as error:
            raise log_error(
                "unreadable", f"it cannot be read ({error.strerror})", fix="check who may read it", file=path
            ) from error
        if not files:
            title = f"no rollout log here; looked for {', '.join(_file_endings(sources))}"
            fix = f"how a framework writes one: rollcorr check {'|'.join(framework.name for framework in FRAMEWORKS)}"
            named = next((framework for framework in FRAMEWORKS if framework.name.lower() == path.lower()), None)
            if RunDirectory(Path(path)).metrics.is_file():
                title, fix = _NO_ROLLOUTS_ERROR
            elif named is not None:
                title, fix = f"no file, but a framework (read at {named.version})", how_to_log(named)
            raise log_error("missing", title, fix=fix, file=path)
        found.update(dict.fromkeys(files))
    return list(found)


def _sources(
    source: LogSource | None, file_limits: FileLimits | None, column_names: Mapping[str, str] | None
) -> tuple[LogSource, ...]:
    """Return the given source, or every format with these limits and column names."""
    if source is not None:
        return (source,)
    return tuple(kind(file_limits, column_names) for kind in (ParquetSource, JsonlSource, PickledSource))


def source_of(path: Path, sources: Sequence[LogSource] = SOURCES) -> LogSource:
    """Return the source for the ending of a file.

    Raises:
        RolloutLogError: the ending is unknown.
    """
    for source in sources:
        if path.name.endswith(source.endings):
            return source
    raise log_error("suffix", f"a rollout log ends in {', '.join(_file_endings(sources))}", file=path)


def _file_endings(sources: Sequence[LogSource]) -> tuple[str, ...]:
    return tuple(ending for source in sources for ending in source.endings)


def _expand_directory(path: Path, sources: Sequence[LogSource]) -> list[Path]:
    if path.exists() and not path.is_dir():
        source_of(path, sources)
        if not path.is_file():  # opening a pipe waits for a writer
            raise log_error("unreadable", "no regular file", fix="copy what it gives into a file", file=path)
        return [path]

    if path.is_dir():
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        # The metrics file of a run has the ending of a log, but is no log.
        candidates = [file for file in folder.iterdir() if file != RunDirectory(path).metrics]
    else:
        candidates = [Path(name) for name in glob.glob(str(path), recursive=True)]
    named = [file for file in candidates if file.name.endswith(_file_endings(sources)) and file.name[0] != "."]
    logs = [file for file in named if file.is_file()]
    logs = [file for file in logs if not file.name.endswith(PickledSource.endings)] or logs
    for framework in FRAMEWORKS:
        # A name such as completions.jsonl is skipped only next to the same framework's dumps with log-probs.
        incomplete = [f for f in logs if any(dump.lacks and dump.is_named(f.name) for dump in framework.dumps)]
        if any(not dump.lacks and dump.is_named(f.name) for dump in framework.dumps for f in logs):
            logs = [file for file in logs if file not in incomplete]
    return sorted(logs, key=_natural_sort_key)


def _natural_sort_key(path: Path) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(path))]
