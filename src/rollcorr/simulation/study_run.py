"""Run cells one by one, save each result immediately, and write one table per study.

    OUTPUT/cells/KEY.json    result of a finished cell; later runs with the same settings reuse it
    OUTPUT/STUDY.csv         the rows of a study, in the order of its cells
    OUTPUT/run.json          command, versions, processor, seconds, and number of finished cells

Ctrl-C stops the run. The tables then contain the finished cells, and the same command resumes the run.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollcorr.run_directory.durable_files import write_text_durably
from rollcorr.simulation.studies import Cell, ResultRow, run_cell

FORMAT = 1
"""Part of every key. A change of what a cell measures raises it, so that no old result is taken for a new one."""

OnCell = Callable[[Cell, int, int], None]


@dataclass(frozen=True)
class StudyResult:
    """Result of a run, complete or interrupted.

    Attributes:
        rows: study → rows of its finished cells.
        done: finished cells.
        total: cells of the study.
        reused: finished cells measured by an earlier run.
        cpu_seconds: total of all finished cells, including earlier runs.
        interrupted: True if Ctrl-C ended the run.
    """

    rows: dict[str, list[ResultRow]]
    done: int
    total: int
    reused: int
    cpu_seconds: float
    interrupted: bool


def run_cells(
    cells: Sequence[Cell],
    folder: str | os.PathLike[str],
    *,
    command: str,
    run: Callable[[Cell], list[ResultRow]] = run_cell,
    on_cell: OnCell | None = None,
) -> StudyResult:
    """Run the cells without a stored result, then write the tables.

    Args:
        cells: the cells of the study.
        folder: folder of the results; created if missing.
        command: written into run.json, so that a reader can repeat the run.
        run: function that measures one cell.
        on_cell: callback before each cell, with its number and the total.

    Returns:
        The rows of all finished cells, with counts and CPU time.

    Raises:
        OSError: the folder cannot be written.
        ValueError: a setting of a cell is invalid.
    """
    folder = Path(folder)
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    by_study: dict[str, list[ResultRow]] = {}
    done, reused, cpu_seconds, interrupted = 0, 0, 0.0, False
    start = time.perf_counter()
    try:
        for number, cell in enumerate(cells):
            if on_cell is not None:
                on_cell(cell, number, len(cells))
            path = folder / "cells" / f"{cell_key(cell)}.json"
            # A stored cell is never recomputed: the same command resumes.
            record = _read_finished_cell(path)
            reused += record is not None
            if record is None:
                before = time.process_time()
                record = {"study": cell.study, "settings": dict(cell.settings), "rows": run(cell)}
                record["cpu_seconds"] = time.process_time() - before
                write_text_durably(path, json.dumps(record, ensure_ascii=False))
            by_study.setdefault(cell.study, []).extend(record["rows"])
            done, cpu_seconds = done + 1, cpu_seconds + record["cpu_seconds"]
    except KeyboardInterrupt:
        interrupted = True

    for study, rows in by_study.items():
        write_text_durably(folder / f"{study}.csv", to_csv(rows))
    facts = {
        "command": command,
        "cells": done,
        "cells_of_the_study": len(cells),
        "cells_reused": reused,
        "cpu_seconds": round(cpu_seconds, 1),
        "seconds_of_the_last_run": round(time.perf_counter() - start, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "seeds": _seeds_by_study(cells),
    }
    write_text_durably(folder / "run.json", json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    return StudyResult(by_study, done, len(cells), reused, cpu_seconds, interrupted)


def cell_key(cell: Cell) -> str:
    """Return a name for the cell's file from everything that determines its result."""
    text = json.dumps([FORMAT, cell.study, dict(cell.settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def to_csv(rows: Sequence[ResultRow]) -> str:
    """Format rows as CSV with the columns of the first row and six significant digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})
    return text.getvalue()


def _read_finished_cell(path: Path) -> dict[str, Any] | None:
    """Return rows and seconds of a finished cell; None if the file is missing or incomplete."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _seeds_by_study(cells: Sequence[Cell]) -> dict[str, list[int]]:
    """Return study → the seeds of its draws. The seeds of the policies are fixed in the studies."""
    seeds: dict[str, set[int]] = {}
    for cell in cells:
        if "seed" in cell.settings:
            seeds.setdefault(cell.study, set()).add(cell.settings["seed"])
    return {study: sorted(found) for study, found in seeds.items()}


def processor_name() -> str:
    """Return the system's name of the processor."""
    facts = Path("/proc/cpuinfo")
    named = re.search(r"(?m)^model name\s*: (.*)$", facts.read_text(encoding="utf-8") if facts.exists() else "")
    return named[1].strip() if named else platform.processor() or platform.machine()
