"""Files and folders that are whole after a crash: written beside their place, flushed to the disk, then renamed.

A rename replaces a file at once or not at all. Without the flush, the name may reach the disk before the content.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
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


def write_text_durably(path: Path, text: str) -> None:
    """Replace a file: after a crash it holds the old text or the new one, never a part.

    Raises:
        OSError: the disk is full or cannot be written; the old file is as it was.
    """
    write_bytes_durably(path, text.encode())


def write_bytes_durably(path: Path, content: bytes) -> None:
    """The same for bytes."""
    write_chunks_durably(path, [content], needed=len(content))


def write_chunks_durably(path: Path, chunks: Iterable[bytes], *, needed: int) -> None:
    """The same for bytes in parts, which may come from the file that is replaced.

    Args:
        path: the file.
        chunks: its content.
        needed: bytes of all.
    """
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, path, needed=needed) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def make_folder_durably(path: Path) -> None:
    """Make a folder and those above it; their names are on the disk when this returns."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        flush_to_disk(folder.parent)


def place_folder_durably(partial: Path, final: Path) -> None:
    """Give a folder that was written whole its name, and replace the one that has it.

    At any moment of a crash, `final` is the old folder or the new one, or `restore_set_aside` makes it the old one.

    Raises:
        OSError: the disk is full or cannot be written; the old folder is where it was, or set aside.
    """
    flush_tree_to_disk(partial)
    set_aside = final.with_name(f".{final.name}{SET_ASIDE_SUFFIX}")
    replaces = final.exists()

    # No rename replaces a folder that is not empty, so the old one steps aside first.
    if replaces:
        final.rename(set_aside)
    try:
        partial.rename(final)
    except BaseException:
        restore_set_aside(final.parent)
        raise
    flush_to_disk(final.parent)
    if replaces:
        delete_folder_durably(set_aside)


def delete_folder_durably(path: Path) -> None:
    """Delete a folder. It loses its name first, so that a crash leaves no folder that misses some of its files."""
    doomed = path if path.name.endswith(PARTIAL_SUFFIX) else partial_path(path)
    if doomed != path:
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        flush_to_disk(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def restore_set_aside(folder: Path) -> None:
    """Put back what a crash left set aside in a folder, or delete it if its successor has arrived."""
    for set_aside in sorted(folder.glob(f".*{SET_ASIDE_SUFFIX}")):
        final = set_aside.with_name(set_aside.name.removeprefix(".").removesuffix(SET_ASIDE_SUFFIX))
        if final.exists():
            delete_folder_durably(set_aside)
        else:
            set_aside.rename(final)
            flush_to_disk(folder)


def remove_partial(folder: Path) -> None:
    """Remove what a killed process was writing or deleting in a folder."""
    for partial in sorted(folder.glob(f".*{PARTIAL_SUFFIX}")):
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def flush_tree_to_disk(folder: Path) -> None:
    """Wait until everything in a folder is on the disk, and the folder itself.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush_to_disk(Path(place) / name)
        flush_to_disk(Path(place))


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


@contextmanager
def written_whole(partial: Path, *, needed: int) -> Iterator[None]:
    """Remove a folder whose content cannot be written, and say why if it was the disk.

    Args:
        partial: the folder; its files are written inside the `with`.
        needed: their bytes, as far as they are known.

    Raises:
        OSError: the disk is full or cannot be written, whatever error a library made of it.
    """
    try:
        yield
    except BaseException as error:
        newest = max(partial.rglob("*"), key=lambda path: path.lstat().st_mtime_ns, default=partial)
        shutil.rmtree(partial, ignore_errors=True)
        cause = disk_failure(error)
        if cause is None:
            raise
        raise disk_error(cause, newest, needed=needed) from error


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
