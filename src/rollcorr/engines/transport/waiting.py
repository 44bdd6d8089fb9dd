"""Wait for a server that is away: time limits, retry delays, progress messages and early stops."""

from __future__ import annotations

import email.utils
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollcorr.engines.base import EngineUnavailableError

# Clock of every wait, in seconds; tests replace both.
monotonic = time.monotonic
sleep = time.sleep

# Interval, in seconds, between two checks of whether a wait should end.
SLICE = 0.1

# Delays between two retries double up to this one, seconds.
LONGEST_DELAY = 30.0

# Seconds until the first progress message, and between two later ones.
FIRST_LINE = 5.0
LATER_LINES = 60.0

# Callbacks that show a message and check for a requested stop; `while_waiting` sets both. Outside a run, messages go
# to Python's logging: to the standard error by default.
show_line: Callable[[str], None] = logging.getLogger("rollcorr.engines").warning
should_stop: Callable[[], bool] = lambda: False  # noqa: E731 (a default for a variable)


@contextmanager
def while_waiting(*, say: Callable[[str], None], stop_requested: Callable[[], bool]) -> Iterator[None]:
    """Report waits for an engine to `say`, and end them when `stop_requested()` is true, inside the `with` block."""
    global show_line, should_stop
    before = show_line, should_stop
    show_line, should_stop = say, stop_requested
    try:
        yield
    finally:
        show_line, should_stop = before


class RequestBatch:
    """State that the requests of one call share: a deadline, the server's outage, and a common end.

    Any answer ends an outage.

    Args:
        place: the server's address, for messages.
        deadline_minutes: time limit of the batch.
        wait_minutes: how long the server may be away.
    """

    def __init__(self, place: str, *, deadline_minutes: float, wait_minutes: float) -> None:
        self.ended = threading.Event()
        self._place, self._minutes, self._budget = place, deadline_minutes, 60 * wait_minutes
        self._deadline = monotonic() + 60 * deadline_minutes

        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._reason = ""
        self._next_line = math.inf
        self._was_told = False

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the deadline, 0 after it."""
        return max(0.0, self._deadline - monotonic())

    def check(self) -> None:
        """Raise if the batch is over."""
        if self.ended.is_set():
            raise EngineUnavailableError("the batch was given up")  # in a thread whose result is discarded
        if self.seconds_left == 0:
            raise EngineUnavailableError(
                f"{self._place} did not finish the batch within deadline_minutes, {self._minutes:g}; nothing of it is "
                "used. Ask for less at a time, or raise deadline_minutes"
            )

    def note_absence(self, reason: str) -> float:
        """Record an unanswered request, and return for how long the server may still be away, in seconds."""
        with self._lock:
            self._reason = reason
            if self._away_since is None:
                self._away_since, self._was_told = monotonic(), False
                self._next_line = self._away_since + FIRST_LINE
            return self._away_since + self._budget - monotonic()

    def note_answer(self) -> None:
        """Record an answer."""
        with self._lock:
            since, was_told = self._away_since, self._was_told
            self._away_since, self._next_line, self._was_told = None, math.inf, False
        if since is not None and was_told:
            show_line(f"the engine at {self._place} answers again, after {_format_duration(monotonic() - since)}")

    def pause(self, seconds: float) -> bool:
        """Wait, at most until the deadline. Return false if the end of the batch or a requested stop cut it short."""
        until = monotonic() + min(seconds, self.seconds_left)
        while not (self.ended.is_set() or should_stop()):
            left = until - monotonic()
            if left <= 0:
                return True
            sleep(min(left, SLICE))
            self._report_outage()
        return False

    def _report_outage(self) -> None:
        """Report that the server is away, if a message is due."""
        with self._lock:
            now, since = monotonic(), self._away_since
            if since is None or now < self._next_line:
                return
            self._next_line, self._was_told = now + LATER_LINES, True
        show_line(
            f"the engine at {self._place} has been away for {_format_duration(now - since)} ({self._reason}); waiting "
            f"up to {_format_duration(self._budget)}, the option wait_minutes. Ctrl-C ends the wait"
        )


def retry_after_seconds(header: str | None) -> float:
    """Parse a `Retry-After` header, a number or a date, as seconds from now; return 0 if it contains neither.

    Example:
        >>> retry_after_seconds("120"), retry_after_seconds("soon"), retry_after_seconds(None)
        (120.0, 0.0, 0.0)

    Source: RFC 9110, section 10.2.3.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text)  # a thousand digits parse as infinity, which the budget bounds
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, IndexError):
        return 0.0


def _format_duration(seconds: float) -> str:
    """Format a duration for people.

    Example:
        >>> _format_duration(7.4), _format_duration(600.0)
        ('7 s', '10 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
