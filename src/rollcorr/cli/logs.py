"""`rollcorr import`: other frameworks' dumps as a rollout log. And what the commands that read logs share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcorr.cli.app import exit_on
from rollcorr.config.input_file import BadInputError

if TYPE_CHECKING:
    from rollcorr.rollout_log import FileLimits

LIMIT_OPTION = typer.Option(
    metavar="NAME=NUMBER", help="Raise a limit on what a file may hold, for a file that you trust."
)
COLUMNS_OPTION = typer.Option(
    metavar="OURS=THEIRS,…",
    help="What the files call our columns, for example rollout_log_prob=logprobs. Our name stands on the left.",
)


def share_memory() -> None:
    """Let Arrow use the system's allocator, as NumPy does: what one has freed the other takes, 40 MB of a large log.

    Called before Arrow is loaded, which then takes it from the environment; processes that read inherit that. An
    allocator that the user has chosen stays.
    """
    if "pyarrow" not in sys.modules:
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def file_options(limits: list[str] | None, columns: list[str] | None) -> tuple[FileLimits, dict[str, str]]:
    """The limits and the names of columns that a command was given.

    Raises:
        BadInputError: a text is not of its form.
    """
    from rollcorr.rollout_log import FileLimits
    from rollcorr.rollout_log.column_names import parse_column_names

    try:
        return FileLimits.from_texts(limits or []), parse_column_names(columns or [])
    except ValueError as error:
        raise BadInputError(str(error)) from error


def import_log(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE…", help="Files, folders or glob patterns of another framework.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="TARGET", help="The log: .parquet, .jsonl or .jsonl.gz.")
    ],
    columns: Annotated[list[str] | None, COLUMNS_OPTION] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")] = False,
    limit: Annotated[list[str] | None, LIMIT_OPTION] = None,
) -> None:
    """Write the dumps of another framework as a rollout log, with its version and units.

    Dumps of prime-rl, slime and SkyRL are recognized. Those of verl and TRL are too, but hold no log-probs.
    Other JSONL and Parquet files need --columns, where their names are not ours.

    Nothing is left when a source cannot be read to its end.
    Exit codes: 0 written, 2 bad input, 130 interrupted.
    """
    from rollcorr.diagnostics.report.console import row_progress
    from rollcorr.rollout_log import convert_log

    with exit_on(unwritten=output):
        file_limits, column_names = file_options(limit, columns)
        with row_progress() as on_rows:
            rows = convert_log(
                sources,
                output,
                overwrite=overwrite,
                file_limits=file_limits,
                column_names=column_names,
                required=("rollout_log_prob",),
                on_rows=on_rows,
            )
    typer.echo(f"{output}: {rows:,} sequences")
