"""The thread that does all file and tracker I/O of a Monitor, so that no training step waits for a disk or a server.

    step     hands over a line, and the rows of its rollout log; both are on the host, and nobody changes them
    thread   writes the rows, then the line, then tells the sinks: a step whose line can be read has its rows too

What cannot be written waits in memory, and is tried again when the next step arrives. At most `FAILED_LINES` lines
wait after a failure; older ones are lost, and counted. At most `LOG_BYTES` bytes of rollout rows wait, or the rows of
one step; the oldest are dropped, and counted. A line that was never tried is never dropped.
"""

from __future__ import annotations

import contextvars
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

from rollcorr.monitor.rollout_sample import RolloutRows
from rollcorr.run_directory import JsonLines
from rollcorr.run_directory.durable_files import write_text_durably
from rollcorr.run_directory.tracker_sinks import Sinks

logger = logging.getLogger("rollcorr.monitor")

FAILED_LINES = 1000
"""Lines of metrics.jsonl that are kept after a write has failed."""
LOG_BYTES = 128 << 20
"""Bytes of rollout rows that wait to be written, beside those of one step."""
FULL_QUEUE = 1000
"""Lines from which on a step waits a moment for the thread."""
PATIENCE = 0.02
"""Seconds that a step waits for room in the queue, at most."""
CLOSING_SECONDS = 30.0
"""Seconds that `flush`, `close` and the end of the program wait for the thread, at most."""


LINES, ROWS, CONFIG, SINKS = "metrics.jsonl", "the rollout log", "config.yaml", "the sinks"


class _Task(NamedTuple):
    """Something that was taken out of the queue: its kind, how it is written, and how it goes back after a failure."""

    kind: str
    write: Callable[[], None]
    put_back: Callable[[], None]


class RunWriter:
    """Writes what a Monitor leaves, in a thread of its own. Only `flush` and `close` wait for files and trackers.

    Args:
        file: metrics.jsonl; None where another rank writes it.
        sinks: get each step after the file.
        config: path of config.yaml.

    Attributes:
        lost_lines: lines that were given up.
        lost_logs: steps whose rollout rows were given up.
    """

    def __init__(self, file: JsonLines | None, sinks: Sinks | None, config: Path) -> None:
        self.lost_lines = self.lost_logs = 0
        self._file, self._sinks, self._config_path = file, sinks, config
        self._config: str | None = None
        self._rows: deque[RolloutRows] = deque()
        self._lines: deque[tuple[int, Mapping[str, float]]] = deque()
        self._unsent: deque[tuple[int, Mapping[str, float]]] = deque()
        self._failing: set[str] = set()
        self._error: BaseException | None = None

        # A request is answered when everything that waited was tried once.
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._is_closing = False

        # No thread survives `fork`. At its end a program waits for this one, but not for ever.
        self._process, self._has_told_fork = os.getpid(), False
        target = contextvars.copy_context().run  # trackers keep their run in a context variable
        self._thread = threading.Thread(target=target, args=(self._work,), name="rollcorr-monitor", daemon=True)
        self._thread.start()
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    @property
    def is_in_child(self) -> bool:
        """Whether this is a forked child of the process that writes; the first time, an error is logged."""
        if os.getpid() == self._process:
            return False
        if not self._has_told_fork:
            self._has_told_fork = True
            logger.error(
                "process %d is a forked child: the Monitor of process %d writes nothing here; make one of its own in "
                "the child, with another directory",
                os.getpid(),
                self._process,
            )
        return True

    @property
    def unwritten_lines(self) -> int:
        """Lines that could not be written yet, or were given up."""
        return self.lost_lines + (len(self._lines) if LINES in self._failing else 0)

    def put(self, step: int, metrics: Mapping[str, float], rows: RolloutRows | None) -> None:
        """Hand over a step. This takes about `PATIENCE` at most, also where the disk hangs.

        Args:
            step: its number.
            metrics: nobody changes them any more.
            rows: for its rollout log.
        """
        if self.is_in_child:
            return
        with self._changed:
            if self._file is not None:
                self._lines.append((step, metrics))
            if self._sinks is not None:
                self._unsent.append((step, metrics))
            if rows is not None:
                self._rows.append(rows)
            self._ask()

            # A program that is faster than its disk for a moment waits here, and loses no rows.
            self._changed.wait_for(lambda: self._has_room() or self._asked == self._answered, PATIENCE)
            while not self._has_room() and len(self._rows) > 1:
                dropped = self._rows.popleft()
                self._lose(ROWS, f"the rows of step {dropped.step} were dropped: the disk is too slow, or full")

    def put_config(self, text: str) -> None:
        """Hand over the text of config.yaml."""
        if not self.is_in_child:
            with self._changed:
                self._config = text
                self._ask()

    def flush(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until everything was tried, `seconds` at most; returns whether all of it is written."""
        if self.is_in_child:
            return False
        with self._changed:
            asked = self._ask()
            was_tried = self._changed.wait_for(lambda: self._answered >= asked, seconds)
            return was_tried and not (self._config or self._rows or self._lines)

    def close(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Try what waits once more, and end the thread; returns whether it has ended within `seconds`."""
        self._at_exit.cancel()
        until = time.monotonic() + seconds
        with self._changed:
            self._is_closing = True
            self._ask()
        self._thread.join(max(0.0, until - time.monotonic()))

        # A thread that hangs in a call must write nothing after that: another process may go on with the run.
        with self._changed:
            if self._lines or self._rows:
                logger.error("%d steps and %d rollout logs are not written", len(self._lines), len(self._rows))
            for waiting in (self._lines, self._rows, self._unsent):
                waiting.clear()
        return not self._thread.is_alive()

    def report(self, line: str, error: BaseException) -> None:
        """Log an error, and keep it for `take_error`."""
        logger.error("%s", line)
        self._error = self._error or error

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call."""
        error, self._error = self._error, None
        return error

    def _ask(self) -> int:
        self._asked += 1
        self._changed.notify_all()
        return self._asked

    def _has_room(self) -> bool:
        return len(self._lines) < FULL_QUEUE and sum(rows.bytes for rows in self._rows) <= LOG_BYTES

    def _work(self) -> None:
        """The thread: one round for each request, or for several that came together."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._answered)
                asked = self._asked
            self._write_all()
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
                if self._is_closing and asked == self._asked:
                    break
        if self._file is not None:
            self._file.close()

    def _write_all(self) -> None:
        """Try everything that waits; after a failure, nothing more of its kind."""
        failed: set[str] = set()
        while (task := self._next(failed)) is not None:
            try:
                task.write()
            except OSError as error:
                failed.add(task.kind)
                with self._changed:
                    task.put_back()
                    while task.kind == LINES and len(self._lines) > FAILED_LINES:
                        step, _ = self._lines.popleft()
                        self._lose(LINES, f"step {step} is lost: {FAILED_LINES} steps wait to be written")
                self._tell_failure(task.kind, error)
            except Exception as error:  # such as rows that no log can hold: another attempt would end alike
                self._lose(task.kind, f"{task.kind} was not written: {error}")
                self._error = self._error or error
            else:
                if task.kind in self._failing:
                    self._failing.discard(task.kind)
                    logger.warning("%s is written again", task.kind)

    def _next(self, failed: set[str]) -> _Task | None:
        """Take out what comes next: the rows of a step, its line, then the sinks. None: nothing that has not failed."""
        with self._changed:
            if self._config is not None and CONFIG not in failed:
                return self._config_task()
            step = self._lines[0][0] if self._lines and LINES not in failed else math.inf
            if self._rows and ROWS not in failed and self._rows[0].step <= step:
                rows = self._rows.popleft()
                return _Task(ROWS, rows.write, lambda: self._rows.appendleft(rows))
            if self._file is not None and step < math.inf:
                line, file = self._lines.popleft(), self._file
                return _Task(LINES, lambda: file.write(*line), lambda: self._lines.appendleft(line))
            if self._sinks is not None and self._unsent:
                sent, sinks = self._unsent.popleft(), self._sinks
                return _Task(SINKS, lambda: sinks.write(*sent), lambda: None)
        return None

    def _config_task(self) -> _Task:
        text, self._config = self._config or "", None

        def put_back() -> None:
            self._config = self._config or text  # a newer one stays

        return _Task(CONFIG, lambda: write_text_durably(self._config_path, text), put_back)

    def _tell_failure(self, kind: str, error: OSError) -> None:
        """Log the first failure of a kind; the next one is logged after a success."""
        self._error = self._error or error
        if kind not in self._failing:
            self._failing.add(kind)
            logger.error("%s; it is tried again at the next step", error if kind == LINES else f"{kind}: {error}")

    def _lose(self, kind: str, line: str) -> None:
        """Count what is given up, and log the first of its kind."""
        is_first = not (self.lost_lines if kind == LINES else self.lost_logs)
        self.lost_lines += kind == LINES
        self.lost_logs += kind == ROWS
        if is_first:
            logger.error("%s", line)
