"""How long something takes on a device: by its own clock on a GPU, by the host's elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

CACHE = 256 << 20
"""Bytes that are written before each run, so that nothing is left in the last-level cache of a GPU."""


def measured(run: Callable[[], object], device: str, *, seconds: float = 0.4, least: int = 5) -> dict[str, object]:
    """The least and the median time of a call, in seconds, and how many calls were timed.

    On a GPU a call is timed between two events, after the cache was overwritten: what the device takes, or the host
    where it cannot launch as fast.

    Args:
        run: the call.
        device: "cuda" or "cpu".
        seconds: how long to go on.
        least: fewest timed calls.
    """
    run()
    times = (_on_device if device == "cuda" else _on_host)(run, seconds, least)
    return {"min": min(times), "median": statistics.median(times), "runs": len(times)}


def _on_host(run: Callable[[], object], seconds: float, least: int) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def _on_device(run: Callable[[], object], seconds: float, least: int) -> list[float]:
    flush = torch.empty(CACHE, dtype=torch.int8, device="cuda")
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    count = max(least, min(200, int(seconds / max(once, 1e-4))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for before, after in events:
        flush.zero_()
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e-3 for before, after in events]
