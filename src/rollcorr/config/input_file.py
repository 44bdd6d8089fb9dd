"""Input that a user names: open files without waiting for a writer that may never come, and the error for bad input."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO


class BadInputError(ValueError):
    """A run or a log cannot be read; the message names the file, the place and the fix."""


def open_input(path: Path) -> BinaryIO:
    """Open a file to read its bytes. A pipe is opened only as `/dev/stdin` or as `<(command)` of a shell.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is a named pipe, and opening it would wait for a writer.
    """
    if path.is_fifo() and str(path.parent) not in ("/dev", "/dev/fd", "/proc/self/fd"):
        raise ValueError(f"{path} is a named pipe; copy what it gives into a file, or write <(command)")
    return path.open("rb")
