"""Writing rollout logs: row groups into a hidden file that takes its name only when it is whole."""

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
    """A rollout log being written: `with RolloutLogWriter("step_000003.parquet") as log: log.write(batch)`.

    Rows go to a hidden file beside the target, which takes the target's name on `close`, synced to the disk. So the
    target is a whole file or is not there: after SIGKILL or a power cut the hidden `.NAME.tmp-PID-…` file is left and
    readers pass it over. Both files have mode 0600, because rollouts contain prompts. An exception in the `with` body,
    Ctrl-C among them, still closes the log with every batch that `write` had taken; with none, no file is made. Any
    number of writers may work in one directory.

    Args:
        path: .parquet, .jsonl or .jsonl.gz. Missing directories are made.
        overwrite: replace a file of that name on `close`; without it one is an error, now and at `close`.
        row_group_rows: most rows of a Parquet row group; a batch is always at least one.

    Raises:
        FileExistsError: the file exists and `overwrite` is false.
        RolloutLogError: the path has another ending.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False, row_group_rows: int = 1024) -> None:
        self.path = Path(path)
        self.rows = 0
        self._overwrite = overwrite
        source_of(self.path, OWN_SOURCES)  # another ending is an error, before anything is made
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
        """Append the rows of a batch; they are in the log whole or not at all.

        Raises:
            RolloutLogError: a token column is not as long as its response, or a column of the user's own is new in
                this batch, or of another type.
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
        except RolloutLogError:  # nothing was written
            raise
        except Exception:  # the disk failed: what is on it cannot be finished
            self.discard()
            raise
        self.rows += len(batch)

    def close(self) -> None:
        """Finish the file and give it its name. Closing again does nothing.

        Raises:
            FileExistsError: a file of that name has appeared meanwhile; the rows stay in the file that is named.
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
        except OSError:  # what could not be finished would only fill the disk
            self.discard()
            raise
        self._sink = None
        if not self._overwrite:
            _rename_new(self._hidden, self.path)

    def discard(self) -> None:
        """Drop everything written; no file is left."""
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
    """Write the rows of one or many logs as one file of the form that its ending says; returns the number of rows.

    Nothing is left when the source cannot be read to its end, after Ctrl-C too.

    Args:
        source: as in `read_rollout_log`; the dumps in `FRAMEWORKS` as well.
        target: .parquet, .jsonl or .jsonl.gz.
        batch_size: most rows in memory at once.
        overwrite: replace the target.
        file_limits: what a file may hold; None for the defaults.
        column_names: column of the log → its name in the files.
        required: columns that each file must record.
        on_rows: called with the rows since the last call, and the rows of the whole source.

    Raises:
        FileExistsError: the target exists and `overwrite` is false.
        RolloutLogError: as `read_rollout_log`, or a file does not record a required column in its first batch.
    """
    # Before the source is read: a target of another form, or one that exists, is an error that costs nothing.
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

    def _opened(self, own: list[pa.Field]) -> pq.ParquetWriter:
        """The file, which is made with the first batch; that one says which columns of the user's own there are."""
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
        # Token columns hardly repeat: a dictionary costs time, and could merge bit patterns of NaN.
        flat = [column.name for column in COLUMNS.values() if column.type in ("int64", "string")]
        open(self._path, "xb", opener=_open_private).close()  # Arrow would let the umask decide who reads it
        self._writer = pq.ParquetWriter(
            self._path,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=flat,
            write_statistics=flat,
            # Without a checksum, a flipped bit in a log-prob is another log-prob.
            write_page_checksum=True,
        )
        return self._writer

    def write(self, batch: RolloutBatch) -> None:
        writer = self._opened([batch.records.schema.field(name) for name in own_columns(batch.columns)])
        arrays = [
            batch.records.column(field.name) if field.name in batch.columns else pa.nulls(len(batch), field.type)
            for field in self._schema
        ]
        writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._rows)

    def close(self) -> None:
        self._opened([]).close()


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
        self._file.truncate(self._whole)  # an interrupt may have left part of a batch
        self._file.close()


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner reads: rollouts contain prompts."""
    return os.open(path, flags, 0o600)


def _rename_new(source: Path, target: Path) -> None:
    """Rename unless the target exists: a hard link cannot replace a file, so two writers cannot both succeed."""
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
