"""The command line: one command per job, heavy imports only inside the command that needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rollcorr.config.conversion import Conversion, Schema

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
    """Train on rollouts from a lower-precision copy of the policy, corrected as configured.

    The configuration's `recipe` says what: grpo (a language model, the default; all options are in
    src/rollcorr/train/grpo/grpo_config.py) or flow_grpo (a diffusion model; src/rollcorr/train/flow_grpo/flow_grpo_config.py).

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


def main() -> None:
    """Entry point of the `rollcorr` command."""
    app()


@app.command("convert-config")
def convert_config(
    old: Annotated[Path, typer.Argument(metavar="OLD.yaml", help="A verl configuration, or just the options.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="NEW.yaml", help="Write here instead of to standard output."),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(metavar="SCHEMA", help="2025-10, 2025-11 or newest; found out when not given."),
    ] = None,
) -> None:
    """Rewrite rollout-correction options of any generation in the newest form, and say what each became.

    The new YAML goes to standard output (or NEW.yaml), the account to standard error. A whole file keeps its other
    sections; comments are lost. Exit code 2: the input cannot be read, with the reason.

    Example: old.yaml holds

        algorithm:
          rollout_is_threshold: 2.0
          rollout_is: true
          rollout_is_level: token

    and `rollcorr convert-config old.yaml -o new.yaml` writes algorithm.rollout_correction with rollout_is: token.
    """
    import warnings

    from rich.console import Console

    from rollcorr.config.conversion import convert, converted_document
    from rollcorr.config.yaml_text import dump_yaml, load_yaml

    console = Console(stderr=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            raw = load_yaml(old.read_text(encoding="utf-8"))
            conversion = convert(raw, schema=cast("Schema | None", schema))
        text = dump_yaml(converted_document(raw, conversion))
        if output is not None:
            output.write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        console.print(f"{old}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if output is None:
        typer.echo(text, nl=False)
    _print_conversion(console, conversion, [str(warning.message) for warning in caught])


def _print_conversion(console: Console, conversion: Conversion, warned: list[str]) -> None:
    """What each old field became, as a table, and the notes below it."""
    from rich.markup import escape
    from rich.table import Table

    from rollcorr.config.generations import shown

    table = Table(title=f"schema {conversion.schema} → newest", title_justify="left")
    for column in ("old", "value", "became", "why"):
        table.add_column(column, overflow="fold")
    for row in conversion.report:
        table.add_row(*(escape(text) for text in (row.field, shown(row.value), row.became, row.reason)))
    console.print(table)
    for label, lines in (("note", conversion.notes), ("warning", warned)):
        for line in lines:
            console.print(f"{label}: {line}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory, with metrics.jsonl and config.yaml.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for report.html and the figures. [default: RUN/report]"),
    ] = None,
    diffusion: Annotated[bool, typer.Option("--diffusion", help="Judge as a diffusion sampler's run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Write the report of a training run. Exit code: 0 healthy, 1 findings, 2 bad input."""
    from rich.console import Console

    from rollcorr.diagnostics.report.console import show_health, to_json
    from rollcorr.diagnostics.report.page import run_report, write_report
    from rollcorr.run_directory.stored_run import BadInputError, read_run

    with _exit_on(BadInputError):
        data = run_report(read_run(run), diffusion=diffusion)
        page = write_report(data, output or run / "report")
    if as_json:
        typer.echo(to_json(data.health, report=str(page), remarks=data.remarks))
    else:
        console = Console(highlight=False)
        show_health(console, data.health, subject=f"{data.title}: {data.subtitle}", remarks=data.remarks)
        console.print(f"\nreport: {page}", soft_wrap=True)
    raise typer.Exit(0 if data.health.healthy else 1)


@app.command()
def check(
    logs: Annotated[list[Path], typer.Argument(help="Rollout logs (Parquet or JSONL): files, folders or patterns.")],
    preset: Annotated[str | None, typer.Option(help="Measure what this preset would do.")] = None,
    config: Annotated[Path | None, typer.Option(help="Measure what this YAML file would do; any generation.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write report.html and figures into this folder.")
    ] = None,
    train_column: Annotated[
        str | None, typer.Option(help="Trainer's log-probs: old_log_prob or log_prob. [default: what is recorded]")
    ] = None,
    diffusion: Annotated[
        bool, typer.Option("--diffusion", help="The log-probs are densities of a diffusion sampler.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes that read; the numbers are the same for any.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Read on a Ray cluster instead: auto, local or ray://host:port."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Judge rollout logs without a training run. Exit code: 0 healthy, 1 findings, 2 bad input, 130 interrupted."""
    from rich.console import Console

    from rollcorr.diagnostics.log_check.check import check_logs, choose_config
    from rollcorr.diagnostics.report.console import row_progress, show_health, to_json
    from rollcorr.run_directory.stored_run import BadInputError
    from rollcorr.rollout_log import RolloutLogError

    page = None
    with _exit_on(BadInputError, RolloutLogError):
        chosen = choose_config(preset=preset, file=config)
        with row_progress() as on_rows:
            result = check_logs(
                logs, chosen, train_column=train_column, diffusion=diffusion, workers=workers, ray=ray, on_rows=on_rows
            )
        if output is not None:
            from rollcorr.diagnostics.report.page import check_report, write_report

            page = write_report(check_report(result), output)
    subject = f"{result.rows:,} sequences in {len(result.files)} file{'s' * (len(result.files) != 1)}"
    if as_json:
        more = {"rows": result.rows, "files": result.files, "train_column": result.train_column}
        typer.echo(
            to_json(
                result.health, **more, interrupted=result.interrupted, report=page and str(page), remarks=result.remarks
            )
        )
    else:
        console = Console(highlight=False)
        show_health(console, result.health, subject=subject, remarks=result.remarks)
        if page is not None:
            console.print(f"\nreport: {page}", soft_wrap=True)
    raise typer.Exit(130 if result.interrupted else 0 if result.health.healthy else 1)


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Say what is installed: versions, which kernels are in use and why others are not, extras."""
    from rich.console import Console

    from rollcorr.diagnostics.installation import inspect_installation, show_installation, to_json

    installation = inspect_installation()
    if as_json:
        typer.echo(to_json(installation))
    else:
        show_installation(Console(highlight=False), installation)


@contextmanager
def _exit_on(*bad_input: type[Exception]) -> Iterator[None]:
    """Say on stderr what is wrong with the input, a file or a missing extra, and leave with exit code 2."""
    expected: tuple[type[Exception], ...] = (*bad_input, OSError, ImportError)
    try:
        yield
    except expected as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
