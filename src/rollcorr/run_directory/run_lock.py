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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from rollcorr.run_directory.durable_files import make_folder_durably

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of a file system that cannot lock."""


class RunInUseError(RuntimeError):
    """Another process runs in this directory; the message names it."""


@contextmanager
def run_lock(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the exclusive right to write in a run directory, as a context manager.

    Entering makes the directory. Leaving removes the file, and the directory if it was made here and nothing is in it.

    Args:
        directory: the run's directory.

    Raises:
        RunInUseError: another process, or another run of this process, has the lock; on entering.
        OSError: the directory cannot be made or written; on entering.
    """
    path = Path(directory) / "run.lock"
    made_directory = not path.parent.exists()
    handle = _locked_file(path)
    _HELD.add(handle)

    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with suppress(OSError):  # the lock holds without a name
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode() + b"\n", 0)

    try:
        yield
    finally:
        # A forked child has no lock to give back: the file is its parent's.
        if handle in _HELD:
            # The file goes while it is locked: whoever opened it meanwhile sees that it is no longer in the folder.
            with suppress(OSError):  # the directory is not empty, for example
                path.unlink(missing_ok=True)
                if made_directory:
                    path.parent.rmdir()
            _HELD.discard(handle)
            with suppress(OSError):  # the handle is gone in any case
                os.close(handle)


def _locked_file(path: Path) -> int:
    """Return a handle of the lock file, locked.

    Raises:
        RunInUseError, OSError: as in `run_lock`.
    """
    while True:
        make_folder_durably(path.parent)

        # Until this has the lock, the holder before may remove the file and the folder: then it begins again.
        with suppress(FileNotFoundError), ExitStack() as close_it:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            close_it.callback(os.close, handle)
            _lock(handle, path)
            if os.path.samestat(os.fstat(handle), path.stat()):
                close_it.pop_all()
                return handle


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
            stacklevel=5,
        )


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
