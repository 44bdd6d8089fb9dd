"""The Typer application that every command joins, and what the commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from rollcorr.config.secrets import redact_text

app = typer.Typer(
    name="rollcorr",
    help="Rollout correction for reinforcement learning: measure, correct and explain the gap between the policy that "
    "sampled and the policy that trains.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@contextmanager
def exit_on(*bad_input: type[Exception]) -> Iterator[None]:
    """Print on stderr what is wrong with the input, a file or a missing extra, and exit with code 2."""
    expected: tuple[type[Exception], ...] = (*bad_input, OSError, ImportError)
    try:
        yield
    except expected as error:
        typer.echo(f"error: {redact_text(str(error))}", err=True)
        raise typer.Exit(2) from error
