"""The training bench: train one small policy with each correction on each sampler, over eight seeds.

    python experiments/bench/bench.py --jobs 2          every cell of stage 1 that is left; then the page
    python experiments/bench/bench.py stale-none-0      one cell alone
    python experiments/bench/bench.py --list            which cells are done, and what the rest costs
    python experiments/bench/bench.py --page            the page and its tables, from the finished cells
    python experiments/bench/bench.py --quick           train one finished cell again, and compare

A cell is one training as in the trained study (experiments/mismatch_in_practice), which reads the cells here. All
cells of a seed start from one warm-up policy. Ctrl-C keeps every finished cell, and the same command goes on. Stage 1
trains the corrections that decide between weights of tokens and of sequences, stage 2 also those that reject, stage 3
also rivals of horizon weights (rivals.py). Then first_rollouts.py asks `advise` for each sampler and seed, and the page
compares its choice with the best.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "mismatch_in_practice"))

from advice_evidence import write_evidence  # noqa: E402
from bench_page import write_page  # noqa: E402
from cell_runner import STOPPED, make_parser, pick_cells, train_cells  # noqa: E402
from first_rollouts import measure_left  # noqa: E402
from intervals import interval, prediction_half  # noqa: E402
from rivals import trained_by  # noqa: E402
from trained_cell import Cell, read_cells, run_cell  # noqa: E402
from trained_page import select  # noqa: E402

CELLS = HERE / "cells"

SAMPLERS = ("stale_quantized", "stale", "quantized", "clean", "truncated")
"""Columns of trained_cell.py, the most informative first: a bench that is stopped has whole sets of seeds."""

STAGES = {
    1: ("none", "token_tis", "token_tis_20", "seq_tis", "horizon"),
    2: ("seq_mis", "geo_rs", "geo_rs_token_tis"),
    3: ("prefix", "min_prefix", "ess_cap"),
}
"""Corrections that each stage adds."""

SEEDS = range(8)

QUICK = Cell("stale_quantized", "seq_tis", 0)
"""The cell that `--quick` trains again."""


def cells(stage: int) -> list[Cell]:
    """Return the cells of all stages up to this one: seed after seed of a sampler, then the next sampler."""
    corrections = [name for number, names in STAGES.items() if number <= stage for name in names]
    return [Cell(sampler, name, seed) for sampler in SAMPLERS for seed in SEEDS for name in corrections]


def train_again(cell: Cell, found: Sequence[dict[str, Any]], console: Console) -> int:
    """Train a cell anew, and check that it ends in the 95 % t interval of one further run of its group.

    Returns:
        0 if it does, 1 if not, 2 if fewer than two seeds of the group are finished.
    """
    ends = [one["held_out"][-1]["accuracy"] for one in select(found, cell.column, cell.correction)]
    if len(ends) < 2:
        console.print(f"{cell.name}: {len(ends)} seeds are finished, an interval needs 2; run `make training-bench`")
        return 2
    run_dir = Path("runs") / "bench_quick" / cell.name
    shutil.rmtree(run_dir, ignore_errors=True)
    with trained_by(cell.correction):
        result = run_cell(cell, console, f"run_dir={run_dir}")
    if result is None:
        return STOPPED

    end, center, half = result["held_out"][-1]["accuracy"], interval(ends).mean, prediction_half(ends)
    is_inside = abs(end - center) <= half
    verdict = "within" if is_inside else "outside of"
    console.print(f"{cell.name} ends at {end:.3f}, {verdict} {center:.3f} ± {half:.3f} ({len(ends)} seeds)")
    return int(not is_inside)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the cells that the arguments name, and write the page."""
    parser = make_parser(__doc__, CELLS)
    parser.set_defaults(around=lambda cell: trained_by(cell.correction))
    parser.add_argument("--stage", type=int, choices=STAGES, default=1, help="stages up to this one; defaults to 1")
    parser.add_argument("--quick", action="store_true", help="train one finished cell again, and compare")
    options = parser.parse_args(arguments)

    done = [options.folder, CELLS]
    chosen = pick_cells(cells(max(STAGES)), options.names) if options.names else cells(options.stage)
    if options.quick:
        found = read_cells(cells(max(STAGES)), *done)
        return max(train_again(cell, found, Console()) for cell in (chosen if options.names else [QUICK]))

    code = train_cells(chosen, done, options, Path(__file__).resolve())
    if code or options.list or options.no_page:
        return code
    if not options.page and not options.names and (code := measure_left(SAMPLERS, Console())):
        return code
    write_page(cells(options.stage), read_cells(cells(options.stage), *done))
    write_evidence()
    return 0


if __name__ == "__main__":
    sys.exit(main())
