"""Temporary folders that their owner holds locked, so that the next start can remove those of a killed process.

A folder is called `rollcorr-KIND_HOST_PID_RANDOM`, and its owner holds a lock (`flock`) on it. The system releases the
lock when the owner dies, whatever it dies of. So a folder of this host and user whose lock is free has no owner. A
process number alone would not say so: it may be used again, and containers that share a folder count their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # no Unix: nothing is locked there, and nothing is taken for abandoned
    fcntl = None  # type: ignore[assignment]

PREFIX = "rollcorr-"
KIND = re.compile(r"[a-z0-9]+")


class OwnedFolder:
    """A temporary folder that lives as long as this object, or at most until the next start after the process died.

    Args:
        kind: what it is for, in its name: lower-case letters and digits.

    Attributes:
        path: the folder.

    Raises:
        ValueError: `kind` has other characters.
        OSError: the temporary directory cannot be written.
    """

    def __init__(self, kind: str) -> None:
        if not KIND.fullmatch(kind):
            raise ValueError(f"kind must be lower-case letters and digits, got {kind!r}")
        remove_abandoned_folders()

        self.path, lock = _make(f"{PREFIX}{kind}_{_host()}_{os.getpid()}_")
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())  # also when the interpreter exits

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder. May be called twice."""
        self._remove()


def remove_abandoned_folders() -> list[Path]:
    """Remove the folders of this host and user in the temporary directory whose owner is dead; returns them.

    Folders that cannot be locked, are of another host or user, or are links stay as they are.
    """
    removed: list[Path] = []
    if fcntl is None:
        return removed
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*_{_host()}_*_*"):
        with contextlib.suppress(OSError):  # it is locked, somebody else's, or another start removes it now
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue

            # The lock is held while the folder goes: an owner that has made it but not locked it yet makes another.
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                removed.append(path)
            finally:
                os.close(lock)
    return removed


def _make(prefix: str) -> tuple[Path, int | None]:
    """A new folder and the descriptor that holds its lock; None where there are no locks."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        if fcntl is None:
            return path, None

        # Until the folder is locked, another start takes it for abandoned and removes it: before it is opened here …
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, where no other start gets one either
            os.close(lock)
            return path, None

        # … or after that.
        if path.is_dir():
            return path, lock
        os.close(lock)


def _remove(path: Path, lock: int | None, owner: int) -> None:
    """Remove the folder, then let its lock go. A forked child inherits this, but the folder is not its own."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()) or "host"
