"""Read the shards of a log in this process, in several processes, or on a Ray cluster.

Each function yields tallies in log order, whichever shard finishes first, so the merged result is the same everywhere.
After Ctrl-C this process keeps the rows it has read of a shard; remote readers keep only complete shards.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from rollcorr.diagnostics.log_check.reader_process import serve
from rollcorr.diagnostics.log_check.tally import Measurement, Tally
from rollcorr.rollout_log import Shard

OnRows = Callable[[int], None]

AHEAD = 4
"""Shards submitted ahead per processor of a cluster."""


def read_shards(
    measurement: Measurement, shards: Sequence[Shard], on_rows: OnRows, *, workers: int = 1, ray: str | None = None
) -> Iterator[Tally]:
    """Yield the tally of each shard in log order, until a KeyboardInterrupt.

    Args:
        measurement: what to measure in each shard.
        shards: consecutive shards of a log.
        on_rows: progress callback: receives the rows read since the last call.
        workers: number of reader processes; the default 1 reads in this process.
        ray: address of a Ray cluster that reads instead.

    Yields:
        One tally per shard; an interrupted tally is the last one.
    """
    workers = min(workers, len(shards))
    if ray is None and workers <= 1:
        for shard in shards:
            tally = measurement.of_shard(shard, on_rows)
            yield tally
            if tally.interrupted:
                return
        return

    # Report the rows of a shard only after its tally is merged, so that an interrupt loses no reported row.
    elsewhere = (
        read_on_ray(measurement, shards, address=ray) if ray else read_in_processes(measurement, shards, workers)
    )
    with contextlib.closing(elsewhere):
        for tally in elsewhere:
            yield tally
            on_rows(tally.rows)


def read_in_processes(measurement: Measurement, shards: Sequence[Shard], workers: int) -> Generator[Tally, None, None]:
    """Read the shards in spawned processes, in round-robin order.

    A standard-library pool needs named semaphores, which leak when all its processes are killed.

    Raises:
        ChildProcessError: a worker was killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads mid-operation
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    readers: list[tuple[Connection, BaseProcess]] = []
    try:
        with _without_ctrl_c():
            for number in range(workers):
                here, there = context.Pipe()
                reader = context.Process(target=serve, args=(there,), kwargs={"parent": parent}, daemon=True)
                readers.append((here, reader))
                try:
                    reader.start()
                finally:
                    there.close()  # or this process never receives EOF
                with contextlib.suppress(OSError):  # a dead reader is detected below
                    here.send_bytes(pickle.dumps((measurement, shards[number::workers])))

        # Each reader has every n-th shard, so asking the readers in turn keeps log order.
        for number in range(len(shards)):
            try:
                answer = pickle.loads(readers[number % workers][0].recv_bytes())
            except (EOFError, OSError) as error:
                raise ChildProcessError(
                    f"one of {workers} workers died without an answer. Either it was killed, perhaps because memory "
                    "ran out (use fewer workers), or the script that starts them lacks "
                    '`if __name__ == "__main__":`'
                ) from error
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        for pipe, process in readers:
            pipe.close()
            if process.pid is not None:  # it was started
                process.kill()
                process.join()
                process.close()


def read_on_ray(measurement: Measurement, shards: Sequence[Shard], *, address: str) -> Generator[Tally, None, None]:
    """Read the shards as tasks of a Ray cluster.

    An existing connection to a cluster is reused and stays open.

    Args:
        measurement: what to measure in each shard.
        shards: shards whose files every node can open under the same path; every node needs this package.
        address: "local" starts a cluster on this machine, "auto" finds the running one, or "ray://host:port".

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: no cluster at the address.
        ChildProcessError: Ray lost a task.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("a Ray cluster needs Ray: pip install 'rollcorr[ray]'") from error
    connects = not ray.is_initialized()
    if connects:
        # A private cluster needs no dashboard and no usage report.
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    task = ray.remote(Measurement.of_shard)
    with contextlib.ExitStack() as stack:
        if connects:
            stack.callback(ray.shutdown)
        ahead = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        out: deque[object] = deque()
        try:
            for number in range(len(shards) + ahead):
                if number < len(shards):
                    out.append(task.remote(measurement, shards[number]))
                if out and number >= ahead:
                    tally: Tally = ray.get(out[0])
                    out.popleft()
                    yield tally
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise ChildProcessError(f"Ray lost a task: {error}") from error
        finally:
            for reference in out:
                ray.cancel(reference)


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C; processes started meanwhile inherit this, so only this process handles it."""
    # Python handles signals only in the main thread; do not change them elsewhere.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
