"""The thread that does all file and tracker I/O of a Monitor, so that no training step waits for a disk or a server.

Tasks are done in the order in which they came: the rollout rows of a step, its line, then its sinks. So a step whose
line can be read has its rows. A task that fails waits in memory, with all later ones of its kind, and is tried again
when the next step arrives. Lines are dropped only after a failure, and rollout rows only if too many bytes wait.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize

logger = logging.getLogger("rollcorr.monitor")

LINE, ROWS, CONFIG, SINKS = "metrics.jsonl", "the rollout log", "config.yaml", "the sinks"

# Lines that are kept after a write has failed, and tasks from which on a step waits for the thread.
FAILED_LINES, FULL_QUEUE = 1000, 2000

# Bytes of rollout rows that wait to be written; the rows of one step always may.
LOG_BYTES = 128 << 20

# Seconds that a step waits for room in the queue, and that `flush`, `close` and the end of the program wait, at most.
PATIENCE, CLOSING_SECONDS = 0.02, 30.0


@dataclass(frozen=True, eq=False)
class WriteTask:
    """Something to write: its kind, its step, how it is written, and the bytes that it takes if it may be dropped."""

    kind: str
    step: int
    write: Callable[[], object]
    bytes: int = 0


class RunWriter:
    """Writes in a thread of its own. Only `flush` and `close` wait for files and trackers.

    Attributes:
        lost: the number of tasks of each kind that were given up.
    """

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        self._waiting: list[WriteTask] = []
        self._current: WriteTask | None = None
        self._failing: set[str] = set()
        self._error: BaseException | None = None

        # A request is answered when everything that waited was tried once.
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._is_closing = False

        # No thread survives `fork`. At its end a program waits for this one, but not for ever.
        self._process, self._has_logged_fork = os.getpid(), False
        target = contextvars.copy_context().run  # trackers keep their run in a context variable
        self._thread = threading.Thread(target=target, args=(self._work,), name="rollcorr-monitor", daemon=True)
        self._thread.start()
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    @property
    def is_in_child(self) -> bool:
        """Whether this is a forked child of the process that writes; the first time, an error is logged."""
        is_child = os.getpid() != self._process
        if is_child and not self._has_logged_fork:
            self._has_logged_fork = True
            logger.error(
                "process %d is a forked child: the Monitor of process %d does not write here; make one of its own in "
                "the child, with a different directory",
                os.getpid(),
                self._process,
            )
        return is_child

    def unwritten(self, kind: str) -> int:
        """Count the tasks of a kind that could not be done yet, or were given up."""
        return self.lost[kind] + (len(self._of_kind(kind)) if kind in self._failing else 0)

    def put(self, *tasks: WriteTask) -> None:
        """Hand over the tasks of a step. Blocks for about `PATIENCE` at most, also if the disk hangs."""
        if self.is_in_child:
            return
        with self._changed:
            self._waiting += tasks
            self._ask()

            # A program that is faster than its disk for a moment waits here, and loses no rows.
            self._changed.wait_for(lambda: self._has_room() or self._asked == self._answered, PATIENCE)
            for task in [task for task in self._of_kind(ROWS) if task is not self._current][:-1]:
                if not self._has_room():
                    self._lose(task, "the disk is slow or full")

    def flush(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until everything was tried, `seconds` at most; returns whether all of it is written."""
        if self.is_in_child:
            return False
        with self._changed:
            asked = self._ask()
            return self._changed.wait_for(lambda: self._answered >= asked, seconds) and not self._waiting

    def close(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Try once more, and end the thread; returns whether it has ended within `seconds`."""
        self._at_exit.cancel()
        until = time.monotonic() + seconds
        with self._changed:
            self._is_closing = True
            self._ask()
        self._thread.join(max(0.0, until - time.monotonic()))

        # A thread that hangs must not write after that: a later process may go on with the run.
        with self._changed:
            counts = Counter(task.kind for task in self._waiting)
            if counts:
                logger.error("not written: %s", ", ".join(f"{kind} ({count})" for kind, count in counts.items()))
            self._waiting.clear()
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

    def _of_kind(self, kind: str) -> list[WriteTask]:
        return [task for task in list(self._waiting) if task.kind == kind]

    def _has_room(self) -> bool:
        return len(self._waiting) < FULL_QUEUE and sum(task.bytes for task in self._waiting) <= LOG_BYTES

    def _work(self) -> None:
        """The thread: one round for each request, or for several that came together."""
        while not self._is_closing or self._asked > self._answered:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._answered)
                asked, failed = self._asked, set[str]()
            while (task := self._next(failed)) is not None:
                self._try(task, failed)
            with self._changed:
                self._answered = asked
                self._changed.notify_all()

    def _next(self, failed: set[str]) -> WriteTask | None:
        """The first task of a kind that has not failed in this round. It stays in the queue until it is done."""
        with self._changed:
            self._current = next((task for task in self._waiting if task.kind not in failed), None)
            return self._current

    def _try(self, task: WriteTask, failed: set[str]) -> None:
        error: BaseException | None = None
        try:
            task.write()
        except BaseException as caught:  # a tracker's CancelledError, for example, must not end this thread
            error = caught
        with self._changed:
            self._current = None
            if error is None:
                if task in self._waiting:  # `close` may have given it up
                    self._waiting.remove(task)
                if task.kind in self._failing:
                    self._failing.remove(task.kind)
                    logger.warning("%s is written again", task.kind)
                return

            # A disk may work again later. Any other error, such as of rows that no log can hold, would come again.
            self._error = self._error or error
            if not isinstance(error, OSError):
                self._lose(task, str(error))
                return
            failed.add(task.kind)
            for line in self._of_kind(LINE)[:-FAILED_LINES] if task.kind == LINE else ():
                self._lose(line, f"{FAILED_LINES} lines wait to be written")
            if task.kind not in self._failing:
                self._failing.add(task.kind)
                logger.error("%s: %s; it is tried again at the next step", task.kind, error)

    def _lose(self, task: WriteTask, why: str) -> None:
        """Give a task up, count it, and log the first of its kind."""
        if task in self._waiting:
            self._waiting.remove(task)
        if not self.lost[task.kind]:
            logger.error("step %d is lost for %s: %s", task.step, task.kind, why)
        self.lost[task.kind] += 1
