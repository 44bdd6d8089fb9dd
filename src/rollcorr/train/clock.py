"""Where the seconds of a training step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by phase: `with clock("rollout"): …`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase."""
        start = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - start

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start

    def metrics(self) -> dict[str, float]:
        """`perf/PHASE_seconds`, and `perf/step_seconds` for the whole."""
        return {f"perf/{phase}_seconds": s for phase, s in self._seconds.items()} | {"perf/step_seconds": self.total}
