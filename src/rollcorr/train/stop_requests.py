"""Requests to stop a run: Ctrl-C, signals of a scheduler, and a deadline.

A request takes effect where no work is lost: after a training step and its checkpoint, or at once in a phase that the
next start repeats anyway (loading, warm-up, evaluation).
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopNow(KeyboardInterrupt):
    """Exception that leaves an interruptible phase. Libraries treat it as Ctrl-C, so they do not swallow it."""


class StopRequests(ExitStack):
    """Context manager that listens for requests: `with StopRequests(say, minutes=30) as stop: …`.

    The first request finishes the step and saves. After it, Ctrl-C stops at once; other signals have no effect,
    because schedulers send several kinds before they kill. An ignored signal (`nohup`) stays ignored, except
    Ctrl-C.

    Args:
        say: callback for the message of a request.
        minutes: the deadline, counted from construction; optional.
    """

    def __init__(self, say: Callable[[str], None], *, minutes: float | None = None) -> None:
        super().__init__()
        self._say = say
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._deadline = time.monotonic() + self._seconds
        self._reason: str | None = None
        self._raises = False

    def __enter__(self) -> StopRequests:
        # Python delivers signals to the main thread only. Other threads check only the deadline, between steps.
        if threading.current_thread() is threading.main_thread():
            listened = [n for n in REQUESTS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
            if self._seconds < math.inf:
                listened.append(signal.SIGALRM)
            for number in listened:
                self.callback(signal.signal, number, signal.signal(number, self._handle_signal))
            if self._seconds < math.inf:
                signal.setitimer(signal.ITIMER_REAL, self._seconds)
                self.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        return self

    @property
    def reason(self) -> str | None:
        """Return the source of the request, for example "SIGTERM", or None without one."""
        if self._reason is None and time.monotonic() >= self._deadline:
            self._reason = "stop_after_minutes"
        return self._reason

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Context manager for a phase that a request interrupts at once, through `StopNow`. It must be repeatable."""
        self._raises = True
        try:
            if self.reason is not None:
                raise StopNow(self.reason)
            yield
        finally:
            self._raises = False

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None:
            return
        self._reason = "stop_after_minutes" if number == signal.SIGALRM else signal.Signals(number).name

        # A second Ctrl-C stops at once, even in a background job, which starts with Ctrl-C ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._raises:
            raise StopNow(self._reason)

        # The run must save even if the terminal is closed, or the signal interrupted a write to it.
        with suppress(OSError, RuntimeError):
            self._say(f"{self._reason}: stopping after this step (Ctrl-C stops at once and loses the step)")
