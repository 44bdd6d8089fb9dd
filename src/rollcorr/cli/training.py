"""`rollcorr train`: run a recipe from a configuration file."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcorr.cli.app import app


@app.command()
def train(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [dotted.name=value]…", help="A YAML file, and changes to its options."),
    ] = None,
) -> None:
    """Train a policy with rollout correction.

    An engine samples from a copy of the policy. Rollcorr corrects the difference between the copy and the policy.

    The option `recipe` says what is trained:
    recipe=grpo         a language model; this is the default
    recipe=flow_grpo    a diffusion model

    To start a run:     rollcorr train CONFIG.yaml steps=50 optim.lr=1e-4
    To continue a run:  rollcorr train RUN/config.yaml resume=true

    These files list all options:
    rollcorr/train/run_config.py                    for every recipe
    rollcorr/train/grpo/grpo_config.py              for grpo
    rollcorr/train/flow_grpo/flow_grpo_config.py    for flow_grpo

    Exit codes:
    0      The last step is done.
    2      An option, a file or a checkpoint is wrong.
    3      The engine failed. The run was saved.
    130    Ctrl-C stopped the run. The run was saved.
    """
    from rich.console import Console
    from rich.markup import escape

    from rollcorr.config.checks import in_one_line
    from rollcorr.engines.base import EngineError
    from rollcorr.train import recipes

    # Every option has a default, so this would start a run that nobody asked for.
    if not arguments:
        typer.echo(context.get_help())
        typer.echo(
            "nothing was trained: give a file or an option. To try it on the CPU: rollcorr train steps=3", err=True
        )
        raise typer.Exit(2)

    given = arguments
    files = [text for text in given if "=" not in text]
    try:
        if len(files) > 1:
            raise ValueError(f"one configuration file at most, got {', '.join(files)}; write a change as name=value")
        config = recipes.load_config(files[0] if files else None, [text for text in given if "=" in text])
        summary = recipes.train(config)
    except (EngineError, ValueError, TypeError, OSError, ImportError) as error:
        # What an engine says may be a whole page of its own; what a file says may be anything.
        reason = str(error) if isinstance(error, EngineError) else in_one_line(error)
        message = f"[bold red]rollcorr train:[/] {escape(reason)}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        raise typer.Exit(3 if isinstance(error, EngineError) else 2) from error
    if summary.failure is not None:
        raise typer.Exit(3)
    if summary.interrupted:
        raise typer.Exit(130)
