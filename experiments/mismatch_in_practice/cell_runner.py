"""Run cells of the trained study or of the training bench: one after another or side by side, resumable."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from trained_cell import RUNS, Cell, make_warm_up, run_cell, warm_up_folder, write_cell

WARM_UP_MINUTES = 1.5
CORE_MINUTES = {"clean": 1.5, "stale": 1.5, "quantized": 1.5, "stale_quantized": 1.5, "truncated": 2.5}
"""What a cell costs on a core of an AMD EPYC with AVX-512; the time of a finished cell is in its file."""

STOPPED = 130
"""Exit code of a program that was stopped."""
STOP_CODES = (STOPPED, -signal.SIGINT, -signal.SIGTERM)


def budget_lines(chosen: Sequence[Cell], left: Sequence[Cell]) -> list[str]:
    """Return lines with the number of finished cells and the cost of the rest."""
    minutes = sum(CORE_MINUTES[cell.column] for cell in left)
    seeds = {cell.seed for cell in left if not (warm_up_folder(cell.seed) / "done.json").exists()}
    lines = [
        f"{len(chosen) - len(left)} of {len(chosen)} cells are done",
        f"{len(left)} cells are left: about {minutes:.0f} core-minutes",
    ]
    if seeds:
        lines.append(f"{len(seeds)} warm-ups come before: about {len(seeds) * WARM_UP_MINUTES:.1f} core-minutes")
    return lines


def run_here(left: Sequence[Cell], console: Console, options: argparse.Namespace) -> int:
    """Run cells one after another, until one is stopped or the time is over; returns the exit code."""
    started = time.monotonic()
    for cell in left:
        if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            break
        with options.around(cell):
            result = run_cell(cell, console)
        if result is None:
            console.print(f"stopped: {cell.name}; the same command goes on with it", highlight=False)
            return STOPPED
        write_cell(cell.path(options.folder), result)
        console.print(f"wrote {cell.path(options.folder)}", highlight=False)
    return 0


def run_side_by_side(left: Sequence[Cell], console: Console, options: argparse.Namespace, script: Path) -> int:
    """Run several cells at a time, each in its own process with a log beside its run; returns the exit code.

    Ctrl-C reaches every process: each saves its run, and no other cell starts. A cell that fails stops no other.
    """
    started = time.monotonic()
    codes: dict[str, int] = {}
    warming_up, stop = threading.Lock(), threading.Event()

    def run(cell: Cell) -> None:
        over = options.minutes is not None and time.monotonic() - started > 60 * options.minutes
        if over or stop.is_set():
            return

        # Two cells of a seed may start together: the first makes the policy that both begin with.
        with warming_up:
            make_warm_up(cell.seed, console)
        command = [sys.executable, str(script), cell.name, "--no-page", "--cells", str(options.folder)]
        with (RUNS / f"{cell.name}.log").open("w", encoding="utf-8") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        codes[cell.name] = code
        if code in STOP_CODES:
            stop.set()
        console.print(f"{cell.name}: exit code {code}", highlight=False)

    with Progress(console=console) as progress, ThreadPoolExecutor(options.jobs) as pool:
        bar = progress.add_task("core-minutes", total=sum(CORE_MINUTES[cell.column] for cell in left))
        running = {pool.submit(run, cell): cell for cell in left}
        try:
            for done in as_completed(running):
                done.result()
                progress.advance(bar, CORE_MINUTES[running[done].column])
        except KeyboardInterrupt:
            stop.set()
    if stop.is_set():
        console.print("stopped; the same command goes on with the cells that are left", highlight=False)
        return STOPPED
    return int(any(codes.values()))


def make_parser(description: str | None, folder: Path) -> argparse.ArgumentParser:
    """Return the options of a program that trains cells; `folder` is the default for their results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of cells; defaults to all")
    parser.add_argument("--list", action="store_true", help="show which cells are done, and what the rest costs")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    parser.add_argument("--page", action="store_true", help="write the page and its figures, and train nothing")
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at a time, each on one core")
    parser.add_argument("--minutes", type=float, help="start no cell after so many minutes")
    parser.set_defaults(around=nullcontext)  # of a cell: a context to train it in
    parser.add_argument("--cells", dest="folder", type=Path, default=folder, help="folder of the results")
    return parser


def pick_cells(every: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """Return the named cells, or all without names.

    Raises:
        SystemExit: no cell has such a name.
    """
    by_name = {cell.name: cell for cell in every}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"no cell is called {', '.join(unknown)}; --list shows all")
    return [by_name[name] for name in names] or list(every)


def train_cells(chosen: Sequence[Cell], done: Sequence[Path], options: argparse.Namespace, script: Path) -> int:
    """Train the cells that no folder of `done` has; returns the exit code."""
    console = Console()
    left = [cell for cell in chosen if not any(cell.path(folder).exists() for folder in done)]
    if options.list:
        for cell in chosen:
            console.print(f"{'open' if cell in left else 'done'}  {cell.name}", highlight=False)
    for line in budget_lines(chosen, left):
        console.print(line, highlight=False)
    if options.list or options.page:
        return 0
    return run_here(left, console, options) if options.jobs == 1 else run_side_by_side(left, console, options, script)
