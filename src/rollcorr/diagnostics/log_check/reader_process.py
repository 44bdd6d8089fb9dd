"""A process that reads shards for another one: it gets them through a pipe, and ends when the pipe does.

The pipe is all that the two share, so that nothing stays in the system when they are killed: no semaphore, no shared
memory. Messages are pickled here, because the pipe's own pickling would send tensors as shared files.

    to the reader      (number, shard, measurement): read this; None: stop as soon as possible
    from the reader    an int: rows that it has read since the last message; an `Answer`

Nothing heavy is imported at the top: a new process can notice its parent's death only after the imports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
"""Of `prctl`, Linux: the signal that a process gets when its parent dies."""


class Answer(NamedTuple):
    """What came of a shard.

    Attributes:
        number: which one.
        tally: what was read; None after an error.
        error: why the shard could not be read.
    """

    number: int
    tally: Any
    error: Exception | None


def serve(pipe: Connection, *, parent: int | None, threads: int) -> None:
    """Read what is asked for until the pipe ends: the body of a reader.

    Args:
        pipe: to the parent.
        parent: number of the parent's process, if its main thread started this one: then the system ends this process
            with it, where it can (Linux). With another thread the system would not wait for the end of the process.
        threads: torch's threads in this process.
    """
    if parent is not None:
        _end_with(parent)

    stop, tasks = threading.Event(), queue.SimpleQueue[Any]()
    threading.Thread(target=_listen, args=(pipe, tasks, stop), daemon=True).start()

    import torch

    torch.set_num_threads(threads)
    while True:
        number, shard, measurement = tasks.get()

        def on_rows(rows: int) -> None:
            _send(pipe, rows)
            if stop.is_set():
                raise KeyboardInterrupt

        try:
            answer = Answer(number, measurement.of_shard(shard, on_rows), None)
        except Exception as error:  # the parent raises whatever it is
            answer = Answer(number, None, _portable(error))
        _send(pipe, answer)


def _listen(pipe: Connection, tasks: queue.SimpleQueue[Any], stop: threading.Event) -> None:
    """Hand on what arrives. After the end of the pipe nobody waits for what the main thread may be computing."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = pickle.loads(pipe.recv_bytes())
            if message is None:
                stop.set()
            else:
                tasks.put(message)
    os._exit(0)


def _send(pipe: Connection, message: object) -> None:
    try:
        pipe.send_bytes(pickle.dumps(message))
    except OSError:  # the parent is gone
        os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with(parent: int) -> None:
    if sys.platform.startswith("linux"):
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this process could ask
        os._exit(0)
