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
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from rollcorr.diagnostics.log_check.tally import Measurement, Tally
from rollcorr.rollout_log import Shard

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Event

OnRows = Callable[[int], None]
T = TypeVar("T")

AHEAD = 4
"""Shards handed out per reader."""
POLL = 0.1
"""Seconds between two looks at what other processes have read."""


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
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in the middle of something
    shared = _Shared(context.Value("q", 0), context.Event())
    # Together the workers use as many threads as this process would.
    threads = max(1, torch.get_num_threads() // workers)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(shared, threads))
    told = 0  # rows that `on_rows` has been called with

    def poll(future: Future[bytes]) -> Tally | None:
        nonlocal told
        wait([future], timeout=POLL)
        read = shared.rows.value
        on_rows(read - told)
        told = read
        return pickle.loads(future.result()) if future.done() else None

    try:
        with _on_interrupt(shared.stop.set) as listen:
            yield from _in_order(
                shards,
                lambda shard: pool.submit(_read, shard, measurement),
                poll,
                ahead=AHEAD * workers,
                started=listen,
            )
    except BrokenProcessPool as error:
        message = (
            f"one of {workers} workers died without an answer. Either it was killed, perhaps because memory ran out "
            '(use fewer workers), or the script that starts them lacks `if __name__ == "__main__":`'
        )
        raise ChildProcessError(message) from error
    finally:
        shared.stop.set()
        pool.shutdown(cancel_futures=True)


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


class _Shared(NamedTuple):
    """What a worker process and its parent share: rows read by all of them, and whether to stop."""

    rows: Synchronized[int]
    stop: Event


_parent: _Shared | None = None


def _start(shared: _Shared, threads: int) -> None:
    global _parent
    _parent = shared
    torch.set_num_threads(threads)


def _read(shard: Shard, measurement: Measurement) -> bytes:
    """A shard's tally, pickled here: the pool's own pickling would send tensors as shared files."""
    shared = _parent
    assert shared is not None

    def on_rows(rows: int) -> None:
        with shared.rows.get_lock():
            shared.rows.value += rows
        if shared.stop.is_set():
            raise KeyboardInterrupt

    return pickle.dumps(measurement.of_shard(shard, on_rows))


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
