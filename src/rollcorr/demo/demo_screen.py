"""The stories of `rollcorr demo` on a terminal: the events, the library's verdict, and the fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollcorr.core.metric_registry import PREFIX
from rollcorr.demo.stories import (
    ARMS,
    LAST,
    SEEDS,
    STEPS,
    SYNC_EVERY,
    TEMPERATURE,
    JudgedRollouts,
    fault_story,
    healthy_story,
    stale_story,
)
from rollcorr.diagnostics.numbers import HEADLINES, format_number, sparkline
from rollcorr.diagnostics.provenance import Provenance

"""Characters of a curve."""


def show_stories(console: Console) -> None:
    """Run the three stories and print each when it is done; a progress bar is on stderr."""
    bar = Progress(
        TextColumn("training"), BarColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    )
    with bar:
        task = bar.add_task("training", total=2 * LAST + STEPS * len(ARMS) * len(SEEDS))

        def on_step() -> None:
            bar.advance(task)

        healthy = healthy_story(on_step)
        broken, fixed = fault_story(on_step)
        curves = stale_story(on_step)
    # Print after the bar is removed, so that the stories stay on the screen.
    console.print("\n[bold]1. A sampler that rounds to bfloat16[/]")
    console.print("The engine has the trainer's weights and settings. Only the rounding of its logits differs.")
    _show_numbers(console, {"measured": healthy})
    _show_findings(console, healthy.provenance)

    console.print(f"\n[bold]2. A fault: the sampler has temperature {TEMPERATURE:g}, the trainer's log-probs 1[/]")
    console.print("Nothing crashes. The log-probs tell:")
    _show_findings(console, broken.provenance)
    console.print(f"After the fix, on the same rollouts (the trainer divides its logits by {TEMPERATURE:g}):")
    _show_findings(console, fixed.provenance)
    _show_numbers(console, {"with the fault": broken, "after the fix": fixed})

    _show_stale(console, curves)
    console.print(
        "\n[bold]With your own run[/]\n"
        "  rollcorr check LOG…      judges rollout logs, also those of other frameworks\n"
        "  rollcorr presets         lists the corrections\n"
        "  rollcorr.Monitor         measures and corrects in your training loop"
    )


def _show_stale(console: Console, curves: Mapping[str, Sequence[float]]) -> None:
    console.print(f"\n[bold]3. A stale sampler: it gets new weights every {SYNC_EVERY} steps[/]")
    console.print(
        "The task has a target that can be overshot. The trainer passes it and does not notice, because the rollouts "
        f"are those of an older policy. Mean of {len(SEEDS)} seeds; 1 is the highest reward:"
    )
    lowest, highest = min(map(min, curves.values())), max(map(max, curves.values()))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("correction", "reward, step 1 to 60", "last 20", "lowest since 20"):
        table.add_column(heading, no_wrap=True)
    for label, curve in curves.items():
        drawn = sparkline(curve, low=lowest, high=highest)
        table.add_row(label, drawn, f"{fmean(curve[-LAST:]):.3f}", f"{min(curve[20:]):.3f}")
    console.print(table)
    console.print(
        "Token weights correct each token, and not the product of all of them: here that is not enough. Sequence "
        "weights (the preset decoupled_seq_is) are, because the responses are short."
    )


def _show_numbers(console: Console, columns: Mapping[str, JudgedRollouts]) -> None:
    table = Table("", *columns, box=None, padding=(0, 2, 0, 0))
    for name, label in HEADLINES.items():
        values = [judgment.metrics.get(PREFIX + name) for judgment in columns.values()]
        if any(value is not None for value in values):
            table.add_row(label, *("–" if value is None else format_number(value) for value in values))
    console.print(table)


def _show_findings(console: Console, provenance: Provenance) -> None:
    if provenance.codes == ("matched",):
        spread = format_number(provenance.findings[0].evidence["std"])
        console.print(
            f"  [green]no wrong setting[/]: log-ratios have a standard deviation of {spread}, as from rounding"
        )
        return
    for finding in provenance.findings:
        style = "yellow" if finding.severity == "warning" else "green"
        console.print(f"  [{style}]{escape(finding.code)}[/]: {escape(finding.reason)}")
        if finding.fix:
            console.print(f"    fix: {escape(finding.fix)}")
