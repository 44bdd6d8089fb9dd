"""The Typer application that every command joins, and what the commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

import rollcorr
from rollcorr.config.secrets import redact_text

app = typer.Typer(name="rollcorr", no_args_is_help=True, pretty_exceptions_show_locals=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(rollcorr.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version, and stop.")
    ] = False,
) -> None:
    """Rollout correction for reinforcement learning.

    Measure, correct and explain the gap between the policy that sampled and the policy that trains.
    """


@contextmanager
def exit_on(*bad_input: type[Exception]) -> Iterator[None]:
    """Print on stderr what is wrong with the input, a file or a missing extra, and exit with code 2."""
    expected: tuple[type[Exception], ...] = (*bad_input, OSError, ImportError)
    try:
        yield
    except expected as error:
        typer.echo(f"error: {redact_text(str(error))}", err=True)
        raise typer.Exit(2) from error
