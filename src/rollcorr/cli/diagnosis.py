"""`rollcorr report`, `rollcorr check` and `rollcorr check-schedule`: judge a run, rollout logs, or two schedules."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import rollcorr.diagnostics.report as reports
from rollcorr import diagnostics, run_directory
from rollcorr.cli.app import (
    COLUMNS_OPTION,
    CONFIG_OPTION,
    LIMIT_OPTION,
    TEXT_OPTION,
    exit_on,
    file_options,
    share_memory,
    terminal,
)
from rollcorr.cli.null_and_advice import parse_steps
from rollcorr.config.documents import BadInputError


def report(
    run: Annotated[Path, typer.Argument(help="The run directory. It holds metrics.jsonl and config.yaml.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write report.html into this folder. [default: RUN/report]"),
    ] = None,
    diffusion: Annotated[bool, typer.Option("--diffusion", help="The run trained a diffusion sampler.")] = False,
    text: Annotated[bool, TEXT_OPTION] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Judge a training run and write its report. Exit codes: 0 healthy, 1 unhealthy, 2 bad input, 3 not judged.

    The page is that of `rollcorr view`. It needs the extra `report`. Without it, the command prints only the verdict,
    and --output is an error.
    """
    with exit_on():
        stored = run_directory.read_run(run)
        data = diagnostics.run_report(stored, diffusion=diffusion)

        # A run may be untrusted: a link in it must not redirect this command's output.
        if output is None and (run / "report").is_symlink():
            raise BadInputError(f"{run / 'report'} is a symbolic link; name a folder for the report with --output")
        page = None
        try:
            page = reports.write_report(data, output or run / "report", reports.logged_tokens([stored], text=text))
        except ImportError as error:
            # The verdict needs no figures. A named folder requests them.
            if output is not None:
                raise
            typer.echo(f"no page: {error}", err=True)

    if as_json:
        typer.echo(reports.to_json(data.health, report=None if page is None else str(page), remarks=data.remarks))
    else:
        console = terminal()
        reports.show_health(console, data.health, subject=f"{data.title}: {data.subtitle}", remarks=data.remarks)
        if page is not None:
            console.print(f"\nreport: {page}", soft_wrap=True)
    raise typer.Exit(data.health.exit_code)


def check(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Rollout logs, or dumps of other frameworks: files, folders or glob patterns."),
    ],
    preset: Annotated[str | None, typer.Option(help="Measure what this preset would do.")] = None,
    config: Annotated[list[str] | None, CONFIG_OPTION] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write report.html into this folder.")
    ] = None,
    train_column: Annotated[
        str | None,
        typer.Option(help="Trainer's log-probs: old_log_prob or log_prob. [default: the one that is recorded]"),
    ] = None,
    diffusion: Annotated[
        bool, typer.Option("--diffusion", help="The log-probs are densities of a diffusion sampler.")
    ] = False,
    null: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What two correct policies differ by here (`rollcorr null`). [default: RUN/null.json]"
        ),
    ] = None,
    null_steps: Annotated[
        str | None,
        typer.Option(metavar="FIRST:LAST", help="Steps of this log that are known to be right serve as its null."),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also show what every preset would do to this log, side by side.")
    ] = False,
    workers: Annotated[int, typer.Option(help="How many processes read the log. The numbers do not depend on it.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Read on this Ray cluster instead: auto, local or ray://host:port."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Judge what can be read where a file is bad; never healthy then.")
    ] = False,
    limit: Annotated[list[str] | None, LIMIT_OPTION] = None,
    columns: Annotated[list[str] | None, COLUMNS_OPTION] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Judge rollout logs without a training run.

    A folder that a run of verl (ROLLCORR_VERL_ROLLOUTS) or TRL (`keep_rollouts=`) keeps is a log, too: it contains
    prompts and responses.

    Exit codes: 0 healthy, 1 unhealthy, 2 bad input, 3 not judged, 130 interrupted.
    """
    share_memory()

    # Import lazily, so that `--help` and the other commands do not load torch and Arrow.
    from rollcorr.diagnostics.log_check import choose_config
    from rollcorr.diagnostics.report.console import row_progress, show_what_if

    with exit_on():
        file_limits, column_names = file_options(limit, columns)
        with row_progress() as on_rows:
            result = diagnostics.check_logs(
                logs,
                choose_config(preset=preset, settings=config or []),
                train_column=train_column,
                diffusion=diffusion,
                null=None if null is None else diagnostics.read_picture_null(null) or diagnostics.read_null(null),
                null_steps=parse_steps(null_steps),
                what_if=what_if,
                workers=workers,
                ray=ray,
                keep_going=keep_going,
                file_limits=file_limits,
                column_names=column_names,
                on_rows=on_rows,
            )

        page = (
            None if output is None else reports.write_report(diagnostics.check_report(result, what_if=what_if), output)
        )

    if as_json:
        verdict = reports.to_json(
            result.health,
            worst_tokens=[token._asdict() for token in result.worst_tokens],
            lags=[row._asdict() for row in result.lags],
            turns=[row._asdict() for row in result.turns],
            hypotheses=[asdict(finding) for finding in result.hypotheses],
            rows=result.rows,
            files=result.files,
            train_column=result.train_column,
            interrupted=result.interrupted,
            unreadable=result.unreadable,
            report=None if page is None else str(page),
            remarks=result.remarks,
            **({"what_if": [asdict(row) for row in result.what_if]} if what_if else {}),
        )
        typer.echo(verdict)
    else:
        what = "pictures" if result.health.diffusion else "sequences"
        subject = f"{result.rows:,} {what} in {len(result.files)} file{'s' * (len(result.files) != 1)}"
        console = terminal()
        reports.show_health(
            console,
            result.health,
            subject=subject,
            remarks=result.remarks,
            worst_tokens=result.worst_tokens,
            turns=result.turns,
        )
        if what_if:
            show_what_if(console, result.what_if)
        if page is not None:
            console.print(f"\nreport: {page}", soft_wrap=True)

    # Show the verdict on part of a log, but exit with 130 (128 + SIGINT): a script must not read it as the full one.
    if result.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(result.health.exit_code)


def check_schedule(
    rollout: Annotated[
        Path,
        typer.Argument(
            help="The sampler's schedule: a JSON file with a list of numbers, or a rollout log of denoising steps."
        ),
    ],
    trainer: Annotated[Path, typer.Argument(help="The trainer's schedule, in the same form.")],
) -> None:
    """Compare the denoising schedules of a sampler and a trainer, of sigmas or of timestep values.

    A schedule that is off by one entry shifts the σ of every step. Log-probs then belong to a different distribution:
    5e-3 per latent dimension is 328 nats at D = 65,536.

    Write a schedule from diffusers with: json.dump(scheduler.sigmas.tolist(), file)

    A rollout log contains the sigmas of its sampled steps, without steps outside the window. So compare a log with a
    log, or a file with a file.

    Exit codes: 0 equal, 1 different, 2 bad input.
    """
    from rollcorr.diagnostics.schedules import compare_schedules, read_schedule

    with exit_on():
        finding = compare_schedules(read_schedule(rollout), read_schedule(trainer))
    if finding is None:
        typer.echo("the schedules agree")
        return
    typer.echo(f"{finding.title}: {finding.reason}\nfix: {finding.fix}")
    raise typer.Exit(1)
