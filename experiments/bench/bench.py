"""The training bench: train one small policy with each correction on each sampler, over eight seeds.

    python experiments/bench/bench.py --jobs 2          every cell of stage 1 that is left; then the page
    python experiments/bench/bench.py stale-none-0      one cell alone
    python experiments/bench/bench.py --list            which cells are done, and what the rest costs
    python experiments/bench/bench.py --page            the page and its tables, from the finished cells
    python experiments/bench/bench.py --quick           train one finished cell again, and compare

A cell is one training as in the trained study (experiments/mismatch_in_practice), whose finished cells count here. All
cells of a seed start from one warm-up policy. Ctrl-C keeps every finished cell, and the same command goes on. Stage 1
trains the corrections that decide between weights of tokens and of sequences, stage 2 also those that reject.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "mismatch_in_practice"))

from cell_runner import make_parser, train_cells  # noqa: E402
from trained import CELLS as CELLS_OF_STUDY  # noqa: E402
from trained_cell import Cell  # noqa: E402

CELLS = HERE / "cells"

SAMPLERS = ("stale_quantized", "stale", "quantized", "clean", "truncated")
"""Columns of trained_cell.py, the most informative first: a bench that is stopped has whole sets of seeds."""

STAGES = {
    1: ("none", "token_tis", "token_tis_20", "seq_tis", "horizon"),
    2: ("seq_mis", "geo_rs", "geo_rs_token_tis"),
}
"""Corrections that each stage adds."""

SEEDS = range(8)


def cells(stage: int) -> list[Cell]:
    """Return the cells of all stages up to this one: seed after seed of a sampler, then the next sampler."""
    corrections = [name for number, names in STAGES.items() if number <= stage for name in names]
    return [Cell(sampler, name, seed) for sampler in SAMPLERS for seed in SEEDS for name in corrections]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the cells that the arguments name, and write the page."""
    parser = make_parser(__doc__, CELLS)
    parser.add_argument("--stage", type=int, choices=STAGES, default=1, help="stages up to this one; defaults to 1")
    parser.add_argument("--quick", action="store_true", help="train one finished cell again, and compare")
    options = parser.parse_args(arguments)

    done = [options.folder, CELLS, CELLS_OF_STUDY]
    every = cells(max(STAGES) if options.names else options.stage)
    code = train_cells(every, done, options, Path(__file__).resolve())
    if code or options.list or options.no_page:
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
