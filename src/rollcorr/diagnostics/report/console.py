"""The verdict on a terminal, and as JSON for machines."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rollcorr.diagnostics.health.health_check import HealthReport
from rollcorr.diagnostics.health.weight_sync_rules import step_gaps
from rollcorr.diagnostics.log_check.log_totals import HeavyToken, WhatIf
from rollcorr.diagnostics.numbers import LAG_HEADLINES, format_number, shown_metrics, text_table
from rollcorr.diagnostics.report.verdict_content import (
    CONSEQUENCES,
    EXPECTED,
    ShownFinding,
    verdict_content,
    what_if_content,
)

COLUMNS = 100
"""Columns of each line that opens a verdict."""
WORST_HEADINGS = ("row", "position", "id", "log μ", "log π", "share of k3")


def show_health(
    console: Console,
    health: HealthReport,
    *,
    subject: str,
    remarks: Sequence[str] = (),
    worst_tokens: Sequence[HeavyToken] = (),
    turns: Sequence[tuple[int, int, float, float]] = (),
) -> None:
    """Print the verdict with its cause, the fix and the place; then the numbers, and each cause with its evidence."""
    content = verdict_content(health)
    style = {"healthy": "green", "unhealthy": "red", "not judged": "yellow"}[health.verdict]
    for line in content.opening:
        start, colon, rest = escape(textwrap.shorten(line, COLUMNS, placeholder=" …")).partition(":")
        console.print(f"[bold {style}]{start}{colon}[/]{rest}", soft_wrap=True)
    if content.opening:
        console.print(f"[dim]{'  '.join(filter(None, (content.count, escape(subject))))}[/]")
    else:
        console.print(f"[bold {style}]{content.headline}[/]  {escape(subject)}")
    if worst_tokens:
        _show_worst(console, worst_tokens, health.values.get("token_count", 0.0))
    for sentence in content.sentences:
        console.print(f"[yellow]{escape(sentence)}[/]")
    for remark in remarks:
        console.print(f"[dim]note: {escape(remark)}[/]")

    numbers = [(number.label, number.value, number.expected) for number in content.numbers]
    headings = ("", "measured", EXPECTED) if any(number.expected for number in content.numbers) else ()
    measured = health.values
    lags = [(label, format_number(measured[name])) for name, label in LAG_HEADLINES.items() if name in measured]
    gaps = [
        (gap.name, format_number(gap.kl), "–" if gap.clipped is None else f"{gap.clipped:.1%}")
        for gap in step_gaps(measured)
    ]
    tables = (
        (
            [(str(turn), f"{tokens:,}", format_number(k3)) for turn, tokens, k3, _ in turns],
            ("turn", "tokens", "k3, nats per token"),
        ),
        (numbers, headings),
        (lags, ("k3 by the age of the weights", "nats per token")),
        (gaps, ("gap of a step", "nats per token", "clipped")),
    )
    for rows, titles in tables:
        if rows:
            console.print(text_table(rows, titles))
    for entry in content.entries:
        _show(console, entry, depth=0)


def to_json(health: HealthReport, **more: object) -> str:
    """The verdict, its findings and the judged numbers as one JSON object; what is not finite becomes null.

    The findings are in the order of the terminal: a consequence comes after its cause, whose code is in `follows_from`.
    """
    document = {
        "verdict": health.verdict,
        "not_judged": list(health.not_judged),
        "judged_against": health.judged_against,
        "expected": dict(health.expected),
        "expected_ranges": dict(health.expected_ranges),
        "expected_from": health.expected_from,
        "findings": [asdict(finding) for finding in health.findings],
        "metrics": shown_metrics(health.values, diffusion=health.diffusion),
        **more,
    }
    return json.dumps(_finite(document), ensure_ascii=False, indent=2, allow_nan=False)


def show_what_if(console: Console, rows: Sequence[WhatIf]) -> None:
    """Print what each preset would do to a log, a line each."""
    content = what_if_content(rows)
    console.print(f"\n[bold]{content.title}[/]")
    if content.rows:
        console.print(text_table(content.rows, content.headings))
    console.print(f"[dim]{escape(content.note)}[/]")


@contextmanager
def row_progress(what: str = "reading") -> Iterator[Callable[[int, int], None]]:
    """A progress bar over rows on stderr, with the time that is left; nothing when stderr is not a terminal.

    Each call passes the rows read since the last call, and the rows of the whole log. `what` stands before the bar.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows,"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda rows, total: progress.update(task, advance=rows, total=total)


def _show_worst(console: Console, tokens: Sequence[HeavyToken], count: float) -> None:
    """Print the few tokens that carry most of k3: a cause of all rows would not explain them."""
    share = sum(token.share for token in tokens)
    console.print(f"[bold]{len(tokens)} of {count:,.0f} tokens carry {share:.0%} of k3: look at them first[/]")
    rows = [
        (
            str(token.row),
            str(token.position),
            "not recorded" if token.token_id < 0 else str(token.token_id),
            f"{token.rollout_log_prob:.4g}",
            f"{token.train_log_prob:.4g}",
            f"{token.share:.0%}",
        )
        for token in tokens
    ]
    console.print(text_table(rows, WORST_HEADINGS, left=2))


def _show(console: Console, entry: ShownFinding, *, depth: int) -> None:
    mark = "[dim]·[/]" if entry.finding.severity == "note" else "[bold red]✗[/]"
    numbers = f": {escape(entry.numbers)}" if entry.numbers else ""
    indent = 4 * depth
    console.print()
    console.print(Padding(f"{mark} [bold]{escape(entry.finding.title)}[/]{numbers}", (0, 0, 0, indent)))

    table = text_table(((heading, escape(text)) for heading, text in entry.lines), right=1)
    console.print(Padding(table, (0, 0, 0, indent + 2)))
    if entry.consequences:
        console.print(Padding(f"[dim]{CONSEQUENCES}[/]", (0, 0, 0, indent + 2)))
    for consequence in entry.consequences:
        _show(console, consequence, depth=depth + 1)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
