"""The program between an engine and a worker: it starts the worker, and ends it when the engine's process is gone.

    python guard.py LIFE PARENT FOLDER COMMAND …

A worker that reads its input notices by itself that the engine is gone, unless it hangs. What the worker has started
may not notice at all. The guard does nothing else, so it always notices:

- LIFE is the descriptor of a pipe that the engine holds open. A byte in it means "end the worker". Its end means that
  the engine's process has died: then the temporary FOLDER goes as well ("" for none).
- PARENT is the number of that process. Children that it forked may hold the pipe open after its death, so the guard
  also looks at who its parent is.

The worker is the leader of a session of its own, and all of it is killed. On Linux the system kills the worker when the
guard dies. The guard's exit code is that of the worker, or the guard dies of the same signal.

It is run as a file, with the standard library alone, so that it is there at once and takes little memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys

LOOK_SECONDS = 1.0
"""How often the guard looks at who its parent is."""

PR_SET_PDEATHSIG = 1
"""Of `prctl`, Linux: the signal that a process gets when its parent dies."""


def end_with_parent() -> None:
    """On Linux, let the system kill this process when the thread that started it ends; elsewhere do nothing."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(command: list[str]) -> int:
    """Start the worker with this process's standard streams; returns its number."""
    guard = os.getpid()
    worker = os.fork()  # the only thread of this process, so a fork copies nothing half-done
    if worker:
        return worker
    try:
        os.setsid()
        end_with_parent()
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
    os._exit(127)


def watch(worker: int, life: int, parent: int, folder: str) -> int:
    """Wait until the worker has ended, or end it; returns its wait status."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)

    while True:
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            return status
        ready, _, _ = select.select([life, woken], [], [], LOOK_SECONDS)
        if woken in ready:
            os.read(woken, 512)
        orphaned = os.getppid() != parent
        if life in ready or orphaned:
            told = life in ready and os.read(life, 1)
            _kill(worker)
            _, status = os.waitpid(worker, 0)
            if folder and not told:
                shutil.rmtree(folder, ignore_errors=True)
            return status


def _kill(worker: int) -> None:
    """Kill the worker and what it has started; it is not waited for yet, so its number is still its own."""
    for kill in (os.killpg, os.kill):  # the worker may not have its session yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(worker, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Start, watch, and end as the worker did."""
    life, parent, folder, command = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:]
    os.set_inheritable(life, False)
    worker = start(command)

    # The engine must see the end of the worker's output when the worker ends, so nobody else may hold it open.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)

    # What asks the engine to stop may reach its whole control group; the engine decides when the worker ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    status = watch(worker, life, parent, folder)

    # What the worker has started may outlive it, and would hold its pipes open.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)

    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # nobody may change what SIGKILL does
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
