"""Open files that a user names, without waiting for a writer that may never come."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO


def open_input(path: Path) -> BinaryIO:
    """Open a file to read its bytes. A pipe is opened only as `/dev/stdin` or as `<(command)` of a shell.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is a named pipe, and opening it would wait for a writer.
    """
    if path.is_fifo() and str(path.parent) not in ("/dev", "/dev/fd", "/proc/self/fd"):
        raise ValueError(f"{path} is a named pipe; copy what it gives into a file, or write <(command)")
    return path.open("rb")
