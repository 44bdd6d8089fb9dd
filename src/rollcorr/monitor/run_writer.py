"""Background thread for the file or tracker I/O of a Monitor, so that no training step waits for a disk or a server.

A Monitor has one thread for its files and one for its sinks, so that no file waits for a server. Tasks run in FIFO
order: the rollout rows of a step, then its line. A failed task stays in the queue, with all later tasks of its kind,
and is retried at the next step. Other kinds continue: a line is written even if its rows fail. Lines are dropped only
after a failure, rollout rows and steps of sinks only if the queue is full.
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
ANALYSIS = "the analysis of the mismatch"

# Maximum number of lines to keep after a failed write, and of queued tasks before a step waits for the thread.
FAILED_LINES, FULL_QUEUE = 1000, 2000

# Maximum number of bytes of queued rollout rows; the rows of one step are always accepted.
LOG_BYTES = 128 << 20

# Timeouts in seconds: of a step that waits for room in the queue, and of `flush`, `close` and the exit handler.
PATIENCE, CLOSING_SECONDS = 0.02, 30.0

# Delay of the thread after a step, in seconds, because it would compete with the end of the step for the GIL.
AFTER_STEP = 0.005


@dataclass(frozen=True, eq=False)
class WriteTask:
    """A queued write: its kind, its step, its callback, and the size of its rollout rows in bytes."""

    kind: str
    step: int
    write: Callable[[], object]
    bytes: int = 0


class RunWriter:
    """A background writer thread with a queue. Only `flush` and `close` wait for files and trackers.

    Args:
        on_error: callback for each error of a task, called in the thread.
        finish: callback that closes the files or sinks, called at the end of the thread; if a task hangs, after it.

    Attributes:
        lost: the number of dropped tasks of each kind.
    """

    def __init__(self, on_error: Callable[[BaseException], object], finish: Callable[[], object]) -> None:
        self.lost: Counter[str] = Counter()
        self._on_error, self._finish = on_error, finish

        # Queued tasks in FIFO order; a task is removed after it ran. A step acquires no lock, because each use of this
        # dictionary is atomic. Then the kinds whose last attempt failed, and the failed kinds postponed to the next
        # request.
        self._waiting: dict[WriteTask, None] = {}
        self._failing: set[str] = set()
        self._postponed: set[str] = set()

        # Requests that wake the thread: `None` after a step, or an event of `flush`, which is set after all tasks were
        # tried. While it is awake, it polls for new tasks anyway.
        self._requests: SimpleQueue[threading.Event | None] = SimpleQueue()
        self._is_awake = self._is_closing = self._has_refused = False

        # Lock to select or drop tasks, never held during I/O.
        self._choosing = threading.RLock()
        self._current: WriteTask | None = None

        # Threads do not survive `fork`. At exit, a program waits for this thread with a timeout.
        self._process = os.getpid()
        target = contextvars.copy_context().run  # trackers keep their run in a context variable
        self._thread = threading.Thread(target=target, args=(self._run_thread,), name="rollcorr-monitor", daemon=True)
        self._thread.start()
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    def unwritten(self, kind: str) -> int:
        """Return the number of tasks of a kind that wait after a failure, or were dropped."""
        return self.lost[kind] + (len(self._tasks_of_kind(kind)) if kind in self._failing else 0)

    def waiting(self) -> str:
        """Return the kinds of the queued tasks with counts, as text; empty if the queue is empty."""
        counts = Counter(task.kind for task in list(self._waiting))
        return ", ".join(f"{kind} ({count})" for kind, count in counts.items())

    def put(self, *tasks: WriteTask) -> bool:
        """Queue the tasks of a step. Blocks for about `PATIENCE` at most, even if the disk hangs.

        Returns:
            False in a forked child and after `close`: the tasks are dropped, and the first call logs an error.
        """
        if self._is_forked() or self._is_closing:
            if not self._has_refused:
                forked = (
                    f"process {os.getpid()} is a forked child: the Monitor of process {self._process} does not write "
                    "here; make one of its own in the child, with a different directory"
                )
                closed = "this Monitor is closed: make another one, with start=N, to go on"
                logger.error("%s", forked if self._is_forked() else closed)
            self._has_refused = True
            return False

        # Keep only the newest of several queued configurations.
        for older in self._tasks_of_kind(CONFIG) if tasks and tasks[0].kind == CONFIG else ():
            self._waiting.pop(older, None)
        self._waiting.update(dict.fromkeys(tasks))
        if not self._is_awake:
            self._is_awake = True
            self._requests.put(None)
        if not self._has_room():
            self._make_room()
        return True

    def flush(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until all tasks ran, and retry failed tasks once.

        Args:
            seconds: the timeout.

        Returns:
            Whether all tasks are written.
        """
        if self._is_forked():
            return False
        if not self._is_closing:
            tried = threading.Event()
            self._requests.put(tried)
            tried.wait(seconds)
        return not self._waiting

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Retry failed tasks once, and stop the thread; drop tasks that have not started after `seconds`.

        Has no effect in a forked child.
        """
        if self._is_forked() or self._is_closing:
            return
        self._at_exit.cancel()
        self._is_closing = True
        self._requests.put(None)
        self._thread.join(seconds)

        # A task that hangs may end later. The queue is cleared, so no further task runs.
        if self._waiting:
            logger.error("not written: %s", self.waiting())
        elif self._thread.is_alive():
            logger.error("a sink or a file is not closed after %g seconds; its thread goes on", seconds)
        self._waiting.clear()

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _tasks_of_kind(self, kind: str) -> list[WriteTask]:
        return [task for task in list(self._waiting) if task.kind == kind]

    def _has_room(self) -> bool:
        return len(self._waiting) < FULL_QUEUE and sum(task.bytes for task in list(self._waiting)) <= LOG_BYTES

    def _make_room(self) -> None:
        """Wait briefly for the thread, then drop the oldest rows or steps of sinks."""
        # A program that is briefly faster than its disk waits here, without loss.
        end = time.monotonic() + PATIENCE
        while not (self._has_room() or self._failing) and time.monotonic() < end:
            time.sleep(0.001)
        with self._choosing:
            for task in [*self._tasks_of_kind(ROWS), *self._tasks_of_kind(SINKS)][:-1]:
                if task is not self._current and not self._has_room():
                    self._drop_task(task, "too much waits to be written")

    def _run_thread(self) -> None:
        """Run queued tasks until the writer is closed, then retry failed tasks once."""
        while not self._is_closing:
            # A request is the event of a `flush`, or None for new tasks. A `flush` may follow: wait briefly for it.
            request = self._requests.get()
            if request is None:
                self._postponed.clear()
                with suppress(Empty):
                    request = self._requests.get(timeout=AFTER_STEP)

            # From here on, a step sends a new request, because this round may miss its tasks.
            self._is_awake = False
            self._run_queued_tasks()
            if request is not None:
                self._postponed.clear()
                self._run_queued_tasks()
                request.set()
        self._postponed.clear()
        self._run_queued_tasks()
        self._finish()

    def _run_queued_tasks(self) -> None:
        while (task := self._next_task()) is not None:
            self._run_task(task)

    def _next_task(self) -> WriteTask | None:
        """Return the first task that is not postponed. It stays in the queue until it ran."""
        with self._choosing:
            may_be_tried = (task for task in list(self._waiting) if task.kind not in self._postponed)
            self._current = next(may_be_tried, None)
            return self._current

    def _run_task(self, task: WriteTask) -> None:
        try:
            task.write()
        except OSError as error:
            # A disk may recover. Any other error, such as invalid rows, would repeat.
            self._on_error(error)
            self._postpone(task.kind, error)
        except BaseException as error:  # a tracker's CancelledError, for example, must not end this thread
            self._on_error(error)
            self._drop_task(task, str(error))
        else:
            self._waiting.pop(task, None)  # `close` may have given it up
            if task.kind in self._failing:
                self._failing.remove(task.kind)
                logger.warning("%s is written again", task.kind)

    def _postpone(self, kind: str, error: OSError) -> None:
        """Keep the tasks of a kind for the next request, and log the first failure."""
        self._postponed.add(kind)
        for line in self._tasks_of_kind(LINE)[:-FAILED_LINES] if kind == LINE else ():
            self._drop_task(line, f"{FAILED_LINES} lines wait to be written")
        if kind not in self._failing:
            self._failing.add(kind)
            logger.error("%s: %s; it is tried again at the next step", kind, error)

    def _drop_task(self, task: WriteTask, why: str) -> None:
        """Drop a task, count it, and log the first loss of its kind."""
        with self._choosing:
            self._waiting.pop(task, None)
            if not self.lost[task.kind]:
                logger.error("step %d is lost for %s: %s", task.step, task.kind, why)
            self.lost[task.kind] += 1
