"""Thresholds, the table of noise and advice on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape

from rollcorr.diagnostics.advice.advisor import Advice
from rollcorr.diagnostics.advice.calibration import Calibration
from rollcorr.diagnostics.advice.noise_table import NoiseRow
from rollcorr.diagnostics.advice.order_statistics import QuantileEstimate
from rollcorr.diagnostics.numbers import text_table


def show_calibration(console: Console, found: Calibration) -> None:
    """Print the thresholds of each length, then the alarms."""
    console.print(
        f"[bold]thresholds that reject {found.rate:.2%} of healthy tokens or sequences[/]  from {escape(found.null)}: "
        f"{found.rows:,} sequences, {found.tokens:,} tokens",
        soft_wrap=True,
    )
    for remark in found.remarks:
        console.print(f"[yellow]{escape(remark)}[/]", soft_wrap=True)
    limits = [
        (
            one.setting,
            "any" if one.length is None else f"{one.length:,}",
            one.text,
            _interval(one.lower),
            _interval(one.upper),
        )
        for one in found.limits
    ]
    headings = ("setting", "T", "threshold", "95 % interval, lower end", "95 % interval, upper end")
    console.print(text_table(limits, headings))

    console.print(f"\n[bold]alarms that {found.alarm_rate:.2%} of healthy steps raise[/]")
    alarms = [
        (
            alarm.metric,
            f"{alarm.length:,}",
            f"{alarm.sequences:,}",
            f"{alarm.limit.value:.4g}",
            _interval(alarm.limit),
        )
        for alarm in found.alarms
    ]
    headings = ("metric", "T", "sequences of a step", "alarm above, nats", "95 % interval")
    console.print(text_table(alarms, headings))


def show_noise_table(console: Console, rows: Iterable[NoiseRow], lengths: Sequence[int]) -> None:
    """Print what noise does to every customary limit."""
    headings = ("limit", "of which noise makes", "σ, nats", *(f"T = {length:,}" for length in lengths))
    texts = [(row.limit, row.shows, f"{row.sigma:g}", *map(share_text, row.shares)) for row in rows]
    console.print(text_table(texts, headings))


def share_text(share: float) -> str:
    """A share in per cent, with as many digits as matter."""
    if share < 5e-5:
        return "0"
    return f"{share:.2%}" if share < 0.01 else f"{share:.0%}"


def show_advice(console: Console, advice: Advice) -> None:
    """Print the decision, the reasons, and the YAML to paste."""
    changes = ", ".join(f"{name} {value}" for name, value in advice.thresholds.items())
    preset = f"{advice.preset} with {changes}" if changes else advice.preset
    headlines = {
        "correct": f"[bold green]take {advice.candidate}: the preset {preset}[/]",
        "repair": "[bold red]do not correct[/]",
        "not judged": "[bold yellow]not judged[/]",
    }
    console.print(headlines[advice.decision])
    for reason in advice.reasons:
        console.print(f"- {escape(reason)}", soft_wrap=True)
    for finding in advice.repairs:
        console.print(f"\n[bold red]✗[/] [bold]{escape(finding.title)}[/]", soft_wrap=True)
        for heading, text in (("why", finding.reason), ("fix", finding.fix), ("confirm", finding.confirm)):
            if text:
                console.print(f"  [dim]{heading}[/] {escape(text)}", soft_wrap=True)
    if advice.candidates:
        _show_candidates(console, advice)
    for caveat in advice.caveats:
        console.print(f"[yellow]note: {escape(caveat)}[/]", soft_wrap=True)
    if advice.yaml:
        console.print(f"\n{escape(advice.yaml)}", end="", soft_wrap=True)


def _show_candidates(console: Console, advice: Advice) -> None:
    """Print what each candidate does to the log, the chosen one in bold."""
    console.print()
    table = text_table([], ("correction", "kept", "token ESS", "sequence ESS", "signal kept", "noise", "bias"))
    table.columns[0].no_wrap = True
    for row in advice.candidates:
        numbers = (row.kept, row.token_ess, row.sequence_ess, row.signal, row.noise, row.bias)
        texts = ["not known" if number is None else f"{number:.3f}" for number in numbers]
        table.add_row(row.name, *texts, style="bold" if row.name == advice.candidate else None)
    console.print(table)


def _interval(estimate: QuantileEstimate | None) -> str:
    if estimate is None:
        return ""
    return " to ".join(f"{end:.6g}" if math.isfinite(end) else "not bounded" for end in estimate[1:])
