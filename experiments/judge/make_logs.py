"""Make the judge's logs, two at a time; finished logs are kept, so the same command goes on after Ctrl-C.

    make judge                                        every log that is not there yet, then the score
    python experiments/judge/make_logs.py --only loops/ --seeds 1 --root runs/judge

Each log is a folder ROOT/KIND/NAME-SEED with `rollouts.parquet`; outside faults add `excess.npz`. ROOT/nulls has the
correct rollouts from which the scorer measures nulls, ROOT/starts the supervised starts of the loops.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path("runs") / "judge"
TASK_NAMES = ("copy", "reverse", "arithmetic", "ngram", "stories")
LOOP_NAMES = (
    "frozen_sync",
    "healthy",
    "partial_sync",
    "dropout",
    "temperature",
    "top_p_raw",
    "shift_by_one",
    "template",
    "other_weights",
)
OUTSIDE_SEEDS, LOOP_SEEDS = 2, 5


@dataclass(frozen=True)
class Log:
    """One log of the judge.

    Args:
        kind: "loops", "outside", "turns", "sharpened", "nulls" or "healthy".
        name: what the answer key calls it, for example "frozen_sync" or "repetition_penalty".
        seed: its seed.
        task: the task of a loop, else "".
    """

    kind: str
    name: str
    seed: int
    task: str = ""

    @property
    def path(self) -> Path:
        """Its folder below the root."""
        return Path(self.kind) / self.task / f"{self.name}-{self.seed}"

    @property
    def null(self) -> Path:
        """The correct rollouts that its null is measured from, below the root."""
        if self.kind in ("nulls", "healthy"):
            return self.path / "null.parquet"
        own = "-top_p" if self.name == "top_p_raw" else ""
        return Path("nulls") / f"{self.task or 'stories260K'}-{self.seed}{own}.parquet"


def all_logs() -> list[Log]:
    """Return every log, seed 0 of each before seed 1."""
    from outside_faults import OUTSIDE
    from special_logs import SPECIAL

    logs = [Log("loops", name, seed, task) for seed in range(LOOP_SEEDS) for task in TASK_NAMES for name in LOOP_NAMES]
    logs += [Log("outside", name, seed) for seed in range(OUTSIDE_SEEDS) for name in OUTSIDE]
    logs += [
        Log(kind, name, seed)
        for kind, (_make, names, seeds) in SPECIAL.items()
        for seed in range(seeds)
        for name in names
    ]
    return sorted(logs, key=lambda log: log.seed)


def log_paths(root: Path) -> Iterator[tuple[Log, Path]]:
    """Yield each log that is there, with its `rollouts.parquet`."""
    for log in all_logs():
        path = root / log.path / "rollouts.parquet"
        if path.exists():
            yield log, path


def make(log: Log, root: Path, *, steps: int | None = None, rows: int | None = None) -> None:
    """Make a log in a folder beside its own, then move it there: a folder with this name is complete.

    Args:
        log: which.
        root: the folder of all logs.
        steps: fewer steps than the task has, for tests of loops.
        rows: fewer responses per step.
    """
    unfinished = root / log.path.with_name(f".{log.path.name}-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write(log, root, unfinished, steps, rows)
        unfinished.rename(root / log.path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(log: Log, root: Path, folder: Path, steps: int | None, rows: int | None) -> None:
    """Write the files of a log, and its null's rollouts if no other log has needed them yet."""
    from outside_faults import OUTSIDE, outside_log
    from special_logs import SPECIAL

    (root / "nulls").mkdir(parents=True, exist_ok=True)
    temporary = folder / "null.parquet"
    if log.kind == "loops":
        _write_loop(log, root, folder, steps, rows)
    elif log.kind in SPECIAL:
        SPECIAL[log.kind][0](log.name, log.seed, folder)
    else:
        outside_log(OUTSIDE[log.name], log.seed, folder)

    # Logs of one policy share a null; logs of kind "nulls" and "healthy" wrote their own.
    if not (root / log.null).exists() and log.null.parent != log.path:
        from outside_lab import Bench, write_null

        if log.kind != "loops":
            # Prompts and draws of its own; the parity of the seed decides about the policy.
            write_null(Bench(log.seed + 100), temporary)
        os.replace(temporary, root / log.null)


def _write_loop(log: Log, root: Path, folder: Path, steps: int | None, rows: int | None) -> None:
    """Run a loop; its null comes from the same pipeline without the fault, or with its top-p settings."""
    from judge_loop import NULL_TOKENS, Loop, start_weights
    from judge_tasks import TASKS
    from loop_faults import LOOPS, OtherWeights

    task = TASKS[log.task]
    start, other = start_weights(task, log.seed, root)
    loop = LOOPS[log.name](task, log.seed, start, steps=steps, rows=rows)
    if isinstance(loop, OtherWeights):
        loop.start, loop.other = start, other
    loop.run(folder / "rollouts.parquet")

    if not (root / log.null).exists():
        correct = LOOPS[log.name] if log.name == "top_p_raw" else Loop
        tokens = NULL_TOKENS if rows is None else rows
        first = correct(task, log.seed, start, rows=rows)
        first.generator.manual_seed(log.seed + 100)
        first.write_null(folder / "null.parquet", tokens=tokens)


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and use one core."""
    import torch
    from transformers.utils import logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    logging.disable_progress_bar()


def make_all(logs: list[Log], root: Path, jobs: int) -> int:
    """Make logs in `jobs` processes with a progress bar. Returns the number of logs that failed."""
    console, failed = Console(), 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console) as progress,
        concurrent.futures.ProcessPoolExecutor(jobs, context, _prepare_worker) as pool,
    ):
        bar = progress.add_task("logs", total=len(logs))
        waiting = {pool.submit(make, log, root): log for log in logs}
        try:
            for done in concurrent.futures.as_completed(waiting):
                progress.advance(bar)
                if error := done.exception():
                    failed += 1
                    console.print(f"{waiting[done].path}: {type(error).__name__}: {error}", markup=False)
        except KeyboardInterrupt:
            # Logs in progress are finished; the rest stays for the next time.
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def main() -> int:
    """Make the logs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="where the logs are; defaults to runs/judge")
    parser.add_argument("--only", default="", help="make logs whose path contains this, for example loops/copy")
    parser.add_argument("--seeds", type=int, default=LOOP_SEEDS, help="make the first N seeds only")
    parser.add_argument("--jobs", type=int, default=2, help="logs at a time; defaults to 2")
    chosen = parser.parse_args()
    logs = [log for log in all_logs() if chosen.only in str(log.path) and log.seed < chosen.seeds]
    missing = [log for log in logs if not (chosen.root / log.path).exists()]
    print(f"{len(logs) - len(missing)} of {len(logs)} logs are in {chosen.root}", flush=True)  # noqa: T201
    try:
        failed = make_all(missing, chosen.root, chosen.jobs)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)  # noqa: T201
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
