"""A thread that does file or tracker I/O of a Monitor, so that no training step waits for a disk or a server.

A Monitor has one for its files and one for its sinks, so that no file waits for a server. Tasks are done in the order
in which they came: the rollout rows of a step, then its line. A task that fails waits in memory, with all later ones of
its kind, and is tried again when the next step arrives. Other kinds go on: a line is written also if its rows cannot
be. Lines are dropped only after a failure, rollout rows and steps of sinks only if too much waits.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue

logger = logging.getLogger("rollcorr.monitor")

LINE, ROWS, CONFIG, SINKS = "metrics.jsonl", "the rollout log", "config.yaml", "the sinks"

# Lines that are kept after a write has failed, and tasks from which on a step waits for the thread.
FAILED_LINES, FULL_QUEUE = 1000, 2000

# Bytes of rollout rows that wait to be written; the rows of one step always may.
LOG_BYTES = 128 << 20

# Seconds that a step waits for room in the queue, and that `flush`, `close` and the end of the program wait, at most.
PATIENCE, CLOSING_SECONDS = 0.02, 30.0

# Seconds that the thread waits after a step, because it would compete with the end of the step for the interpreter.
AFTER_STEP = 0.005


@dataclass(frozen=True, eq=False)
class WriteTask:
    """Something to write: its kind, its step, how it is written, and the bytes of rollout rows that it holds."""

    kind: str
    step: int
    write: Callable[[], object]
    bytes: int = 0


class RunWriter:
    """Writes in a thread of its own. Only `flush` and `close` wait for files and trackers.

    Args:
        on_error: called in the thread with each error of a task.
        finish: called in the thread at its end, to close what it writes to; if a task hangs, when that task has ended.

    Attributes:
        lost: the number of tasks of each kind that were given up.
    """

    def __init__(self, on_error: Callable[[BaseException], object], finish: Callable[[], object]) -> None:
        self.lost: Counter[str] = Counter()
        self._on_error, self._finish = on_error, finish

        # Tasks in the order in which they came; one is there until it is done. A step takes no lock: each use of this
        # dictionary is atomic. Then kinds whose last attempt failed, and those of them that wait for the next request.
        self._waiting: dict[WriteTask, None] = {}
        self._failing: set[str] = set()
        self._postponed: set[str] = set()

        # What wakes the thread: None after a step, an event of `flush`, which is set when everything was tried. While
        # it is awake, it will look for new tasks in any case.
        self._requests: SimpleQueue[threading.Event | None] = SimpleQueue()
        self._is_awake = self._is_closing = self._has_refused = False

        # Held for a moment only, to choose a task or to drop some: never during I/O.
        self._choosing = threading.RLock()
        self._current: WriteTask | None = None

        # No thread survives `fork`. At its end a program waits for this one, but not for ever.
        self._process = os.getpid()
        target = contextvars.copy_context().run  # trackers keep their run in a context variable
        self._thread = threading.Thread(target=target, args=(self._work,), name="rollcorr-monitor", daemon=True)
        self._thread.start()
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    def unwritten(self, kind: str) -> int:
        """Count the tasks of a kind that could not be done yet, or were given up."""
        return self.lost[kind] + (len(self._of_kind(kind)) if kind in self._failing else 0)

    def waiting(self) -> str:
        """Return what is not written yet, as kinds with counts; empty if nothing waits."""
        counts = Counter(task.kind for task in list(self._waiting))
        return ", ".join(f"{kind} ({count})" for kind, count in counts.items())

    def put(self, *tasks: WriteTask) -> bool:
        """Take over the tasks of a step. Blocks for about `PATIENCE` at most, also if the disk hangs.

        Returns:
            False in a forked child and after `close`: nothing is written, and the first time an error is logged.
        """
        if self._is_in_child() or self._is_closing:
            if not self._has_refused:
                forked = (
                    f"process {os.getpid()} is a forked child: the Monitor of process {self._process} does not write "
                    "here; make one of its own in the child, with a different directory"
                )
                closed = "this Monitor is closed: make another one, with start=N, to go on"
                logger.error("%s", forked if self._is_in_child() else closed)
            self._has_refused = True
            return False

        # Of several configurations the newest counts.
        for older in self._of_kind(CONFIG) if tasks and tasks[0].kind == CONFIG else ():
            self._waiting.pop(older, None)
        self._waiting.update(dict.fromkeys(tasks))
        if not self._is_awake:
            self._is_awake = True
            self._requests.put(None)
        if not self._has_room():
            self._make_room()
        return True

    def flush(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until everything was tried, and what failed once more; returns whether all of it is written.

        Args:
            seconds: the longest wait.
        """
        if self._is_in_child():
            return False
        if not self._is_closing:
            tried = threading.Event()
            self._requests.put(tried)
            tried.wait(seconds)
        return not self._waiting

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Try once more, and end the thread; what it has not begun after `seconds` is given up.

        Has no effect in a forked child.
        """
        if self._is_in_child() or self._is_closing:
            return
        self._at_exit.cancel()
        self._is_closing = True
        self._requests.put(None)
        self._thread.join(seconds)

        # A task that hangs may end later; nothing else is written after that.
        if self._waiting:
            logger.error("not written: %s", self.waiting())
        elif self._thread.is_alive():
            logger.error("a sink or a file is not closed after %g seconds; its thread goes on", seconds)
        self._waiting.clear()

    def _is_in_child(self) -> bool:
        return os.getpid() != self._process

    def _of_kind(self, kind: str) -> list[WriteTask]:
        return [task for task in list(self._waiting) if task.kind == kind]

    def _has_room(self) -> bool:
        return len(self._waiting) < FULL_QUEUE and sum(task.bytes for task in list(self._waiting)) <= LOG_BYTES

    def _make_room(self) -> None:
        """Wait for the thread for a moment, then drop the oldest rows or steps of sinks."""
        # A program that is faster than its disk for a moment waits here, and loses nothing.
        end = time.monotonic() + PATIENCE
        while not (self._has_room() or self._failing) and time.monotonic() < end:
            time.sleep(0.001)
        with self._choosing:
            for task in [*self._of_kind(ROWS), *self._of_kind(SINKS)][:-1]:
                if task is not self._current and not self._has_room():
                    self._lose(task, "too much waits to be written")

    def _work(self) -> None:
        """The thread: try what waits, until it is closed and everything was tried once more."""
        while not self._is_closing:
            request = self._requests.get()
            if request is None:
                self._postponed.clear()
                with suppress(Empty):
                    request = self._requests.get(timeout=AFTER_STEP)

            # From here on, a step wakes it again: a task that comes now may be too late for this round.
            self._is_awake = False
            self._try_all()
            if request is not None:
                self._postponed.clear()
                self._try_all()
                request.set()
        self._postponed.clear()
        self._try_all()
        self._finish()

    def _try_all(self) -> None:
        while (task := self._next()) is not None:
            self._try(task)

    def _next(self) -> WriteTask | None:
        """Return the first task that may be tried now. It stays in the queue until it is done."""
        with self._choosing:
            may_be_tried = (task for task in list(self._waiting) if task.kind not in self._postponed)
            self._current = next(may_be_tried, None)
            return self._current

    def _try(self, task: WriteTask) -> None:
        try:
            task.write()
        except OSError as error:
            # A disk may work again later. Any other error, such as of rows that no log can hold, would come again.
            self._on_error(error)
            self._postpone(task.kind, error)
        except BaseException as error:  # a tracker's CancelledError, for example, must not end this thread
            self._on_error(error)
            self._lose(task, str(error))
        else:
            self._waiting.pop(task, None)  # `close` may have given it up
            if task.kind in self._failing:
                self._failing.remove(task.kind)
                logger.warning("%s is written again", task.kind)

    def _postpone(self, kind: str, error: OSError) -> None:
        """Keep the tasks of a kind for the next request, and log the first failure."""
        self._postponed.add(kind)
        for line in self._of_kind(LINE)[:-FAILED_LINES] if kind == LINE else ():
            self._lose(line, f"{FAILED_LINES} lines wait to be written")
        if kind not in self._failing:
            self._failing.add(kind)
            logger.error("%s: %s; it is tried again at the next step", kind, error)

    def _lose(self, task: WriteTask, why: str) -> None:
        """Give a task up, count it, and log the first of its kind."""
        with self._choosing:
            self._waiting.pop(task, None)
            if not self.lost[task.kind]:
                logger.error("step %d is lost for %s: %s", task.step, task.kind, why)
            self.lost[task.kind] += 1
