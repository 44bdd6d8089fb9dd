"""`rollcorr simulate`: compute each estimator's error against the exact answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcorr.cli.app import exit_on, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from rollcorr.simulation.studies import Cell, ResultRow
    from rollcorr.simulation.study_run import StudyResult


def simulate(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.yaml]", help="Your own study. Without it, the built-in one runs.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where results are kept. [default: runs/simulate/NAME]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A subset of the built-in study, in half a minute.")] = False,
) -> None:
    """Measure the error of each correction against the exact gradient.

    Computes the on-policy gradient as a sum over every sequence: the policies are tables over a few tokens.
    Each estimator runs through the same `correct` and `policy_loss` that a trainer calls.
    Prints its bias, its variance, and a filter's gain over rejecting the same share of sequences at random.

    A file of ten lines describes your own pair of policies or your own configuration:

        pair: {kind: tempered, severity: 0.3, vocabulary: 8}
        length: [16, 64]
        estimators:
          - none
          - decoupled_token_is
          - {name: mine, rollout_is: sequence, rollout_is_threshold: 4.0}
        batch_sizes: [64, 1024]

    Kinds and severity: noise (σ of the logits), heavy_tailed (the same with Student t), tempered (1 − temperature),
    truncated (1 − top_p), top_k (excluded tokens), stale (size of the missing update), quantized (grid of the logits).
    Write kl: 0.01 instead of severity to set the KL per token.

    Ctrl-C keeps what is finished. The same command continues from there.

    Exit codes: 0 done, 2 bad input, 130 interrupted (finished results are written).
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rollcorr.simulation.simulation_file import read_simulation_file, run_file_cell
    from rollcorr.simulation.studies import laboratory_cells, run_cell
    from rollcorr.simulation.study_run import run_cells

    folder = output or Path("runs") / "simulate" / ("laboratory" if file is None else file.stem)
    bar = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells,"))
    stderr = terminal(stderr=True)
    with exit_on(TypeError, ValueError):
        if file is None:
            cells, run = laboratory_cells(quick=quick), run_cell
        elif quick:
            raise ValueError("--quick is a subset of the built-in study; for less work, lower samples in the file")
        else:
            if not file.exists():
                raise ValueError(f"there is no file {file}; `rollcorr simulate --help` shows an example of ten lines")
            cells, run = read_simulation_file(file), run_file_cell
        # `run.json` records the command, so that the results are reproducible.
        command = " ".join(["rollcorr simulate", *sys.argv[2:]])
        with Progress(
            *bar, TimeRemainingColumn(), console=stderr, transient=True, disable=not stderr.is_terminal
        ) as progress:
            task = progress.add_task("starting", total=None)

            def on_cell(cell: Cell, number: int, total: int) -> None:
                progress.update(task, description=cell.study, completed=number, total=total)

            result = run_cells(cells, folder, command=command, run=run, on_cell=on_cell)
        if file is None and not result.interrupted:
            from rollcorr.simulation.simulation_figures import write_figures

            write_figures(result.rows, folder)

    _print_ranking(terminal(), result, folder)
    if result.interrupted:
        raise typer.Exit(130)


_COLUMN_OF_HEADING = {
    "direction\nerror": "direction",
    "at\nrandom": "random_direction",
    "\nbias": "bias",
    "\ndeviation": "deviation",
    "\nESS": "ess",
    "\nkept": "kept",
}
"""Header → the column of the CSV file. Two lines each, so that names of presets fit beside them in 80 characters."""

SHORTEST_NAME = 12
"""Characters of a name that stay, however narrow the terminal is."""


def _format_cell(row: ResultRow, column: str) -> str:
    if row[column] == "":
        return ""
    number = f"{float(row[column]):.3f}"
    if column == "bias" and _is_uncertain(row):
        return number + "*"

    # The ranking uses this column: without standard errors, a tie would look like a ranking.
    ranked = column == "direction" and not row["exact"]
    return f"{number}±{float(row['direction_error']):.3f}".replace("±0.", "±.") if ranked else number


def _is_uncertain(row: ResultRow) -> bool:
    """Return whether almost all sampled sequences are rejected: the bias, corrected for their noise, is then 0."""
    return not row["exact"] and float(row["kept"]) < 0.01


def _shorten(name: str, room: int) -> str:
    """Return a long name without its middle: options of one estimator often differ at the end."""
    if len(name) <= room:
        return name
    end = (room - 1) // 2
    return name[: room - 1 - end] + "…" + name[-end:]


def _print_ranking(console: Console, result: StudyResult, folder: Path) -> None:
    """Print the estimators of a file from best to worst, and the results' folder."""
    from rich.table import Table

    for length in sorted({row["T"] for row in result.rows.get("estimators", [])}):
        rows = [row for row in result.rows["estimators"] if row["T"] == length]
        rows = [row for row in rows if row["batch_size"] == max(row["batch_size"] for row in rows)]
        method = "exact" if rows[0]["exact"] else "sampled"
        title = f"T = {length}, T × KL = {rows[0]['t_times_kl']:.3g}, batches of {rows[0]['batch_size']}, {method}"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))

        # Numbers keep their width. Names are shortened to the remaining width: the CSV file contains them in full.
        rows.sort(key=lambda row: row["direction"])
        columns = {header: [_format_cell(row, column) for row in rows] for header, column in _COLUMN_OF_HEADING.items()}
        widths = [max(map(len, [*header.split("\n"), *cells])) for header, cells in columns.items()]
        numbers = sum(widths) + 2 * (len(widths) + 1)
        console.width = max(console.width, SHORTEST_NAME + numbers)
        room = console.width - numbers
        table.add_column("\nestimator", no_wrap=True)
        for header, width in zip(columns, widths, strict=True):
            table.add_column(header, justify="right", width=width, no_wrap=True)
        for row, *cells in zip(rows, *columns.values(), strict=True):
            table.add_row(_shorten(str(row["estimator"]), room), *cells)
        console.print(table)
        if any(_is_uncertain(row) for row in rows):
            console.print("* less than 1 % of the tokens are kept: too few to measure the bias", soft_wrap=True)

    state = "interrupted; the same command goes on from here" if result.interrupted else "done"
    console.print(
        f"{state}: {result.done} of {result.total} cells ({result.reused} from an earlier run), "
        f"{result.cpu_seconds:.1f} CPU seconds\nresults: {folder}",
        soft_wrap=True,
    )
