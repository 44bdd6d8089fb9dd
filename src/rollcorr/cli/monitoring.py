"""`rollcorr watch` and `rollcorr compare`: show a live run, or several runs side by side."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rollcorr.diagnostics.null as nulls
import rollcorr.diagnostics.report as reports
from rollcorr import diagnostics, run_directory
from rollcorr.cli.app import TEXT_OPTION, exit_on, terminal
from rollcorr.diagnostics.numbers import COLUMNS, sparkline

if TYPE_CHECKING:
    from rollcorr.monitor.running_judge import RunningJudge

SECONDS_BETWEEN_LOOKS = 2.0


def watch(
    run: Annotated[Path, typer.Argument(help="The run directory. It must exist; it need not hold metrics.jsonl yet.")],
    once: Annotated[bool, typer.Option("--once", help="Show what is there, and stop.")] = False,
) -> None:
    """Show a live run: a line for each step, with curves of the last 30 steps, and each alarm once, with cause and fix.

    Exit codes with --once: 0 healthy, 1 unhealthy (an alarm lasts), 3 not judged. Always: 2 bad input, 130 interrupted.
    """
    from rollcorr.monitor.running_judge import RunningJudge, alarm_text
    from rollcorr.run_directory.directory import RunDirectory
    from rollcorr.run_directory.metrics_file import GrowingMetrics
    from rollcorr.run_directory.stored_run import check_run_directory
    from rollcorr.run_directory.tracker_sinks import step_line

    metrics, config = GrowingMetrics(RunDirectory(run).metrics), None
    recent = deque[Mapping[str, float]](maxlen=COLUMNS)
    with exit_on(ValueError):
        check_run_directory(run)
        null = nulls.noise_beside(run) if RunDirectory(run).null.exists() else None  # it needs Arrow
        if null is not None:
            typer.echo(f"judged against {null.source}")
        judge = RunningJudge(null)
        while True:
            if metrics.begins_again():
                typer.echo("the run went on from an earlier step")
                judge = RunningJudge(null, sampling=judge.sampling)
                recent.clear()
            for number, step in enumerate(metrics.new_steps()):
                if number == 0 and config is None:
                    known = run_directory.read_run(run)
                    config, judge.sampling = known.config, known.sampling
                numbers = {name: value for name, value in step.items() if isinstance(value, (int, float))}
                recent.append(numbers)
                typer.echo("  ".join([step_line(step["step"], numbers), *_curves(recent)]))
                changes = judge.judge(step["step"], diagnostics.bare_metrics(numbers), config)
                for finding in changes.began:
                    typer.secho(alarm_text(step["step"], finding), fg="red")
                for finding in changes.passed:
                    typer.secho(f"step {step['step']}: has passed: {finding.title}", fg="green")
            if once:
                _show_verdict(judge, run)
                raise typer.Exit(judge.exit_code)
            try:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            except KeyboardInterrupt as error:
                _show_verdict(judge, run)
                raise typer.Exit(130) from error


def _curves(steps: Iterable[Mapping[str, float]]) -> Iterator[str]:
    """Yield sparklines of the reward and of log k3 over some steps, where at least two have a value."""
    for label, metric in (("reward", "reward/mean"), ("k3", "rollout_corr/k3_kl")):
        values = [step[metric] for step in steps if math.isfinite(step.get(metric, math.nan))]
        if len(values) < 2:
            continue

        # Noise within a power of ten must not look like a rise.
        if label == "k3":
            values = [math.log10(max(value, 1e-12)) for value in values]
        high = max(*values, min(values) + (label == "k3"))
        yield f"{label} {sparkline(values, low=min(values), high=high)}"


def _show_verdict(judge: RunningJudge, run: Path) -> None:
    """Print the verdict on the run so far, as in `rollcorr report`, and its first cause."""
    typer.secho(judge.verdict, fg={"healthy": "green", "unhealthy": "red"}.get(judge.verdict, "yellow"), bold=True)
    for sentence in judge.not_judged:
        typer.echo(sentence if "not judged" in sentence else f"not judged: {sentence}")
    for cause in diagnostics.causes(run)[:1]:
        typer.secho(f"first cause: {cause.title}. Fix: {cause.fix}", fg="red")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    metric: Annotated[
        list[str] | None, typer.Option(help="Show this metric; repeat it for several. [default: the headline metrics]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write comparison.html into this folder.")
    ] = None,
    text: Annotated[bool, TEXT_OPTION] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show runs side by side: verdicts, and the medians of the last ten steps. Exit codes: 0 done, 2 bad input.

    The page of --output is that of `rollcorr view`: it also has the curves of all runs, and the options that differ.
    """
    with exit_on(ValueError):
        stored = [run_directory.read_run(run) for run in runs]
        comparison = diagnostics.compare_runs(stored, metric or ())

        page = None
        if output is not None:
            data = diagnostics.comparison_report(stored, metric or ())
            page = diagnostics.write_comparison(data, output, reports.logged_tokens(stored, text=text))
    # Print a table by default; with --json, print numbers without NaN, which JSON lacks.
    if not as_json:
        console = terminal()
        console.print(diagnostics.comparison_table(comparison))
        if page is not None:
            console.print(f"\npage: {page}", soft_wrap=True)
        return
    document = [
        {
            "run": str(run),
            "steps": steps,
            "verdict": report.verdict,
            "judged_against": report.judged_against,
            "findings": [finding.title for finding in report.warnings],
            "metrics": {
                name: value if value is not None and math.isfinite(value) else None
                for name, value in ((name, values[number]) for name, values in comparison.values.items())
            },
        }
        for number, (run, steps, report) in enumerate(zip(runs, comparison.steps, comparison.reports, strict=True))
    ]
    typer.echo(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))
