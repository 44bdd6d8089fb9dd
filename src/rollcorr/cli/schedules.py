"""`rollcorr check-schedule`: do a sampler and a trainer denoise along one schedule?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollcorr.cli.app import app, exit_on


@app.command()
def check_schedule(
    rollout: Annotated[
        Path,
        typer.Argument(
            help="The sampler's schedule: a JSON file with a list of numbers, or a rollout log of denoising steps."
        ),
    ],
    trainer: Annotated[Path, typer.Argument(help="The trainer's schedule, in the same form.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference allowed, relative to the largest entry.")
    ] = 1e-5,
) -> None:
    """Compare the denoising schedules of a sampler and a trainer, of sigmas or of timestep values.

    A schedule that is off by one entry gives every step another σ. Log-probs are then of another distribution: 5e-3 per
    latent dimension is 328 nats at D = 65,536.

    Write a schedule from diffusers with: json.dump(scheduler.sigmas.tolist(), file)

    A rollout log gives the sigmas that its steps were sampled at; steps outside the window are not in it. So compare a
    log with a log, or a file with a file.

    Exit codes: 0 they agree, 1 they differ, 2 bad input.
    """
    from rollcorr.diagnostics.schedules import compare_schedules, read_schedule
    from rollcorr.rollout_log import RolloutLogError
    from rollcorr.run_directory.metrics_file import BadInputError

    with exit_on(BadInputError, RolloutLogError):
        finding = compare_schedules(read_schedule(rollout), read_schedule(trainer), tolerance=tolerance)
    if finding is None:
        typer.echo("the schedules agree")
        return
    typer.echo(f"{finding.title}: {finding.reason}\nfix: {finding.fix}")
    raise typer.Exit(1)
