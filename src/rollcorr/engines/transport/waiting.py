"""Wait for a server that is away: for how long, how often it is asked, who is told, and what ends the wait early."""

from __future__ import annotations

import email.utils
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

# The clock of every wait, in seconds; a test replaces both.
monotonic = time.monotonic
sleep = time.sleep

# A wait looks up this often, in seconds, whether it should end.
SLICE = 0.1

# Delays between two tries double up to this one, seconds.
LONGEST_DELAY = 30.0

# Seconds until the first line of progress, and between two later ones.
FIRST_LINE = 5.0
LATER_LINES = 60.0


# Who shows a line, and whether the run was asked to stop. Outside a run, lines go where Python's warnings of the log
# go: to the standard error, unless logging is configured.
_say: Callable[[str], None] = logging.getLogger("rollcorr.engines").warning
_stop_requested: Callable[[], bool] = lambda: False  # noqa: E731 (a default for a variable)


@contextmanager
def while_waiting(*, say: Callable[[str], None], stop_requested: Callable[[], bool]) -> Iterator[None]:
    """Inside the `with`, every wait for an engine tells `say`, and ends when `stop_requested()` is true."""
    global _say, _stop_requested
    before = _say, _stop_requested
    _say, _stop_requested = say, stop_requested
    try:
        yield
    finally:
        _say, _stop_requested = before


def say(line: str) -> None:
    """Show a line to whoever watches the run."""
    _say(line)


def stop_requested() -> bool:
    """Whether the run was asked to stop."""
    return _stop_requested()


class Absence:
    """How long a server has been away, as all requests of one batch see it. Any answer ends an absence.

    Args:
        place: the server's address, for the lines.
        budget: seconds that it may be away.
    """

    def __init__(self, place: str, *, budget: float) -> None:
        self.place = place
        self.budget = budget
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reason = ""
        self._next_line = math.inf
        self._was_told = False

    @property
    def seconds(self) -> float:
        """Since when it has been away; 0 if it is here."""
        since = self._since
        return 0.0 if since is None else monotonic() - since

    def begin(self, reason: str) -> None:
        """Note that the server did not answer a request; only the first note of an absence starts its clock."""
        with self._lock:
            self._reason = reason
            if self._since is None:
                self._since, self._was_told = monotonic(), False
                self._next_line = self._since + FIRST_LINE

    def end(self) -> None:
        """Note an answer."""
        with self._lock:
            seconds, was_told = self.seconds, self._was_told
            self._since, self._next_line, self._was_told = None, math.inf, False
        if was_told:
            say(f"the engine at {self.place} answers again, after {_minutes(seconds)}")

    def tell(self) -> None:
        """Say that it is away, if it is time for a line."""
        with self._lock:
            is_due = monotonic() >= self._next_line
            if is_due:
                self._next_line, self._was_told = monotonic() + LATER_LINES, True
        if is_due:
            say(
                f"the engine at {self.place} has been away for {_minutes(self.seconds)} ({self._reason}); waiting up "
                f"to {_minutes(self.budget)}, the option wait_minutes. Ctrl-C ends the wait"
            )

    def pause(self, seconds: float, has_ended: Callable[[], bool]) -> bool:
        """Wait, and tell; true if the whole time passed, false if `has_ended()` or a request to stop cut it short."""
        until = monotonic() + seconds
        while not (has_ended() or stop_requested()):
            left = until - monotonic()
            if left <= 0:
                return True
            sleep(min(left, SLICE))
            self.tell()
        return False


def retry_after_seconds(header: str | None) -> float:
    """Seconds from now that a `Retry-After` header names, as a number or as a date; 0 if it names none.

    Example:
        >>> retry_after_seconds("120"), retry_after_seconds("soon"), retry_after_seconds(None)
        (120.0, 0.0, 0.0)

    Source: RFC 9110, section 10.2.3.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text)  # a thousand digits give infinity, which the budget bounds
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError, IndexError):
        return 0.0

    # A date in "-0000" has no time zone, and means UTC.
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - datetime.now(timezone.utc)).total_seconds())


def _minutes(seconds: float) -> str:
    """A duration as people say it.

    Example:
        >>> _minutes(7.4), _minutes(600.0)
        ('7 s', '10 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
