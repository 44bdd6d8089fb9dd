"""The Typer application that every command joins, and what the commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer.models import CommandInfo

import rollcorr
from rollcorr.config.input_file import BadInputError
from rollcorr.config.secrets import redact_text

app = typer.Typer(name="rollcorr", no_args_is_help=True, pretty_exceptions_show_locals=False)

PANELS: dict[str, tuple[str, ...]] = {
    "Start here": ("demo", "explain", "presets", "info"),
    "Diagnose a rollout log": ("check", "check-schedule", "null", "calibrate", "advise", "import"),
    "Follow a run": ("watch", "report", "compare"),
    "Train, simulate, convert": ("train", "simulate", "convert-config"),
}
"""What `rollcorr --help` shows: the commands in groups, in the order in which a newcomer needs them."""


def arrange_commands() -> None:
    """Put the commands into their groups. Called once, when all of them have joined."""
    groups = {name: panel for panel, names in PANELS.items() for name in names}
    order = list(groups)
    for command in app.registered_commands:
        command.rich_help_panel = groups[_name_of(command)]
    app.registered_commands.sort(key=lambda command: order.index(_name_of(command)))


def _name_of(command: CommandInfo) -> str:
    function = command.callback
    assert function is not None
    return command.name or function.__name__.replace("_", "-")


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
