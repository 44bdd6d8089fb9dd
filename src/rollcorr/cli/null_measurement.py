"""`rollcorr null`: measure what two correct policies differ by, and keep it for `rollcorr check --null`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollcorr.cli.app import app, exit_on
from rollcorr.cli.logs import COLUMNS_OPTION, LIMIT_OPTION, file_options


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """FIRST:LAST as two numbers; None for None.

    Raises:
        BadInputError: it is not of that form, or the first is larger.
    """
    from rollcorr.run_directory.stored_run import BadInputError

    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.strip().isdecimal() and last.strip().isdecimal() and int(first) <= int(last)):
        raise BadInputError(f"steps are FIRST:LAST, for example 1:5; got {text!r}")
    return int(first), int(last)


@app.command("null")
def measure(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Rollout logs whose two sides are the same policy: files, folders or glob patterns."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the null (JSON).")],
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Only these steps. [default: all rows]")
    ] = None,
    train_column: Annotated[
        str | None,
        typer.Option(help="Trainer's log-probs: old_log_prob or log_prob. [default: the one that is recorded]"),
    ] = None,
    workers: Annotated[int, typer.Option(help="How many processes read the log. The numbers do not depend on it.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    limit: Annotated[list[str] | None, LIMIT_OPTION] = None,
    columns: Annotated[list[str] | None, COLUMNS_OPTION] = None,
) -> None:
    """Measure what a correct sampler and trainer differ by, for `rollcorr check --null FILE`.

    Give rollouts whose two sides are known to be the same policy: the first steps of a run that was right, or what an
    engine was made to sample for this purpose. A log whose sides show other sampling settings is refused.

    Exit codes: 0 written, 2 bad input, 130 interrupted.
    """
    from rollcorr.diagnostics.log_check import null_of_logs
    from rollcorr.diagnostics.null import is_large, remark_on_size
    from rollcorr.diagnostics.report.console import row_progress
    from rollcorr.rollout_log import RolloutLogError
    from rollcorr.run_directory.stored_run import BadInputError

    try:
        with exit_on(BadInputError, RolloutLogError):
            if output.exists() and not overwrite:
                raise BadInputError(f"{output} exists; choose another name, or give --overwrite")
            file_limits, column_names = file_options(limit, columns)
            with row_progress() as on_rows:
                null = null_of_logs(
                    logs,
                    name=output.name,
                    steps=parse_steps(steps),
                    train_column=train_column,
                    workers=workers,
                    file_limits=file_limits,
                    column_names=column_names,
                    on_rows=on_rows,
                )
            null.save(output)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {output} was not written", err=True)
        raise typer.Exit(130) from None
    profile = null.profile
    typer.echo(f"{output}: {profile.row_count:,} sequences, {profile.tokens:,} tokens, k3 {profile.k3:.3g} per token")
    remark = remark_on_size(null)
    if remark:
        judges = is_large(null)
        typer.echo(f"{'note' if judges else 'warning'}: {remark}", err=not judges)
