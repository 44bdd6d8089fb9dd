"""The log that a user has before correcting, for each sampler and seed, and what the candidates of `advise` do to it.

    python experiments/bench/first_rollouts.py                  every sampler and seed that is left
    python experiments/bench/first_rollouts.py stale clean      these samplers alone

A log is that of the cell without correction: its first 16 steps of 64 responses, from the warm-up policy of its seed.
first_rollouts.csv keeps what `check_logs(…, candidates=True)` measures on it, so that a new rule needs no new rollouts.
Each log is kept as soon as it is measured. `bench.py` calls this program before it writes its page.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "mismatch_in_practice"))

from advice_evidence import FIRST_STEPS  # noqa: E402
from cell_runner import STOPPED  # noqa: E402
from trained_cell import COLUMNS, Cell, make_warm_up  # noqa: E402

from rollcorr.diagnostics import advise, check_logs  # noqa: E402
from rollcorr.diagnostics.advice.candidates import CandidateRow  # noqa: E402
from rollcorr.train import train  # noqa: E402

TABLE = HERE / "first_rollouts.csv"
SEEDS = range(8)

Row = dict[str, Any]


def measure(sampler: str, seed: int, console: Console) -> list[Row] | None:
    """Train the first steps without correction, and return a row for each candidate; None if it was stopped."""
    make_warm_up(seed, console)
    run_dir = Path("runs") / "bench_first" / f"{sampler}-{seed}"
    cell = Cell(sampler, "none", seed)
    config = cell.config(f"run_dir={run_dir}", f"steps={FIRST_STEPS}", "log.rollouts=true", "checkpoint.every=1000")
    if train(config, console=console).interrupted:
        return None

    result = check_logs([str(run_dir)], candidates=True)
    advice = advise(result, intended=True)
    shared = {
        "sampler": sampler,
        "seed": seed,
        "decision": advice.decision,
        "printed": advice.candidate or advice.reasons[0],
        "t_times_kl": _short(result.metrics["rollout_corr/t_times_kl"]),
    }
    if advice.decision == "correct":
        shutil.rmtree(run_dir)
    return [{**shared, **{name: _short(value) for name, value in asdict(row).items()}} for row in result.candidates]


def measure_left(samplers: Sequence[str], console: Console, path: Path = TABLE) -> int:
    """Measure each log that the table lacks, and return the exit code."""
    rows = read_rows(path)
    done = {(row["sampler"], int(row["seed"])) for row in rows}
    for sampler in samplers:
        for seed in SEEDS:
            if (sampler, seed) in done:
                continue
            added = measure(sampler, seed, console)
            if added is None:
                return STOPPED
            rows += added
            _write(path, rows)
            console.print(f"{sampler}, seed {seed}: {added[0]['decision']}, {added[0]['printed']}", highlight=False)
    return 0


def read_rows(path: Path = TABLE) -> list[Row]:
    """Return the rows of the table; none without a table."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def candidates_of(rows: Sequence[Row], sampler: str, seed: int) -> tuple[CandidateRow, ...]:
    """Return what `advise` chooses from, on the log of a sampler and seed; empty if it is not measured."""
    numbers = ("kept", "mean_weight", "token_ess", "sequence_ess", "signal", "noise", "bias")
    return tuple(
        CandidateRow(name=row["name"], **{key: float(row[key]) if row[key] else None for key in numbers})  # type: ignore[arg-type]
        for row in rows
        if (row["sampler"], int(row["seed"])) == (sampler, seed)
    )


def decision_of(rows: Sequence[Row], sampler: str, seed: int) -> tuple[str, str]:
    """Return the decision of `advise` on a measured log, and what it printed: a candidate, or why there is none."""
    row = next(row for row in rows if (row["sampler"], int(row["seed"])) == (sampler, seed))
    return row["decision"], row["printed"]


def _short(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else value


def _write(path: Path, rows: Sequence[Row]) -> None:
    """Write the table atomically, by sampler and seed."""
    order = {sampler: place for place, sampler in enumerate(COLUMNS)}
    partial = path.with_suffix(".part")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (order[row["sampler"]], int(row["seed"]))))
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(measure_left(sys.argv[1:] or list(COLUMNS), Console()))
