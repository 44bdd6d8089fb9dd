"""Follow a child process through every system call that changes a file under one folder; see file_events.c."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = -1
"""Bytes of a disk that never fills; the bytes on it are not counted."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended.

    Attributes:
        killed: by SIGKILL.
        exit_code: if it ended by itself, else the negative number of the signal.
        events: calls under the folder, up to the end.
        peak: most bytes that were under the folder at any time, if the disk had a limit.
    """

    killed: bool
    exit_code: int
    events: int = 0
    peak: int = 0


class FileEvents:
    """The compiled follower.

    Args:
        folder: where the library is compiled to.

    Raises:
        OSError: this machine has no C compiler, or is no Linux.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or os.uname().sysname != "Linux":
            raise OSError("file events need Linux and a C compiler named cc or gcc")
        library, source = folder / "file_events.so", Path(__file__).with_name("file_events.c")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.follow.restype = ctypes.c_long

    def run(
        self,
        call: Callable[[], int],
        root: Path,
        *,
        kill_at: int = 0,
        in_the_middle: bool = False,
        disk: int = NO_LIMIT,
        log: Path | None = None,
        removed: Path | None = None,
    ) -> Ended:
        """Run a function in a forked child and follow it.

        Args:
            call: returns the exit code of the child.
            root: the folder.
            kill_at: the child is killed just before this event under the root, counted from 1; 0 never.
            in_the_middle: if that event is a write, half of it is done first.
            disk: bytes that fit under the root.
            log: gets one line per event, see `power_loss.Event`.
            removed: a folder on the same disk, for links to files that lose their names.

        Raises:
            OSError: the kernel does not let this process follow a child.
        """
        child = os.fork()
        if child == 0:
            os._exit(call() if self._library.become_followed() == 0 else 98)

        status, peak = ctypes.c_int(), ctypes.c_longlong()
        events = self._library.follow(
            ctypes.c_int(child),
            os.fsencode(root.resolve()),
            ctypes.c_long(kill_at),
            ctypes.c_int(in_the_middle),
            ctypes.c_longlong(disk),
            None if log is None else os.fsencode(log),
            None if removed is None else os.fsencode(removed),
            ctypes.byref(status),
            ctypes.byref(peak),
        )
        if events < 0:
            raise OSError("this system does not let a process follow its child (ptrace); allow it to run this test")
        code = os.waitstatus_to_exitcode(status.value)
        return Ended(killed=code == -signal.SIGKILL, exit_code=code, events=events, peak=peak.value)
