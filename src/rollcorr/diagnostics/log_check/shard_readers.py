"""Who reads the shards of a log: this process, several processes, or a Ray cluster.

Each function yields the tallies of the shards in the order of the log, whichever was finished first. So what is merged
from them is the same everywhere. After Ctrl-C this process keeps what it has read of a shard; other readers keep whole
shards.
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
from types import ModuleType

from rollcorr.diagnostics.log_check.reader_process import serve
from rollcorr.diagnostics.log_check.tally import Measurement, Tally
from rollcorr.rollout_log import Shard

OnRows = Callable[[int], None]

AHEAD = 4
"""Shards handed out per processor of a cluster."""


def read_shards(
    measurement: Measurement, shards: Sequence[Shard], on_rows: OnRows, *, workers: int = 1, ray: str | None = None
) -> Iterator[Tally]:
    """The tally of each shard, in the order of the log, until a KeyboardInterrupt.

    Args:
        measurement: what is measured, and how.
        shards: consecutive shards of a log.
        on_rows: called now and then, with the rows read since the last time.
        workers: processes that read; 1 is this one.
        ray: address of a Ray cluster that reads instead.
    """
    workers = min(workers, len(shards))
    if ray is None and workers <= 1:
        for shard in shards:
            tally = measurement.of_shard(shard, on_rows)
            yield tally
            if tally.interrupted:
                return
        return

    # The rows of a shard are reported once its tally is merged: an interrupt then loses none of them.
    elsewhere = (
        read_on_ray(measurement, shards, address=ray) if ray else read_in_processes(measurement, shards, workers)
    )
    with contextlib.closing(elsewhere):
        for tally in elsewhere:
            yield tally
            on_rows(tally.rows)


def read_in_processes(measurement: Measurement, shards: Sequence[Shard], workers: int) -> Generator[Tally, None, None]:
    """Read the shards in new processes, which take turns.

    A pool of the standard library would need semaphores, which have names in the system and stay there when all its
    processes are killed.

    Raises:
        ChildProcessError: a worker was killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in the middle of something
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
                    there.close()  # or this process would never see the end of the pipe
                with contextlib.suppress(OSError):  # a reader that is gone is noticed below
                    here.send_bytes(pickle.dumps((measurement, shards[number::workers])))

        # Each reader has every n-th shard, so its next answer is that of the next shard.
        for number in range(len(shards)):
            yield _answer(readers[number % workers][0], workers)
    finally:
        for pipe, process in readers:
            pipe.close()
            if process.pid is not None:  # it was started
                process.kill()
                process.join()
                process.close()


def _answer(pipe: Connection, workers: int) -> Tally:
    """The next tally of a reader; raises what the reader raised."""
    try:
        answer = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError) as error:
        raise ChildProcessError(
            f"one of {workers} workers died without an answer. Either it was killed, perhaps because memory ran out "
            '(use fewer workers), or the script that starts them lacks `if __name__ == "__main__":`'
        ) from error
    if isinstance(answer, Exception):
        raise answer
    tally: Tally = answer
    return tally


def read_on_ray(measurement: Measurement, shards: Sequence[Shard], *, address: str) -> Generator[Tally, None, None]:
    """Read the shards as tasks of a Ray cluster.

    A cluster that this process is connected to already is used, and left as it is.

    Args:
        measurement: how.
        shards: their files must be found under the same names on every node, which must have this package.
        address: "local" starts a cluster on this machine, "auto" finds the running one, or "ray://host:port".

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: there is no cluster at the address.
        ChildProcessError: Ray lost a task.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("a Ray cluster needs Ray: pip install 'rollcorr[ray]'") from error
    task = ray.remote(_read_elsewhere)
    with _ray_connection(ray, address):
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


def _read_elsewhere(measurement: Measurement, shard: Shard) -> Tally:
    return measurement.of_shard(shard, lambda rows: None)


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C: processes that are started meanwhile ignore it for good, which leaves it to this process."""
    # Python hears of signals in its main thread only; elsewhere nothing changes.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _ray_connection(ray: ModuleType, address: str) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    options = {}
    if address == "local":  # a cluster of this command's own: nothing to look at, and nothing to report to anybody
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    try:
        yield
    finally:
        ray.shutdown()
