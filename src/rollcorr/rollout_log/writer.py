"""Write rollout logs atomically: row groups go to a hidden file, which is renamed when it is complete."""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rollcorr.rollout_log.arrow import pa, pq
from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.errors import FileLimits, RolloutLogError, log_error
from rollcorr.rollout_log.frameworks import missing_column
from rollcorr.rollout_log.jsonl import to_lines
from rollcorr.rollout_log.reader import OWN_SOURCES, Paths, log_shards, read_shard, source_of
from rollcorr.rollout_log.schema import COLUMNS, arrow_schema, own_columns


class RolloutLogWriter:
    """Writer of a rollout log: `with RolloutLogWriter("step_000003.parquet") as log: log.write(batch)`.

    Rows go to a hidden file in the target's folder. `close` flushes it to the disk and renames it to the target. So the
    target is complete or missing: after SIGKILL or a power cut, the hidden `.NAME.tmp-PID-…` file remains, and readers
    skip it. Both files have mode 0600, because rollouts contain prompts. After an exception in the `with` body, also
    Ctrl-C, the log is closed with every batch that `write` accepted. If it accepted no batch, no file is made. Any
    number of writers may use one directory.

    Args:
        path: .parquet, .jsonl or .jsonl.gz. Missing directories are made.
        overwrite: replace an existing file on `close`. By default, an existing file is an error, now and at `close`.
        row_group_rows: most rows of a Parquet row group; defaults to 1024. Each batch starts a new row group.

    Raises:
        FileExistsError: the file exists and `overwrite` is false.
        RolloutLogError: the path has an unknown ending.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False, row_group_rows: int = 1024) -> None:
        self.path = Path(path)
        self.rows = 0
        self._overwrite = overwrite
        source_of(self.path, OWN_SOURCES)  # reject an unknown ending before making files
        if self.path.exists() and not overwrite:
            raise FileExistsError(f"{self.path} exists; choose another name or pass overwrite=True")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._hidden = self.path.with_name(f".{self.path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        self._sink: _ParquetSink | _JsonlSink | None
        if self.path.suffix == ".parquet":
            self._sink = _ParquetSink(self._hidden, row_group_rows)
        else:
            self._sink = _JsonlSink(self._hidden, compress=self.path.suffix == ".gz")

    def write(self, batch: RolloutBatch) -> None:
        """Append the rows of a batch atomically.

        Raises:
            RolloutLogError: the length of a token column differs from the response, or a user's own column is new in
                this batch or has a different type.
            OSError: the disk failed; the log is dropped.
            ValueError: the writer is closed.
        """
        if self._sink is None:
            raise ValueError(f"{self.path} is closed; open another writer")
        batch.check_lengths()
        if not len(batch):
            return
        try:
            self._sink.write(batch)
        except RolloutLogError:  # no row was written
            raise
        except Exception:  # the disk failed: the file cannot be completed
            self.discard()
            raise
        self.rows += len(batch)

    def close(self) -> None:
        """Complete the file and rename it to the target. A second call has no effect.

        Raises:
            FileExistsError: the target was created meanwhile; the rows stay in the file that the message names.
            OSError: the disk failed; the log is dropped.
        """
        if self._sink is None:
            return
        try:
            self._sink.close()
            with self._hidden.open("rb+") as file:
                os.fsync(file.fileno())
            if self._overwrite:
                os.replace(self._hidden, self.path)
        except OSError:  # an incomplete file would only fill the disk
            self.discard()
            raise
        self._sink = None
        if not self._overwrite:
            _rename_without_replacing(self._hidden, self.path)

    def discard(self) -> None:
        """Drop all rows and delete the file."""
        if self._sink is not None:
            with contextlib.suppress(OSError, ValueError):  # it may be closed
                self._sink.close()
            with contextlib.suppress(OSError):
                self._hidden.unlink(missing_ok=True)
            self._sink = None

    def __enter__(self) -> RolloutLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self.rows:
            self.close()
        else:
            self.discard()


def convert_log(
    source: Paths,
    target: str | os.PathLike[str],
    *,
    batch_size: int = 256,
    overwrite: bool = False,
    file_limits: FileLimits | None = None,
    column_names: Mapping[str, str] | None = None,
    required: Sequence[str] = (),
    on_rows: Callable[[int, int], None] | None = None,
) -> int:
    """Convert logs to one file in the format of its ending.

    No file remains if the source cannot be read completely, also after Ctrl-C.

    Args:
        source: as in `read_rollout_log`; also the dumps in `FRAMEWORKS`.
        target: .parquet, .jsonl or .jsonl.gz.
        batch_size: most rows in memory at once; defaults to 256.
        overwrite: replace the target; defaults to False.
        file_limits: size limits of a file; defaults to `FileLimits()`.
        column_names: column of the log → its name in the files; optional.
        required: columns that each file must record; defaults to an empty tuple.
        on_rows: callback with the rows since the last call, and the rows of the complete source; optional.

    Returns:
        Number of rows.

    Raises:
        FileExistsError: the target exists and `overwrite` is false.
        RolloutLogError: as `read_rollout_log`, or a file does not record a required column in its first batch.
    """
    # Check the target first: reject an unknown format or an existing file before reading the source.
    writer = RolloutLogWriter(target, overwrite=overwrite)
    try:
        shards = log_shards(source, file_limits=file_limits, column_names=column_names)
        total = sum(shard.rows for shard in shards)
        for shard in shards:
            for batch in read_shard(shard, columns=None, batch_size=batch_size):
                missing = [column for column in required if not batch.has(column)]
                if missing and batch.first_row == 0:
                    raise missing_column(missing[:1], batch, shard.source)
                writer.write(batch)
                if on_rows is not None:
                    on_rows(len(batch), total)
    except BaseException:
        writer.discard()
        raise
    writer.close()
    return writer.rows


class _ParquetSink:
    def __init__(self, path: Path, row_group_rows: int) -> None:
        self._schema = arrow_schema()
        self._path = path
        self._rows = row_group_rows
        self._writer: pq.ParquetWriter | None = None

    def _open_writer(self, own: list[pa.Field]) -> pq.ParquetWriter:
        """Return the writer. The first batch creates it, and defines the user's own columns."""
        if self._writer is not None:
            for field in own:
                known = self._schema.field(field.name).type if field.name in self._schema.names else "no such column"
                if field.type != known:
                    raise log_error(
                        "type",
                        f"{field.type} in this batch, and {known} in the first",
                        fix="give every batch of a file the same columns of your own, of the same types",
                        column=field.name,
                    )
            return self._writer
        for field in own:
            self._schema = self._schema.append(field)
        # Values of token columns rarely repeat: a dictionary costs time, and could merge bit patterns of NaN.
        flat = [column.name for column in COLUMNS.values() if column.type in ("int64", "string")]
        open(self._path, "xb", opener=_open_private).close()  # Arrow would use the umask's permissions
        self._writer = pq.ParquetWriter(
            self._path,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=flat,
            write_statistics=flat,
            # Without a checksum, a flipped bit in a log-prob would not be detected.
            write_page_checksum=True,
        )
        return self._writer

    def write(self, batch: RolloutBatch) -> None:
        writer = self._open_writer([batch.records.schema.field(name) for name in own_columns(batch.columns)])
        arrays = [
            batch.records.column(field.name) if field.name in batch.columns else pa.nulls(len(batch), field.type)
            for field in self._schema
        ]
        writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._rows)

    def close(self) -> None:
        self._open_writer([]).close()


class _JsonlSink:
    def __init__(self, path: Path, *, compress: bool) -> None:
        self._file = open(path, "xb", buffering=0, opener=_open_private)  # noqa: SIM115 (closed by `close`)
        self._compress = compress
        self._whole = 0

    def write(self, batch: RolloutBatch) -> None:
        text = "".join(to_lines(batch)).encode()
        self._file.seek(self._whole)
        rest = memoryview(gzip.compress(text, compresslevel=1) if self._compress else text)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._whole = self._file.tell()

    def close(self) -> None:
        self._file.truncate(self._whole)  # drop the partial batch of an interrupted write
        self._file.close()


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read, because rollouts contain prompts."""
    return os.open(path, flags, 0o600)


def _rename_without_replacing(source: Path, target: Path) -> None:
    """Rename a file unless the target exists. A hard link cannot replace a file, so only one writer succeeds."""
    try:
        os.link(source, target)
    except OSError:  # the name is taken, or the file system has no hard links
        if os.path.lexists(target):
            raise FileExistsError(
                f"{target} was written by another process meanwhile; this log is whole in {source}, rename it"
            ) from None
        os.replace(source, target)
    else:
        source.unlink()
