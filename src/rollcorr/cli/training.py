"""`rollcorr train`: run a recipe from a configuration file."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcorr.cli.app import app


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [dotted.name=value]…", help="A configuration and changes to it."),
    ] = None,
) -> None:
    """Train on rollouts from a lower-precision copy of the policy, corrected as configured.

    The configuration's `recipe` says what: grpo (a language model, the default; all options are in
    rollcorr/train/grpo/grpo_config.py) or flow_grpo (a diffusion model; rollcorr/train/flow_grpo/flow_grpo_config.py).

    Exit codes: 0 trained, 2 a bad option, file or checkpoint, 3 the engine failed (what was trained is saved), 130
    stopped by Ctrl-C (and saved).
    """
    from rich.console import Console
    from rich.markup import escape

    from rollcorr.engines.base import EngineError
    from rollcorr.train.recipes import load_recipe, run_recipe

    given = arguments or []
    files = [text for text in given if "=" not in text]
    try:
        if len(files) > 1:
            raise ValueError(f"one configuration file at most, got {', '.join(files)}; changes are written name=value")
        config = load_recipe(files[0] if files else None, [text for text in given if "=" in text])
        summary = run_recipe(config)
    except (EngineError, ValueError, TypeError, OSError, ImportError) as error:
        message = f"[bold red]rollcorr train:[/] {escape(str(error))}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        raise typer.Exit(3 if isinstance(error, EngineError) else 2) from error
    if getattr(summary, "failure", None) is not None:  # of an engine in another process
        raise typer.Exit(3)
    if summary.interrupted:
        raise typer.Exit(130)
