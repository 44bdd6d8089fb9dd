"""The Typer application of all commands, and functions that the commands share."""

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
CONFIG_OPTION = typer.Option(
    metavar="FILE or dotted.name=value", help="A YAML file of any generation, and changes to it; repeat the option."
)
TRUST_OPTION = typer.Option("--trust", help="Run code that the file names, or that lies in the run directory.")
TEXT_OPTION = typer.Option("--text/--no-text", help="Show prompts and tokens. Without, the page has numbers only.")
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
    """Return a console of rich; the import is lazy, for commands that do not print with it."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


@contextmanager
def exit_on(*bad_input: type[Exception], unwritten: Path | None = None) -> Iterator[None]:
    """Print an error of the input, a file or a missing extra on stderr, and exit with code 2.

    Args:
        bad_input: further exceptions that the input may cause.
        unwritten: optional; the file that an interrupt leaves unwritten. Ctrl-C then prints it and exits with code 130.
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
    """Check that an output file does not exist, or may be replaced.

    Raises:
        BadInputError: it exists.
    """
    if path is not None and path.exists() and not overwrite:
        raise BadInputError(f"{path} exists; choose another name, or give --overwrite")


def share_memory() -> None:
    """Set Arrow's default allocator to the system's, as NumPy's: both reuse freed memory, 40 MB of a large log.

    Call it before Arrow is loaded, which reads the environment variable; reader processes inherit it. An allocator that
    the user has chosen stays.
    """
    if "pyarrow" not in sys.modules:
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def file_options(limits: list[str] | None, columns: list[str] | None) -> tuple[FileLimits, dict[str, str]]:
    """Return the file limits and column names of a command's options.

    Raises:
        BadInputError: an option is malformed.
    """
    from rollcorr.rollout_log import FileLimits
    from rollcorr.rollout_log.frameworks import parse_column_names

    try:
        return FileLimits.from_texts(limits or []), parse_column_names(columns or [])
    except ValueError as error:
        raise BadInputError(str(error)) from error
