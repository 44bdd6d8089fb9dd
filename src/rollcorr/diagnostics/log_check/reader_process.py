"""A process that reads some shards of a log for another one, and sends what it has read through a pipe.

The pipe is all that the two share, so that nothing stays in the system when they are killed: no semaphore, no shared
memory. Messages are pickled here, because the pipe's own pickling would send tensors as shared files. A full pipe
makes the reader wait, so it is at most one shard ahead.

Nothing heavy is imported at the top: a new process can notice its parent's death only after the imports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1
"""Of `prctl`, Linux: the signal that a process gets when its parent dies."""


def serve(pipe: Connection, *, parent: int | None) -> None:
    """Receive a measurement and shards, and send the tally of each shard, or the error that ends the work.

    Args:
        pipe: to the parent.
        parent: number of the parent's process, if its main thread started this one: then the system ends this process
            with it, where it can (Linux). With another thread the system would not wait for the end of the process.
    """
    if parent is not None:
        _end_with(parent)

    # The end of the pipe is the end of the parent.
    with contextlib.suppress(EOFError, OSError):
        measurement, shards = pickle.loads(pipe.recv_bytes())
        import torch

        torch.set_num_threads(1)
        for shard in shards:
            try:
                answer = measurement.of_shard(shard, lambda rows: None)
            except Exception as error:  # the parent raises whatever it is
                answer = _portable(error)
            pipe.send_bytes(pickle.dumps(answer))


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
