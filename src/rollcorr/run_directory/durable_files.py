"""Atomic, crash-safe writes of files and folders: write a temporary path, flush it to the disk, then rename it.

A rename is atomic. Without the flush, the name may reach the disk before the content.
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
"""Suffix of a file or folder that is being written. If a process is killed, the next start removes it."""

SET_ASIDE_SUFFIX = ".set-aside"
"""Suffix of an old folder during its replacement. The next start restores it if the replacement is missing."""

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exhausted quota or a file-size limit."""


def partial_path(path: Path) -> Path:
    """Return the temporary path of a file or folder: hidden, in the same folder."""
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


@contextmanager
def atomic_write(target: Path, *, needed: int = 0) -> Iterator[Path]:
    """Context manager for an atomic write: after a crash, `target` is the old version or the new version.

    For a folder, call `remove_leftovers` at the next start, which restores an old folder.

    Args:
        target: the file or folder.
        needed: known bytes of its content, for the error message; defaults to 0.

    Yields:
        A hidden path in the target's folder, where the caller writes the file or makes the folder. After the `with`
        block it is flushed to the disk and renamed; after an exception it is removed.

    Raises:
        OSError: the disk is full or cannot be written, also if a library raised a different error for it; the old
            version stays.
    """
    partial = partial_path(target)
    set_aside = target.with_name(f".{target.name}{SET_ASIDE_SUFFIX}")
    if partial.is_dir():  # from a killed process
        shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            flush_to_disk(path)

        # A rename cannot replace a folder that is not empty, so rename the old one first.
        if target.is_dir():
            target.rename(set_aside)
        partial.replace(target)
        flush_to_disk(target.parent)
    except BaseException as error:
        newest = max(partial.rglob("*"), key=lambda path: path.lstat().st_mtime_ns, default=target)
        _remove_if_present(partial)
        cause = disk_failure(error)
        if cause is None:
            raise
        raise disk_error(cause, newest, needed=needed) from error
    finally:
        if set_aside.is_dir():
            _restore_or_delete(set_aside)


def write_text_durably(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash it contains the old text or the new text.

    Raises:
        OSError: the disk is full or cannot be written; the old file is unchanged.
    """
    content = text.encode()
    with atomic_write(path, needed=len(content)) as partial:
        partial.write_bytes(content)


def make_folder_durably(path: Path) -> None:
    """Make a folder and its parents, and flush their names to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        flush_to_disk(folder.parent)


def delete_folder_durably(path: Path) -> None:
    """Delete a folder. Rename it first, so that a crash never leaves an incomplete folder under its name."""
    doomed = partial_path(path)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    flush_to_disk(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary paths of a killed process in a folder, and restore the folders that it set aside."""
    for set_aside in folder.glob(f".*{SET_ASIDE_SUFFIX}"):
        _restore_or_delete(set_aside)
    for partial in folder.glob(f".*{PARTIAL_SUFFIX}"):
        _remove_if_present(partial)


def _restore_or_delete(set_aside: Path) -> None:
    """Restore a folder that was set aside, or delete it if its replacement exists."""
    target = set_aside.with_name(set_aside.name.removeprefix(".").removesuffix(SET_ASIDE_SUFFIX))
    if target.exists():
        shutil.rmtree(set_aside, ignore_errors=True)
    else:
        set_aside.rename(target)
        flush_to_disk(set_aside.parent)


def _remove_if_present(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to the disk.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def disk_failure(error: BaseException) -> OSError | None:
    """Return the disk error that caused a library's error, or None."""
    if isinstance(error, OSError):
        return error if error.errno is not None else None

    # Rust libraries (safetensors, tokenizers) put the error number in the message.
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is not None:
        return OSError(int(number[1]), os.strerror(int(number[1])))

    # After a failed write, torch closes its archive and reports that it is truncated; the context is the first error.
    behind = error.__context__ if isinstance(error, RuntimeError) else None
    return behind if isinstance(behind, OSError) and behind.errno is not None else None


def disk_error(error: OSError, path: Path, *, needed: int) -> OSError:
    """Build a disk error whose message contains the file, the bytes needed and the bytes free.

    Args:
        error: the original error.
        path: the file that could not be written.
        needed: known bytes of the complete write.

    Returns:
        An OSError with the same error number; the caller raises it.
    """
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    fix = "free some space or raise the limit" if error.errno in FULL_DISK else "check the disk"
    reason = error.strerror or str(error)
    return OSError(error.errno, f"{path} was not written ({reason}): {needed:,} bytes needed, {free:,} free; {fix}")
