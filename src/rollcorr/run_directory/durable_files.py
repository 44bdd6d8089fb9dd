"""Files that are whole after a crash: written beside their place, flushed to the disk, then renamed.

A rename replaces a file at once or not at all. Without the flush, the name may reach the disk before the content.
"""

from __future__ import annotations

import os
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
"""Ending of a file or folder that is being written; a killed process may leave one, and the next start removes it."""


def partial_path(path: Path) -> Path:
    """Where a file or folder is written before it gets its name: hidden, in the same folder."""
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


def write_text_durably(path: Path, text: str) -> None:
    """Replace a file: after a crash it holds the old text or the new one, never a part.

    Raises:
        OSError: the disk is full or cannot be written; the old file is as it was.
    """
    partial = partial_path(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
