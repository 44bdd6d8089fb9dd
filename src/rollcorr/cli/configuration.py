"""`rollcorr import` and `rollcorr convert-config`: convert logs and options of other frameworks to our formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rollcorr.cli.app import COLUMNS_OPTION, LIMIT_OPTION, exit_on, file_options, terminal
from rollcorr.config.checks import in_one_line
from rollcorr.config.conversion import Conversion, Schema, convert, converted_document
from rollcorr.config.documents import dump_yaml
from rollcorr.config.generations import shown
from rollcorr.config.layers import read_document
from rollcorr.config.secrets import redact_text

if TYPE_CHECKING:
    from rich.console import Console


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
    """Convert another framework's dumps to the rollout log format.

    Dumps of NeMo-RL, prime-rl, slime and SkyRL are recognized. Dumps of verl and TRL contain no log-probs.
    Other JSONL and Parquet files need --columns if their column names differ from ours.

    No output remains if a source cannot be read to its end.
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


def convert_config(
    old: Annotated[
        list[str],
        typer.Argument(
            metavar="[OLD.yaml] [dotted.name=value]…",
            help="A verl configuration or its options, and changes.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="NEW.yaml", help="Write here instead of to standard output."),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(metavar="SCHEMA", help="2025-10, 2025-11 or newest. Detected automatically by default."),
    ] = None,
) -> None:
    """Convert rollout-correction options of any generation to the newest form, and report each change.

    Writes the new YAML to standard output or NEW.yaml.
    Prints a table of each option's new form on standard error.
    A file with other sections keeps them, but loses its comments.
    Overrides of an older form replace a preset in the file; in the newest form they change it.
    Returns exit code 2 if the input cannot be read, and prints the reason.

    Example: old.yaml contains

        algorithm:
          rollout_is_threshold: 2.0
          rollout_is: true
          rollout_is_level: token

    and `rollcorr convert-config old.yaml -o new.yaml` writes algorithm.rollout_correction with rollout_is: token.
    """
    import warnings

    console = terminal(stderr=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            raw = read_document(old)
            conversion = convert(raw, schema=cast("Schema | None", schema))
        text = dump_yaml(converted_document(raw, conversion))
        if output is not None:
            output.write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        console.print(redact_text(f"{' '.join(old)}: {in_one_line(error)}"), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if output is None:
        typer.echo(text, nl=False)
    _print_conversion(console, conversion, [str(warning.message) for warning in caught])


def _print_conversion(console: Console, conversion: Conversion, warned: list[str]) -> None:
    """Print the new form of each old field as a table, and the notes below it."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"schema {conversion.schema} → newest", title_justify="left")
    for column in ("old", "value", "became", "why"):
        table.add_column(column, overflow="fold")
    for row in conversion.report:
        table.add_row(*(escape(text) for text in (row.field, shown(row.value), row.became, row.reason)))
    console.print(table)
    for label, lines in (("note", conversion.notes), ("warning", warned)):
        for line in lines:
            console.print(f"{label}: {line}", markup=False, soft_wrap=True)
