"""Exclusive lock of a run directory, released when its process ends.

The lock is `flock` on RUN/run.lock, an advisory lock of the operating system. The system releases it when the process
ends, also by SIGKILL, so the file of a dead process never blocks. Child processes do not inherit it: `exec` closes the
file, and `fork` does so through a hook. The file contains the owner's process id and host, for the error message.

On a network file system, NFS on Linux and Lustre with `-o flock` apply the lock across machines. Mounted with
`local_lock`, `nolock` or `-o localflock`, they apply it only between the processes of one machine. A file system
without locks causes a warning, and its processes are not excluded.
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
"""Error numbers of a file system without locks."""


class RunInUseError(RuntimeError):
    """Error for a directory that is locked by a running process; the message names the process."""


@contextmanager
def run_lock(
    directory: str | os.PathLike[str], *, kind: str = "run directory", owner: str = "Monitor"
) -> Iterator[None]:
    """Context manager that locks a run directory, or the weight folder of an engine, for writing.

    Entering makes the directory. Leaving removes the file, and the directory if it was made here and is empty.

    Args:
        directory: the run's directory.
        kind: what the directory is, for errors.
        owner: what to close if this process has the lock, for errors.

    Raises:
        RunInUseError: a different process, or another owner in this process, has the lock; on entering.
        OSError: the directory cannot be made or written; on entering.
    """
    path = Path(directory) / "run.lock"
    made_directory = not path.parent.exists()
    handle = _open_and_lock(path, kind, owner)
    _HELD_LOCKS.add(handle)

    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with suppress(OSError):  # the lock works without the owner's name
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode() + b"\n", 0)

    try:
        yield
    finally:
        # A forked child has no lock to release: the file belongs to its parent.
        if handle in _HELD_LOCKS:
            # Remove the file while it is locked: a process that opened it meanwhile sees that it was unlinked.
            with suppress(OSError):  # the directory is not empty, for example
                path.unlink(missing_ok=True)
                if made_directory:
                    path.parent.rmdir()
            _HELD_LOCKS.discard(handle)
            with suppress(OSError):  # the handle is closed in any case
                os.close(handle)


def _open_and_lock(path: Path, kind: str, owner: str) -> int:
    """Open and lock the lock file; return its handle.

    Raises:
        RunInUseError, OSError: as in `run_lock`.
    """
    while True:
        make_folder_durably(path.parent)

        # Before the lock is acquired, its previous owner may remove the file and the folder: retry then.
        with suppress(FileNotFoundError), ExitStack() as close_it:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            close_it.callback(os.close, handle)
            _lock(handle, path, kind, owner)
            if os.path.samestat(os.fstat(handle), path.stat()):
                close_it.pop_all()
                return handle


def _lock(handle: int, path: Path, kind: str, owner: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunInUseError(
            f"the {kind} {str(path.parent)!r} is in use by {_describe_holder(handle, owner)}, or choose another one"
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


def _describe_holder(handle: int, owner: str) -> str:
    """Return the lock's owner, from the file's text, and the fix."""
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        name = f"process {holder['pid']} on {holder['host']}, which started at {holder['started']}"
        is_own = (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname())
    except (OSError, ValueError, KeyError, TypeError):  # the owner has the lock, and has not written its name yet
        name, is_own = "another process", False
    return f"this process: close the earlier {owner}" if is_own else f"{name}: wait until it has ended, stop it"


_HELD_LOCKS: set[int] = set()
"""Handles of the locks of this process."""


def _forget_locks() -> None:
    """Close the child's copies after a fork, so that the locks end with the parent. The parent keeps its locks."""
    for handle in _HELD_LOCKS:
        with suppress(OSError):
            os.close(handle)
    _HELD_LOCKS.clear()


os.register_at_fork(after_in_child=_forget_locks)
