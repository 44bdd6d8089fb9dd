"""`rollcorr calibrate` and `rollcorr advise`: which thresholds to set, and whether to correct at all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollcorr import diagnostics
from rollcorr.cli.app import check_unused, exit_on, terminal
from rollcorr.cli.logs import COLUMNS_OPTION, LIMIT_OPTION, file_options, share_memory
from rollcorr.config.input_file import BadInputError


def calibrate_thresholds(
    null: Annotated[
        Path | None, typer.Argument(metavar="[NULL.json]", help="A null, as `rollcorr null` writes it.")
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Share of healthy tokens (token settings) or sequences that a threshold may reject.")
    ] = 0.05,
    lengths: Annotated[str, typer.Option(help="Tokens of the responses, with commas.")] = "100,500,1000,8000",
    alarm_rate: Annotated[float, typer.Option(help="Share of healthy steps that may raise an alarm.")] = 0.001,
    sequences: Annotated[int, typer.Option(help="Sequences of a step, for the alarms.")] = 256,
    noise: Annotated[
        bool, typer.Option("--noise", help="Instead: what pure noise does to every customary limit. It needs no null.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write the thresholds as JSON.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Thresholds and alarms that cost a stated share of healthy sequences, as a function of length.

    Every number has a 95 % interval, which is about the sampling of the null's rows. A length that the null does not
    have is cut or put together from its rows, and the output says so.

    Exit codes: 0 printed, 2 bad input.
    """
    from rollcorr.diagnostics.report.advice_text import show_calibration, show_noise_table

    with exit_on():
        wanted = _lengths(lengths)
        if noise:
            if null is not None or output is not None:
                raise BadInputError("--noise takes neither a null nor a file: it is about normal noise alone")
            rows = diagnostics.noise_table(lengths=wanted)
            if as_json:
                typer.echo(json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=1))
            else:
                show_noise_table(terminal(), rows, wanted)
            return
        if null is None:
            raise BadInputError("give a null (`rollcorr null LOG -o null.json`), or --noise")
        check_unused(output, overwrite=overwrite)
        found = diagnostics.calibrate(
            diagnostics.read_null(null), rate=rate, lengths=wanted, alarm_rate=alarm_rate, sequences=sequences
        )
        if output is not None:
            found.save(output)
    if as_json:
        typer.echo(found.to_json())
    else:
        show_calibration(terminal(), found)


def advise_on(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Rollout logs, or dumps of other frameworks: files, folders or glob patterns."),
    ],
    null: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What two correct policies differ by here (`rollcorr null`). [default: RUN/null.json]"
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="Share of healthy sequences that a rejection may cost.")] = 0.05,
    train_column: Annotated[
        str | None,
        typer.Option(help="Trainer's log-probs: old_log_prob or log_prob. [default: the one that is recorded]"),
    ] = None,
    workers: Annotated[int, typer.Option(help="How many processes read the log. The numbers do not depend on it.")] = 1,
    limit: Annotated[list[str] | None, LIMIT_OPTION] = None,
    columns: Annotated[list[str] | None, COLUMNS_OPTION] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the YAML alone, if the advice is to correct."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Advise on a log: a preset with thresholds, reasons and YAML to paste; or what to repair before correcting.

    Exit codes: 0 a preset, 1 repair something first, 2 bad input, 3 not judged, 130 interrupted.
    """
    share_memory()
    from rollcorr.diagnostics.report.advice_text import show_advice
    from rollcorr.diagnostics.report.console import row_progress
    from rollcorr.run_directory.durable_files import write_text_durably

    with exit_on():
        check_unused(output, overwrite=overwrite)
        if not 0 < rate < 0.5:
            raise BadInputError(f"the rate is a share between 0 and 0.5; got {rate:g}")
        file_limits, column_names = file_options(limit, columns)
        with row_progress() as on_rows:
            result = diagnostics.check_logs(
                logs,
                train_column=train_column,
                null=None if null is None else diagnostics.read_null(null),
                workers=workers,
                file_limits=file_limits,
                column_names=column_names,
                on_rows=on_rows,
            )
        if result.interrupted:
            typer.echo("interrupted: part of a log gives no advice", err=True)
            raise typer.Exit(130)
        advice = diagnostics.advise(result, rate=rate)
        if output is not None and advice.yaml:
            write_text_durably(output, advice.yaml)
    if output is not None and not advice.yaml:
        typer.echo(f"{output} is not written: there is no configuration to write", err=True)
    if as_json:
        typer.echo(advice.to_json())
    else:
        if result.null is not None:
            typer.echo(f"judged against {result.null.name}", err=True)  # users paste the YAML of the output
        show_advice(terminal(), advice)
    raise typer.Exit(advice.exit_code)


def _lengths(text: str) -> list[int]:
    """Lengths with commas as numbers.

    Raises:
        BadInputError: one of them is no whole number above 0.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BadInputError(f"lengths are whole numbers with commas, for example 500,8000; got {text!r}")
    return [int(part) for part in parts]
