"""One process at a time in a run directory: a lock that lives exactly as long as its process.

The lock is `flock` on RUN/run.lock, an advisory lock of the operating system. It ends when the process ends, by SIGKILL
too, so a file that a dead process left behind never blocks. No child keeps it: `exec` closes the file, and `fork` does
so through a hook. The file's text names the holder, for whoever is refused.

On a network file system, NFS on Linux and Lustre with `-o flock` hold the lock between machines. Mounted with
`local_lock`, `nolock` or `-o localflock`, they hold it between the processes of one machine only. A file system without
locks is reported by a warning, and nothing is kept apart there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import warnings
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from rollcorr.run_directory.durable_files import make_folder_durably

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of a file system that cannot lock."""


class RunInUseError(RuntimeError):
    """Another process runs in this directory; the message names it."""


class RunLock:
    """The exclusive right to write in a run directory: `with RunLock(path): …`.

    Entering makes the directory. Leaving removes the file, and the directory if it was made here and nothing is in it.

    Args:
        directory: the run's directory.

    Raises:
        RunInUseError: another process, or another run of this process, has the lock; on entering.
        OSError: the directory cannot be made or written; on entering.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / "run.lock"
        self._handle = -1
        self._made_directory = False

    def __enter__(self) -> RunLock:
        self._made_directory = not self.path.parent.exists()
        self._handle = _locked_file(self.path)
        _HELD.add(self._handle)

        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        with suppress(OSError):  # the lock holds without a name
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(holder).encode() + b"\n", 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A forked child has no lock to give back: the file is its parent's.
        if self._handle not in _HELD:
            return

        # The file goes while it is locked: whoever opened it meanwhile sees that it is no longer the one in the folder.
        with suppress(OSError):
            self.path.unlink()
        if self._made_directory:
            with suppress(OSError):  # it is not empty
                self.path.parent.rmdir()
        _HELD.discard(self._handle)
        with suppress(OSError):  # the handle is gone in any case
            os.close(self._handle)


def _locked_file(path: Path) -> int:
    """A handle of the lock file, locked.

    Raises:
        RunInUseError, OSError: as in `RunLock`.
    """
    while True:
        make_folder_durably(path.parent)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # another process removed the empty directory just now
            continue

        try:
            _lock(handle, path)
            if _is_in_folder(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise

        # The holder before removed the file between the two calls, so another process may lock a new one.
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunInUseError(
            f"the run directory {str(path.parent)!r} is in use by {_holder(handle)}, or choose another one"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(
            f"the file system of {str(path.parent)!r} cannot lock files ({error.strerror}): nothing prevents a second "
            "process from writing there",
            RuntimeWarning,
            stacklevel=4,
        )


def _is_in_folder(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    """Who has the lock, by the text of the file, and what to do about it."""
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        name = f"process {holder['pid']} on {holder['host']}, which started at {holder['started']}"
        own = (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname())
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock, and has not written its name yet
        name, own = "another process", False
    return "this process: close the earlier Monitor" if own else f"{name}: wait until it has ended, stop it"


_HELD: set[int] = set()
"""Handles of the locks of this process."""


def _forget_locks() -> None:
    """In a forked child: close its copies, so that the locks end with the parent. The parent's are not unlocked."""
    for handle in _HELD:
        with suppress(OSError):
            os.close(handle)
    _HELD.clear()


os.register_at_fork(after_in_child=_forget_locks)
