"""Who reads the shards of a log: this process, several processes, or a Ray cluster.

Each function yields the tallies of the shards in the order of the log, whichever was finished first. So what is merged
from them is the same everywhere. Shards are handed out a few at a time, so that few results have to wait for an earlier
one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import TypeVar, cast

from rollcorr.diagnostics.log_check.reader_process import Answer, serve
from rollcorr.diagnostics.log_check.tally import Measurement, Tally
from rollcorr.rollout_log import Shard

OnRows = Callable[[int], None]
T = TypeVar("T")

AHEAD = 4
"""Shards handed out per reader."""
POLL = 0.1
"""Seconds between two looks at what other processes have read."""
TASKS = 2
"""Shards that one process has at a time: one that it reads, and the next, so that it never waits."""
END_SECONDS = 10.0
"""How long a process may take to end after its pipe, before it is killed."""


def read_shards(
    measurement: Measurement, shards: Sequence[Shard], on_rows: OnRows, *, workers: int = 1, ray: str | None = None
) -> Iterator[Tally]:
    """The tally of each shard, in the order of the log, until a KeyboardInterrupt: what was read then comes last.

    Args:
        measurement: what is measured, and how.
        shards: consecutive shards of a log.
        on_rows: called now and then, with the rows read since the last time.
        workers: processes that read; 1 is this one.
        ray: address of a Ray cluster that reads instead.
    """
    if ray is not None:
        return read_on_ray(measurement, shards, on_rows, address=ray)
    workers = min(workers, len(shards))
    if workers > 1:
        return read_in_processes(measurement, shards, on_rows, workers=workers)
    return read_here(measurement, shards, on_rows)


def read_here(measurement: Measurement, shards: Sequence[Shard], on_rows: OnRows) -> Iterator[Tally]:
    """Read the shards one after the other, until a KeyboardInterrupt."""
    for shard in shards:
        tally = measurement.of_shard(shard, on_rows)
        yield tally
        if tally.interrupted:
            return


def read_in_processes(
    measurement: Measurement, shards: Sequence[Shard], on_rows: OnRows, *, workers: int
) -> Iterator[Tally]:
    """Read the shards in `workers` new processes. After Ctrl-C each of them hands in what it has read.

    Raises:
        ChildProcessError: a worker was killed.
    """
    pool = _Pool(workers)

    def poll(number: int) -> Tally | None:
        on_rows(pool.receive())
        return pool.take(number)

    try:
        with _on_interrupt(pool.stop) as listen:
            # Processes that are started now ignore Ctrl-C for good.
            pool.start()
            yield from _in_order(
                shards,
                lambda shard: pool.submit(shard, measurement),
                poll,
                ahead=AHEAD * workers,
                started=listen,
            )
    finally:
        pool.close()


def read_on_ray(measurement: Measurement, shards: Sequence[Shard], on_rows: OnRows, *, address: str) -> Iterator[Tally]:
    """Read the shards as tasks of a Ray cluster. After Ctrl-C the shards that are whole count, from the first on.

    A cluster that this process is connected to already is used, and left as it is.

    Args:
        measurement: how.
        shards: their files must be found under the same names on every node, which must have this package.
        on_rows: called with the rows of each shard.
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
    stop, task = threading.Event(), ray.remote(_read_on_node)

    def poll(reference: object) -> Tally | None:
        ready, _ = ray.wait([reference], timeout=POLL)
        if not ready:
            return Tally(interrupted=True) if stop.is_set() else None
        tally: Tally = ray.get(reference)
        on_rows(tally.rows)
        return tally

    with _ray_connection(ray, address), _on_interrupt(stop.set) as listen:
        ahead = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        out: deque[object] = deque(maxlen=ahead)

        def submit(shard: Shard) -> object:
            reference: object = task.remote(shard, measurement)
            out.append(reference)
            return reference

        try:
            for tally in _in_order(shards, submit, poll, ahead=ahead, started=listen):
                yield tally
                if tally.interrupted:
                    return
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise ChildProcessError(f"Ray lost a task: {error}") from error
        finally:
            for reference in out:
                ray.cancel(reference)


class _Pool:
    """Processes that read shards, each at the other end of a pipe.

    A pool of the standard library would need semaphores, which have names in the system and stay there when all its
    processes are killed.

    Args:
        size: how many processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._readers: dict[Connection, BaseProcess] = {}
        self._under_way: dict[Connection, int] = {}
        self._waiting: deque[tuple[int, Shard, Measurement]] = deque()
        self._answers: dict[int, Answer] = {}
        self._submitted = 0
        self._stopped = threading.Event()
        self._told_to_stop = False

    def start(self) -> None:
        """Start the processes."""
        context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in the middle of something
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        for _ in range(self._size):
            here, there = context.Pipe()
            reader = context.Process(target=serve, args=(there,), kwargs={"parent": parent, "threads": 1})
            reader.daemon = True  # also ended when this process ends in order
            self._readers[here], self._under_way[here] = reader, 0
            try:
                reader.start()
            finally:
                there.close()  # or this process would never see the end of the pipe

    def submit(self, shard: Shard, measurement: Measurement) -> int:
        """Hand out a shard; returns its number."""
        self._submitted += 1
        self._waiting.append((self._submitted, shard, measurement))
        return self._submitted

    def stop(self) -> None:
        """Let every reader hand in what it has read; safe in a signal handler."""
        self._stopped.set()

    def receive(self) -> int:
        """Give the readers work, and wait a moment for answers; returns the rows that were read meanwhile.

        Raises:
            ChildProcessError: a reader is gone.
        """
        if self._stopped.is_set() and not self._told_to_stop:
            self._told_to_stop = True
            for pipe in self._readers:
                self._send(pipe, None)
        for pipe, under_way in self._under_way.items():
            for _ in range(min(TASKS - under_way, len(self._waiting))):
                self._send(pipe, self._waiting.popleft())
                self._under_way[pipe] += 1

        rows = 0
        for pipe in cast("list[Connection]", connection.wait(list(self._readers), timeout=POLL)):
            try:
                message = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError) as error:
                raise self._lost() from error
            if isinstance(message, int):
                rows += message
            else:
                self._answers[message.number] = message
                self._under_way[pipe] -= 1
        return rows

    def take(self, number: int) -> Tally | None:
        """What came of a shard, if it has been read; raises what its reader raised."""
        answer = self._answers.pop(number, None)
        if answer is None:
            return None
        if answer.error is not None:
            raise answer.error
        tally: Tally = answer.tally
        return tally

    def close(self) -> None:
        """End the readers: each ends with its pipe, or is killed."""
        for pipe in self._readers:
            pipe.close()
        for reader in self._readers.values():
            if reader.pid is not None:  # it was started
                reader.join(END_SECONDS)
                reader.kill()
                reader.join()
                reader.close()

    def _send(self, pipe: Connection, message: object) -> None:
        try:
            pipe.send_bytes(pickle.dumps(message))
        except OSError as error:
            raise self._lost() from error

    def _lost(self) -> ChildProcessError:
        return ChildProcessError(
            f"one of {self._size} workers died without an answer. Either it was killed, perhaps because memory ran out "
            '(use fewer workers), or the script that starts them lacks `if __name__ == "__main__":`'
        )


def _read_on_node(shard: Shard, measurement: Measurement) -> Tally:
    return measurement.of_shard(shard, lambda rows: None)


def _in_order(
    shards: Sequence[Shard],
    submit: Callable[[Shard], T],
    poll: Callable[[T], Tally | None],
    *,
    ahead: int,
    started: Callable[[], None],
) -> Iterator[Tally]:
    """Tallies in the order of the shards, at most `ahead` of which are handed out; `poll` waits a moment for one."""
    left = iter(shards)
    waiting = deque(submit(shard) for shard in islice(left, ahead))
    started()
    while waiting:
        tally = poll(waiting[0])
        if tally is not None:
            waiting.popleft()
            waiting.extend(submit(shard) for shard in islice(left, 1))
            yield tally


@contextlib.contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call `stop` at the first Ctrl-C; a second one interrupts as ever.

    Ctrl-C is ignored until what this yields is called: processes that are started meanwhile ignore it for good, which
    leaves it to this process to stop them. Python hears of signals in its main thread only; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    def listen() -> None:
        signal.signal(signal.SIGINT, interrupted)

    try:
        yield listen
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
