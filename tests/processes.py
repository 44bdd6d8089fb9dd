"""Helpers for tests of real processes: check whether a process runs, and wait for a condition."""

import os
import time
from pathlib import Path

PATIENCE = 120.0
"""Seconds until a test stops waiting for what must happen: a busy machine may take that long to start Python."""


def is_gone(pid):
    """Return whether a process has ended; zombies have ended."""
    status = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def eventually(holds):
    """Wait for a condition and return its last value."""
    limit = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < limit:
        time.sleep(0.02)
    return holds()
