"""Sinks: outputs for the metrics of a step. A sink is one class; add new ones to this file.

    class Printer:
        def write(self, step: int, metrics: Mapping[str, float]) -> None: print(step, metrics["reward/mean"])
        def close(self) -> None: ...

`rollcorr.train.train(config, sinks=[Printer()])` and `rollcorr.Monitor(run_dir, sinks=[Printer()])` use it, through
`Sinks`, so an error of it ends no run. A class in `rollcorr.run_directory.tracker_sinks.NAMED_SINKS` can also be chosen
by its name: `sinks=["tensorboard"]`, or `log.sinks: [tensorboard]` in the YAML file of a run.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rollcorr.config.secrets import redact_text
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.durable_files import disk_error, flush_to_disk, make_folder_durably

RECENT_STEPS = 8
"""Number of steps that a terminal shows."""

LINE_EVERY = 10
"""Number of steps between two lines if there is no terminal."""

TAIL_BYTES = 1 << 20
"""Bytes at the end of a file that contain a newline: no line is longer."""


class Sink(Protocol):
    """Interface of a metrics sink. A sink may also have `flush()`, which is called before each checkpoint."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; values may be NaN or infinite."""

    def close(self) -> None:
        """Close the sink after the last step."""


class ProgressColumn(NamedTuple):
    """Console column of a metric: its heading, its name, and a format such as `{:.3f}`."""

    heading: str
    metric: str
    form: str

    def text(self, metrics: Mapping[str, float]) -> str:
        """Return the formatted metric of a step, or a dash if it is missing."""
        return self.form.format(metrics[self.metric]) if self.metric in metrics else "–"


class JsonLines:
    """Sink for `metrics.jsonl`: one JSON object per step, written without a buffer. Non-finite numbers become null.

    The file contains only complete lines: the partial line of a killed run or a failed write is removed.

    Args:
        path: the file; new lines are appended.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file = self._open_and_repair()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line. After an error the file is unchanged, and the caller can retry the same line.

        Args:
            step: number of the step.
            metrics: name → number.

        Raises:
            OSError: the disk is full or cannot be written; the message contains the fix.
        """
        line = {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        text = json.dumps(line, allow_nan=False).encode() + b"\n"
        rest = memoryview(text)
        try:
            if self._file.closed:
                self._file = self._open_and_repair()
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # Remove the partial line if possible. Close the handle, which may be stale.
            with suppress(OSError, ValueError):  # the file could not be opened again, for example
                _remove_partial_line(self._file)
            self.close()
            raise disk_error(error, self._path, needed=len(text)) from error

    def flush(self) -> None:
        """Wait until every line is on the disk."""
        flush_to_disk(self._path)

    def close(self) -> None:
        """Close the file. It has no buffer, so an error here is harmless."""
        with suppress(OSError):
            self._file.close()

    def _open_and_repair(self) -> io.FileIO:
        """Return the open file after removing a partial line."""
        # Without a buffer, closing the file does not retry a failed write.
        file = self._path.open("a+b", buffering=0)
        try:
            _remove_partial_line(file)
        except OSError:
            file.close()
            raise
        return file


def _remove_partial_line(file: io.FileIO) -> None:
    """Truncate a file after its last complete line."""
    start = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    file.truncate(start + file.read().rfind(b"\n") + 1)


class TensorBoard:
    """Sink for TensorBoard events. Each start of a run adds a file; all writes happen in the caller's thread.

    Args:
        directory: the run's directory.
        start: number of completed steps; defaults to 0. Later events of a killed run are hidden.

    Raises:
        ImportError: TensorBoard is missing; the message names the extra.
    """

    def __init__(self, directory: RunDirectory, start: int = 0) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard.summary import scalar
        except ImportError as error:
            raise ImportError(
                "events need pip install 'rollcorr[train]', or leave it out with log.tensorboard=false"
            ) from error
        self._event, self._scalar = Event, scalar

        folder = directory.tensorboard
        make_folder_durably(folder)
        is_first = not any(folder.glob("events.*"))
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)

        first = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if not is_first:
            hides_later = SessionLog(status=SessionLog.START)
            first.append(Event(wall_time=time.time(), step=start + 1, session_log=hides_later))
        self._write_events(first)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one event per metric.

        Args:
            step: number of the step.
            metrics: name → number.
        """
        now = time.time()
        self._write_events(
            [self._event(wall_time=now, step=step, summary=self._scalar(*item)) for item in metrics.items()]
        )

    def flush(self) -> None:
        """Flush every event to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # buffered events failed to write before, and that error was reported
            self._file.close()

    def _write_events(self, events: Sequence[Any]) -> None:
        texts = [event.SerializeToString() for event in events]
        try:
            for text in texts:
                self._records.write(text)
            self._file.flush()
        except OSError as error:
            raise disk_error(error, self._path, needed=sum(map(len, texts))) from error


def show_line(console: Console, message: str) -> None:
    """Print a line without secrets, above the progress bar if there is one. Ignore a closed terminal."""
    with suppress(OSError):
        console.print(redact_text(message), highlight=False, markup=False, soft_wrap=True)


class ConsoleProgress:
    """Progress bar above the newest steps in a terminal; a line every tenth step without a terminal.

    A closed terminal or pipe does not stop the run: output errors are ignored.

    Args:
        console: the output console.
        columns: the metrics to show; defaults to an empty tuple.
        steps: total number of training steps.
        start: number of completed steps; defaults to 0.
    """

    def __init__(self, console: Console, columns: Sequence[ProgressColumn] = (), *, steps: int, start: int = 0) -> None:
        self._console = console
        self._columns = columns
        self._steps = steps
        self._start = start
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=RECENT_STEPS)
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._bar = self._progress.add_task("train", total=steps, completed=start)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=False)
        if console.is_terminal:
            with suppress(OSError):
                self._live.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar. Without a terminal, print every tenth step, the first and the last.

        Args:
            step: number of the step.
            metrics: name → number.
        """
        self._recent.append((step, metrics))
        self._progress.update(self._bar, completed=step)

        is_due = step % LINE_EVERY == 0 or step in (self._start + 1, self._steps)
        if is_due and not self._console.is_terminal:
            values = "  ".join(f"{column.heading} {column.text(metrics)}" for column in self._columns)
            with suppress(OSError):
                self._console.print(f"step {step}/{self._steps}  {values}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the display; the newest steps stay on the screen."""
        if self._console.is_terminal:
            with suppress(OSError):
                self._live.stop()

    def _render(self) -> Group:
        table = Table("step", *(column.heading for column in self._columns), box=None, padding=(0, 2, 0, 0))
        for table_column in table.columns:
            table_column.justify = "right"
        for step, metrics in list(self._recent):  # the display runs in its own thread
            table.add_row(str(step), *(column.text(metrics) for column in self._columns))
        return Group(self._progress.get_renderable(), table)
