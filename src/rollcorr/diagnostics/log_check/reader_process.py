"""Reader process: reads some shards of a log for its parent, and sends each tally through a pipe.

The pipe is the only shared resource, so killed processes leak neither semaphores nor shared memory. Messages are
pickled here, because the pipe's own pickling sends tensors as shared files. A full pipe blocks the reader, so it stays
at most one shard ahead.

Heavy modules are imported late: a new process notices its parent's death only after its imports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1
"""`prctl` option (Linux): signal that a process receives when its parent dies."""


def serve(pipe: Connection, *, parent: int | None) -> None:
    """Receive a measurement and shards; send the tally of each shard, or the error that ends the work.

    Args:
        pipe: connection to the parent.
        parent: process id of the parent, if its main thread started this process: Linux then kills this process when
            the parent dies. Started by a different thread, the process would be killed when that thread ends.
    """
    if parent is not None:
        _end_with(parent)

    # A closed pipe means that the parent has ended.
    with contextlib.suppress(EOFError, OSError):
        measurement, shards = pickle.loads(pipe.recv_bytes())
        import torch

        torch.set_num_threads(1)
        for shard in shards:
            try:
                answer = measurement.of_shard(shard)
            except Exception as error:  # sent to the parent, which raises it
                answer = _portable(error)
            pipe.send_bytes(pickle.dumps(answer))


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
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
    if os.getppid() != parent:  # the parent died before `prctl` took effect
        os._exit(0)
