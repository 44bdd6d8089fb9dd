"""The Typer application that every command joins, and what the commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rollcorr
from rollcorr.config.documents import BadInputError
from rollcorr.config.secrets import redact_text

if TYPE_CHECKING:
    from rich.console import Console

    from rollcorr.rollout_log import FileLimits

app = typer.Typer(name="rollcorr", no_args_is_help=True, pretty_exceptions_show_locals=False)

LIMIT_OPTION = typer.Option(
    metavar="NAME=NUMBER", help="Raise a limit on what a file may hold, for a file that you trust."
)
COLUMNS_OPTION = typer.Option(
    metavar="OURS=THEIRS,…",
    help="What the files call our columns, for example rollout_log_prob=logprobs. Our name stands on the left.",
)


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


def terminal(*, stderr: bool = False) -> Console:
    """Return a console of rich, which is loaded by the commands that print with it."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


@contextmanager
def exit_on(*bad_input: type[Exception], unwritten: Path | None = None) -> Iterator[None]:
    """Print on stderr what is wrong with the input, a file or a missing extra, and exit with code 2.

    Args:
        bad_input: further errors that the input may cause.
        unwritten: what an interrupt leaves unwritten: Ctrl-C then prints this and exits with code 130.
    """
    expected: tuple[type[Exception], ...] = (BadInputError, OSError, ImportError, *bad_input)
    try:
        yield
    except expected as error:
        typer.echo(f"error: {redact_text(str(error))}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        if unwritten is None:
            raise
        typer.echo(f"interrupted: {unwritten} was not written", err=True)
        raise typer.Exit(130) from None


def check_unused(path: Path | None, *, overwrite: bool) -> None:
    """Check that a file to write does not exist, or may be replaced.

    Raises:
        BadInputError: it exists.
    """
    if path is not None and path.exists() and not overwrite:
        raise BadInputError(f"{path} exists; choose another name, or give --overwrite")


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
    from rollcorr.rollout_log.frameworks import parse_column_names

    try:
        return FileLimits.from_texts(limits or []), parse_column_names(columns or [])
    except ValueError as error:
        raise BadInputError(str(error)) from error
