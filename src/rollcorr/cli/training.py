"""`rollcorr train`: run a recipe from a configuration file."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcorr import engines
from rollcorr.cli.app import TRUST_OPTION, terminal
from rollcorr.config.checks import in_one_line
from rollcorr.config.secrets import redact_text


def train(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [dotted.name=value]…", help="A YAML file, and changes to its options."),
    ] = None,
    trust: Annotated[bool, TRUST_OPTION] = False,
) -> None:
    """Train a policy with rollout correction.

    An engine samples from a copy of the policy. Rollcorr corrects the difference between the copy and the policy.

    The option `recipe` selects the model type:
    recipe=grpo         a language model; this is the default
    recipe=flow_grpo    a diffusion model

    rollcorr train CONFIG.yaml steps=50 optim.lr=1e-4

    The same command starts a run, continues it after any interruption, or reports that it is finished.
    Options that a checkpoint fixes, such as the model, cannot change within a run; all other options can.
    Only one process can run in a directory at a time.

    Options such as reward.function, task.reward and task.problems run code, and so may an unusual argument of vLLM.
    Write them in the command.
    If a file has them, or names code in the run directory, add --trust if you trust it.

    These files list all options:
    rollcorr/train/run_config.py                    for every recipe
    rollcorr/train/grpo/grpo_config.py              for grpo
    rollcorr/train/flow_grpo/flow_grpo_config.py    for flow_grpo

    Exit codes:
    0      The last step is done.
    1      The disk failed, or the weights are not finite. The last sound checkpoint stays.
    2      Bad input: an option, a file or a checkpoint is invalid, or a different process runs in the directory.
    3      The engine failed. The run was saved.
    130    Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or stop_after_minutes stopped the run. It was saved.
           The same command continues it.
    """
    from rich.markup import escape

    from rollcorr.run_directory.run_lock import RunInUseError
    from rollcorr.train import recipes
    from rollcorr.train.config_file import check_trusted

    # Every option has a default, so a command without arguments would start an unintended run.
    if not arguments:
        typer.echo(context.get_help())
        typer.echo(
            "nothing was trained: give a file or an option. To try it on the CPU: rollcorr train steps=3", err=True
        )
        raise typer.Exit(2)

    files = [text for text in arguments if "=" not in text]
    overrides = [text for text in arguments if "=" in text]
    try:
        if len(files) > 1:
            raise ValueError(f"one configuration file at most, got {', '.join(files)}; write a change as name=value")
        config = recipes.load_config(files[0] if files else None, overrides)
        if not trust:
            check_trusted(config, overrides, ", ".join(files))
        summary = recipes.train(config)
    except KeyboardInterrupt as error:
        terminal(stderr=True).print("stopped at once: the same command continues after the last checkpoint")
        raise typer.Exit(130) from error
    except (engines.EngineError, RunInUseError, ValueError, TypeError, OSError, ImportError) as error:
        # An engine's message may be a full page; a file's message is untrusted text.
        failed = isinstance(error, engines.EngineError)
        reason = str(error) if failed else in_one_line(error)
        terminal(stderr=True).print(f"[bold red]rollcorr train:[/] {escape(redact_text(reason))}", soft_wrap=True)

        # An invalid path is an invalid option; every other OSError is a disk error.
        wrong_path = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
        code = 2
        if failed:
            code = 3
        elif isinstance(error, OSError) and not isinstance(error, wrong_path):
            code = 1
        raise typer.Exit(code) from error

    if summary.failure is not None:
        raise typer.Exit(3 if summary.engine_failed else 1)
    if summary.interrupted:
        raise typer.Exit(130)
