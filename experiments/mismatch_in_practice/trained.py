"""The trained study: which correction saves a training, and from what.

    python experiments/mismatch_in_practice/trained.py                    every cell that is not done; then the page
    python experiments/mismatch_in_practice/trained.py stale_quantized-none-0 clean-seq_tis-1     these cells alone
    python experiments/mismatch_in_practice/trained.py --list             what is done, and what the rest costs
    python experiments/mismatch_in_practice/trained.py --page             the page and its figures, from the cells

A cell is one training: a column (what is wrong with the sampler), a correction and a seed. It starts from the warm-up
policy of its seed, runs in runs/trained/CELL, and leaves trained/cells/CELL.json. The same command goes on with a cell
that was stopped. Every cell samples and trains on the same number of responses. The grid is that of Fang & Khazi
(2025), "Mismatch Praxis", section 5, https://www.llmdata.com/blog/mismatch-praxis/.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cell_runner import make_parser, pick_cells, train_cells
from trained_cell import HELD_OUT_PROBLEMS, Cell, read_cells

HERE = Path(__file__).resolve().parent
CELLS = HERE / "trained" / "cells"
CELLS_OF_BENCH = HERE.parent / "bench" / "cells"
"""The training bench has most cells of the study; only the others are in `CELLS`."""

STUDY = ("clean", "stale_quantized", "truncated")
"""The columns of the study; the bench (experiments/bench) trains on all."""

GRID = ("none", "token_tis", "seq_tis")
MORE: dict[str, tuple[str, ...]] = {"stale_quantized": ("geo_rs_token_tis", "seq_mis"), "truncated": ("replay",)}
"""What is tried in a column besides the grid."""

BREAKS = ("stale_quantized",)
"""Columns where training breaks: they have three seeds, the others two."""


def cells() -> list[Cell]:
    """Every cell: all columns and corrections of one seed, then those of the next."""
    found = []
    for seed in range(3):
        for column in STUDY:
            if seed < (3 if column in BREAKS else 2):
                found += [Cell(column, correction, seed) for correction in (*GRID, *MORE.get(column, ()))]
    return found


def facts() -> dict[str, str]:
    """What the page says of the settings."""
    stale = Cell("stale_quantized", "none", 0).config().rollout
    return {
        "problems": str(HELD_OUT_PROBLEMS),
        "stale": f"CTranslate2 in {stale.engine_options['compute_type']} from weights rounded to "
        f"{stale.engine_options['weight_bits']} bits, with new weights at every {stale.refresh_every}th step",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that the arguments name, and write the page."""
    options = make_parser(__doc__, CELLS).parse_args(arguments)
    chosen = pick_cells(cells(), options.names)
    code = train_cells(chosen, [CELLS_OF_BENCH, options.folder], options, Path(__file__).resolve())
    if code or options.list or options.no_page:
        return code

    from claims_page import write_claims_page
    from trained_page import write_page

    write_page(read_cells(cells(), CELLS_OF_BENCH, options.folder), [cell.name for cell in cells()], facts())
    write_claims_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
