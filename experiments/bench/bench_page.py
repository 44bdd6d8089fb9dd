"""The page and the tables of the training bench, from its finished cells: `bench.py --page` writes them."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from advice_evidence import FIRST_STEPS
from first_rollouts import read_rows
from intervals import LEVEL, Interval, holm, interval
from regret import choice_rows, regimes, regret_rows, regret_text
from trained_cell import HELD_OUT_PROBLEMS, Cell
from trained_page import (
    COLUMN_TITLES,
    CORRECTION_TITLES,
    accuracy,
    gap,
    gap_text,
    is_lost,
    mean,
    select,
    start_notes,
    table,
)

HERE = Path(__file__).resolve().parent
FRAME = HERE / "results_frame.md"

Row = dict[str, Any]


def mean_accuracy(found: Sequence[Row]) -> Interval:
    """Return the accuracy over seeds, averaged over the checkpoints after the start."""
    return interval([mean([point["accuracy"] for point in cell["held_out"][1:]]) for cell in found])


def result_rows(cells: Sequence[Cell], found: Sequence[Row]) -> list[Row]:
    """Return a row for each sampler and correction with a finished cell."""
    rows = []
    for column, correction in dict.fromkeys((cell.column, cell.correction) for cell in cells):
        seeds = select(found, column, correction)
        before, final = accuracy(seeds, at=0), accuracy(seeds)
        if before is None or final is None:
            continue
        rows.append(
            {
                "sampler": COLUMN_TITLES[column],
                "correction": CORRECTION_TITLES[correction],
                "seeds": len(seeds),
                "start": before,
                "final": final,
                "mean": mean_accuracy(seeds),
                "lost": sum(map(is_lost, seeds)),
            }
        )
    return rows


def contrast_rows(cells: Sequence[Cell], found: Sequence[Row]) -> list[Row]:
    """Return each pair of corrections once, on the samplers whose cells are all finished, with Holm's p values."""
    finished = {cell["cell"] for cell in found}
    rows = []
    for column in dict.fromkeys(cell.column for cell in cells):
        of_column = [cell for cell in cells if cell.column == column]
        if any(cell.name not in finished for cell in of_column):
            continue
        corrections = dict.fromkeys(cell.correction for cell in of_column)
        gaps = {
            (a, b): gap(select(found, column, a), select(found, column, b))
            for b, a in itertools.combinations(corrections, 2)
        }
        tested = {pair: difference for pair, difference in gaps.items() if difference is not None}
        corrected = holm({pair: difference.p for pair, difference in tested.items()})
        rows += [
            {
                "sampler": COLUMN_TITLES[column],
                "first": CORRECTION_TITLES[a],
                "second": CORRECTION_TITLES[b],
                "difference": difference,
                "p": corrected[a, b],
            }
            for (a, b), difference in tested.items()
        ]
    return rows


def page_text(cells: Sequence[Cell], found: Sequence[Row]) -> str:
    """Return the page; it claims no more than the finished cells show."""
    missing = {
        COLUMN_TITLES[column]: sum(cell.column == column for cell in cells)
        - sum(cell["column"] == column for cell in found)
        for column in dict.fromkeys(cell.column for cell in cells)
    }
    missing = {title: count for title, count in missing.items() if count}
    unfinished = "; ".join(f"{title} lacks {count} cells" for title, count in missing.items())
    contrasts, followed = contrast_rows(cells, found), regimes(found, read_rows())
    parts = {
        "done": str(len(found)),
        "all": str(len(cells)),
        "unfinished": "\n".join(filter(None, (f"{unfinished}." if unfinished else "", start_notes(list(found))))),
        "problems": str(HELD_OUT_PROBLEMS),
        "results": _results(result_rows(cells, found)),
        "contrasts": _contrasts(contrasts) if contrasts else "No sampler has all its cells yet.",
        "steps": str(FIRST_STEPS),
        "regret": regret_text(regret_rows(followed), choice_rows(followed)),
    }
    return re.sub(r"<<(\w+)>>", lambda place: parts[place[1]], FRAME.read_text(encoding="utf-8"))


def write_page(cells: Sequence[Cell], found: Sequence[Row], folder: Path = HERE) -> None:
    """Write results.md and its tables."""
    followed = regimes(found, read_rows())
    (folder / "results.md").write_text(page_text(cells, found), encoding="utf-8")
    write_table(folder / "results.csv", result_rows(cells, found))
    write_table(folder / "contrasts.csv", contrast_rows(cells, found))
    write_table(folder / "regret.csv", regret_rows(followed))
    write_table(folder / "choices.csv", choice_rows(followed))


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV; an interval becomes a column for its mean and one for its half width."""
    flat = [{name: text for key, value in row.items() for name, text in _columns(key, value)} for row in rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]) if flat else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


def _columns(key: str, value: Any) -> list[tuple[str, Any]]:  # noqa: ANN401
    if isinstance(value, Interval):
        return [(key, f"{value.mean:.5f}"), (f"{key}_half", f"{value.half:.5f}")]
    return [(key, f"{value:.3g}" if isinstance(value, float) else value)]


def _results(rows: Sequence[Row]) -> str:
    if not rows:
        return "No cell is finished yet."
    return table(("sampler", "correction", "seeds", "start", "final", "mean", "lost"), [row.values() for row in rows])


def _contrasts(rows: Sequence[Row]) -> str:
    shown = [
        (
            row["sampler"],
            row["first"],
            row["second"],
            row["difference"].n,
            gap_text(row["difference"]).partition(" (")[0],
            f"{row['p']:.2g}",
            "yes" if row["p"] < LEVEL else "no",
        )
        for row in rows
    ]
    return table(("sampler", "first", "second", "pairs", "difference", "p, corrected", "significant"), shown)
