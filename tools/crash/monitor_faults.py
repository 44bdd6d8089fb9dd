"""Monitors on disks that fail for a while: each error at every I/O call of a run, gone after some more calls.

    python tools/crash/monitor_faults.py                 every error, every call, four lengths of the failure
    python tools/crash/monitor_faults.py --every 5       every fifth call
    python tools/crash/monitor_faults.py --ranks 2       two processes with gloo; the disk fails on one of them, or both

Afterwards every step must have its own numbers in metrics.jsonl, its rows in the rollout log, and the same metrics on
all ranks; the directory must be readable without a remark, and continue. `tests/monitor/fault_cases.py` has the run and
the checks. TRL's trainers meet the same errors in `make test-trl`.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "monitor")]

from fault_cases import faults_of, run_on  # noqa: E402
from faulty_disk import ERRORS, Faults  # noqa: E402

LENGTHS = (1, 4, 15, 60)
"""Calls that fail."""


def cases(calls: int, every: int) -> Iterator[tuple[int, int, int]]:
    """(error, first call, failing calls)."""
    for number in ERRORS:
        for first in range(1, calls + 1, every):
            for count in LENGTHS:
                yield number, first, count


def examine(folder: Path, case: tuple[int, int, int], group: Any = None, failing: tuple[int, ...] = (0,)) -> list[str]:  # noqa: ANN401
    """What is wrong after one case, on every rank."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    number, first, count = case
    found = run_on(folder, Faults(number, first if rank in failing else 0, count), group=group)
    wrong = []
    if group is not None:
        all_found: list[Any] = [None] * size
        dist.all_gather_object(all_found, found)
        wrong += ["the ranks differ"] if any(other != all_found[0] for other in all_found) else []
    if rank == 0:
        wrong += faults_of(folder, found, ranks=size)
    if group is not None:
        dist.barrier()
    return wrong


def main_of_rank(rank: int, folder: str, size: int, every: int, report: Any) -> None:  # noqa: ANN401
    """All cases on one rank; one process where `size` is 1."""
    logging.disable()
    torch.set_num_threads(1)
    group = None
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
        group = dist.group.WORLD
    counted = Faults()
    run_on(Path(folder) / "counted", counted, group=group)
    counts: list[Any] = [counted.calls] * size
    if group is not None:
        dist.all_gather_object(counts, counted.calls)
    calls = max(counts)
    tried = failed = 0
    who: list[tuple[int, ...]] = [(0,)] if size == 1 else [(0,), (size - 1,), tuple(range(size))]
    for case in cases(calls, every):
        for failing in who:
            tried += 1
            place = Path(folder) / str(tried)
            wrong = examine(place, case, group, failing)
            if wrong and rank == 0:
                failed += 1
                number, first, count = case
                name = errno.errorcode[number]
                print(f"{name} at call {first} for {count} calls on ranks {failing}: {'; '.join(wrong)}")
            if rank == 0:
                shutil.rmtree(place)
    if group is not None:
        dist.destroy_process_group()
    if rank == 0:
        print(f"{tried - failed} of {tried} passed; a run without failures has {calls} calls", flush=True)
        report.value = failed


def main() -> int:
    """Return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try every Nth call (default 1)")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default 1)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    failed = mp.get_context("spawn").Value("i", -1)
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, arguments.ranks, arguments.every, failed)
        mp.start_processes(main_of_rank, args=given, nprocs=arguments.ranks, start_method="spawn")
    return 1 if failed.value else 0


if __name__ == "__main__":
    sys.exit(main())
