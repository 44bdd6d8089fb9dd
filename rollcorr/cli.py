"""The command line: one command per job, heavy imports only inside the command that needs them."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="rollcorr",
    help="Rollout correction for reinforcement learning: measure, correct and explain the gap between the policy that "
    "sampled and the policy that trains.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _root() -> None:
    """Keep a command group even while there is a single command."""


def main() -> None:
    """Entry point of the `rollcorr` command."""
    app()
