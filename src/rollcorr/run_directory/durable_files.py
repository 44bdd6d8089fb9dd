"""Files and folders that are whole after a crash: written beside their place, flushed to the disk, then renamed.

A rename replaces a file at once or not at all. Without the flush, the name may reach the disk before the content.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
"""Ending of a file or folder that is being written; a killed process may leave one, and the next start removes it."""

SET_ASIDE_SUFFIX = ".set-aside"
"""Ending of a folder that makes room for a new one of its name; the next start puts it back if that one never came."""

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk, a quota or a file-size limit that is used up."""


def partial_path(path: Path) -> Path:
    """Where a file or folder is written before it gets its name: hidden, in the same folder."""
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


@contextmanager
def atomic_write(target: Path, *, needed: int = 0) -> Iterator[Path]:
    """Write a file or a folder atomically: at any moment of a crash, `target` is the old one or the new one.

    For a folder this also needs `remove_leftovers` at the next start, which puts an old folder back.

    Args:
        target: the file or folder.
        needed: bytes of its content, as far as they are known, for the error.

    Yields:
        A hidden path beside the target, to write the file or make the folder there. After the `with` block it is
        flushed to the disk and renamed; after an exception it is removed.

    Raises:
        OSError: the disk is full or cannot be written, whatever error a library made of it; the old one stays.
    """
    partial = partial_path(target)
    set_aside = target.with_name(f".{target.name}{SET_ASIDE_SUFFIX}")
    if partial.is_dir():  # a killed process left it
        shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            flush_to_disk(path)

        # No rename replaces a folder that is not empty, so the old one steps aside first.
        if target.is_dir():
            target.rename(set_aside)
        partial.replace(target)
        flush_to_disk(target.parent)
    except BaseException as error:
        newest = max(partial.rglob("*"), key=lambda path: path.lstat().st_mtime_ns, default=target)
        _remove(partial)
        cause = disk_failure(error)
        if cause is None:
            raise
        raise disk_error(cause, newest, needed=needed) from error
    finally:
        if set_aside.is_dir():
            _restore_or_delete(set_aside)


def write_text_durably(path: Path, text: str) -> None:
    """Replace a file: after a crash it holds the old text or the new one, never a part.

    Raises:
        OSError: the disk is full or cannot be written; the old file is as it was.
    """
    content = text.encode()
    with atomic_write(path, needed=len(content)) as partial:
        partial.write_bytes(content)


def make_folder_durably(path: Path) -> None:
    """Make a folder and those above it; their names are on the disk when this returns."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        flush_to_disk(folder.parent)


def delete_folder_durably(path: Path) -> None:
    """Delete a folder. It loses its name first, so that a crash leaves no folder that misses some of its files."""
    doomed = partial_path(path)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    flush_to_disk(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing or deleting in a folder, and put back what it had set aside."""
    for set_aside in folder.glob(f".*{SET_ASIDE_SUFFIX}"):
        _restore_or_delete(set_aside)
    for partial in folder.glob(f".*{PARTIAL_SUFFIX}"):
        _remove(partial)


def _restore_or_delete(set_aside: Path) -> None:
    """Put back a folder that was set aside, or delete it if its successor has arrived."""
    target = set_aside.with_name(set_aside.name.removeprefix(".").removesuffix(SET_ASIDE_SUFFIX))
    if target.exists():
        shutil.rmtree(set_aside, ignore_errors=True)
    else:
        set_aside.rename(target)
        flush_to_disk(set_aside.parent)


def _remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


def disk_failure(error: BaseException) -> OSError | None:
    """The error of the disk behind an error of a library; None if there is none."""
    if isinstance(error, OSError):
        return error if error.errno is not None else None

    # What is written in Rust, as safetensors and tokenizers are, tells the number in words.
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is not None:
        return OSError(int(number[1]), os.strerror(int(number[1])))

    # torch closes its archive after a failed write, and reports that it is cut; the first error is behind that one.
    behind = error.__context__ if isinstance(error, RuntimeError) else None
    return behind if isinstance(behind, OSError) and behind.errno is not None else None


def disk_error(error: OSError, path: Path, *, needed: int) -> OSError:
    """An error of the disk as one sentence that names the file, the bytes needed and the bytes free.

    Args:
        error: what the disk reported.
        path: the file that could not be written.
        needed: bytes that the whole write needs, as far as they are known.

    Returns:
        An OSError with the same number, to be raised.
    """
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    fix = "free some space or raise the limit" if error.errno in FULL_DISK else "check the disk"
    reason = error.strerror or str(error)
    return OSError(error.errno, f"{path} was not written ({reason}): {needed:,} bytes needed, {free:,} free; {fix}")
