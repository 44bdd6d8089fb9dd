"""The command line: one command per job, heavy imports only inside the command that needs them."""

from __future__ import annotations

from typing import Annotated

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


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [dotted.name=value]…", help="A configuration and changes to it."),
    ] = None,
) -> None:
    """Train a language model with GRPO on rollouts from a lower-precision copy of itself, corrected as configured.

    Exit codes: 0 trained, 1 a bad option, file or checkpoint, 130 stopped by Ctrl-C (and saved).
    """
    from rich.console import Console
    from rich.markup import escape

    from rollcorr.train.config_file import load_config
    from rollcorr.train.run import train as run_training

    given = arguments or []
    files = [text for text in given if "=" not in text]
    try:
        if len(files) > 1:
            raise ValueError(f"one configuration file at most, got {', '.join(files)}; changes are written name=value")
        config = load_config(files[0] if files else None, [text for text in given if "=" in text])
        summary = run_training(config)
    except (ValueError, TypeError, OSError, ImportError) as error:
        message = f"[bold red]rollcorr train:[/] {escape(str(error))}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if summary.interrupted:
        raise typer.Exit(130)


def main() -> None:
    """Entry point of the `rollcorr` command."""
    app()
