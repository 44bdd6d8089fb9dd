"""The verdict on a terminal, and as JSON for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.health.health_check import HealthReport
from rollcorr.diagnostics.numbers import HEADLINES, format_number


def show_health(console: Console, health: HealthReport, *, subject: str, remarks: Sequence[str] = ()) -> None:
    """Print the verdict, the headline numbers, then each finding with its reason and fix."""
    style = {"healthy": "green", "unhealthy": "red", "not judged": "yellow"}[health.verdict]
    found = f", {_count(len(health.warnings), 'finding')}" if health.warnings else ""
    console.print(f"[bold {style}]{health.verdict}{found}[/]  {escape(subject)}")
    for sentence in health.not_judged:
        console.print(f"[yellow]not judged: {escape(sentence)}[/]")
    for remark in remarks:
        console.print(f"[dim]note: {escape(remark)}[/]")

    numbers = {label: health.values[name] for name, label in HEADLINES.items() if name in health.values}
    if numbers:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for label, value in numbers.items():
            table.add_row(label, format_number(value))
        console.print(table)
    for finding in health.findings:
        _show(console, finding)


def to_json(health: HealthReport, **more: object) -> str:
    """The verdict, its findings and the judged numbers as one JSON object; what is not finite becomes null."""
    document = {
        "verdict": health.verdict,
        "not_judged": list(health.not_judged),
        "judged_against": health.judged_against,
        "findings": [asdict(finding) for finding in health.findings],
        "metrics": dict(health.values),
        **more,
    }
    return json.dumps(_finite(document), ensure_ascii=False, indent=2, allow_nan=False)


@contextmanager
def row_progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar over rows on stderr, with the time that is left; nothing when stderr is not a terminal.

    Each call passes the rows read since the last call, and the rows of the whole log.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("reading"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("sequences,"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        yield lambda rows, total: progress.update(task, advance=rows, total=total)


def _show(console: Console, finding: Finding) -> None:
    mark = "[bold red]✗[/]" if finding.severity == "warning" else "[dim]·[/]"
    value = "" if finding.value is None else f" {format_number(finding.value)}, limit {finding.limit}"
    when = f"; first at step {finding.first_step}, {_count(finding.steps, 'step')} in all" if finding.steps else ""
    console.print()
    console.print(f"{mark} [bold]{escape(finding.title)}[/]: {escape(f'{finding.metric}{value}{when}')}")

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    if finding.place:
        table.add_row("first in", escape(finding.place))
    table.add_row("why", escape(finding.reason))
    table.add_row("fix", escape(finding.fix))
    console.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
