"""`rollcorr convert-config`: rewrite old options in the newest form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rollcorr.cli.app import terminal
from rollcorr.config.checks import in_one_line
from rollcorr.config.conversion import Conversion, Schema, convert, converted_document
from rollcorr.config.generations import shown
from rollcorr.config.secrets import redact_text
from rollcorr.config.yaml_text import dump_yaml, read_yaml

if TYPE_CHECKING:
    from rich.console import Console


def convert_config(
    old: Annotated[Path, typer.Argument(metavar="OLD.yaml", help="A verl configuration, or only the options.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="NEW.yaml", help="Write here instead of to standard output."),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(metavar="SCHEMA", help="2025-10, 2025-11 or newest. Detected automatically by default."),
    ] = None,
) -> None:
    """Rewrite rollout-correction options of any generation in the newest form, and say what each one became.

    The new YAML goes to standard output or NEW.yaml.
    A table of what each option became goes to standard error.
    A whole file keeps its other sections, but loses its comments.
    Exit code 2 means that the input cannot be read; the reason is printed.

    Example: old.yaml holds

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
            raw = read_yaml(old)
            conversion = convert(raw, schema=cast("Schema | None", schema))
        text = dump_yaml(converted_document(raw, conversion))
        if output is not None:
            output.write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        console.print(redact_text(f"{old}: {in_one_line(error)}"), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if output is None:
        typer.echo(text, nl=False)
    _print_conversion(console, conversion, [str(warning.message) for warning in caught])


def _print_conversion(console: Console, conversion: Conversion, warned: list[str]) -> None:
    """What each old field became, as a table, and the notes below it."""
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
