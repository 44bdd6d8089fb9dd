"""Runs side by side: the verdict on each, and the metrics of their last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollcorr.diagnostics.health.evidence import bare_metrics, history_of, recent_medians
from rollcorr.diagnostics.health.health_check import HealthReport
from rollcorr.diagnostics.numbers import HEADLINES, STEP_HEADLINES, format_number, headlines, text_table
from rollcorr.diagnostics.run_verdict import run_health
from rollcorr.run_directory import Run

if TYPE_CHECKING:
    from rich.table import Table

REWARD = "reward/mean"


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Some runs, in the order in which they were given.

    Attributes:
        names: what each is called: as much of its path as tells it from the others.
        steps: how many steps each has.
        reports: the verdict on each.
        values: metric → its median over the last ten steps of each run; None where a run does not have it.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    reports: tuple[HealthReport, ...]
    values: dict[str, tuple[float | None, ...]]


def compare_runs(runs: Sequence[Run], metrics: Sequence[str] = ()) -> RunComparison:
    """Judge some runs, and put their metrics beside each other.

    Args:
        runs: from `rollcorr.read_run`.
        metrics: which ones, with or without a prefix. None: the reward and the headline metrics that any run has.

    Raises:
        ValueError: no run has one of the metrics.
    """
    medians = [recent_medians(history_of(run.series)) for run in runs]
    wanted = [next(iter(bare_metrics({name: 0.0}))) for name in metrics]
    for name, bare in zip(metrics, wanted, strict=True):
        if not any(bare in values for values in medians):
            raise ValueError(f"no run has the metric {name!r}; they have {', '.join(sorted(set().union(*medians)))}")
    kinds = dict.fromkeys(name for run in runs for name in (REWARD, *headlines(diffusion=run.diffusion)))
    shown = wanted or [name for name in kinds if any(name in values for values in medians)]
    return RunComparison(
        names=_short_names(runs),
        steps=tuple(len(run.series) for run in runs),
        reports=tuple(run_health(run) for run in runs),
        values={name: tuple(values.get(name) for values in medians) for name in shown},
    )


def comparison_table(comparison: RunComparison) -> Table:
    """The comparison for a terminal: a column for each run."""
    counts = [len(report.warnings) for report in comparison.reports]
    found = [f", {count} finding{'s' * (count > 1)}" if count else "" for count in counts]
    labels = {**STEP_HEADLINES, **HEADLINES}
    numbers = [
        (labels.get(name, name), *("–" if value is None else format_number(value) for value in values))
        for name, values in comparison.values.items()
    ]
    rows = [
        ("steps", *map(str, comparison.steps)),
        ("verdict", *(report.verdict + words for report, words in zip(comparison.reports, found, strict=True))),
        ("judged against", *(report.judged_against or "–" for report in comparison.reports)),
        *numbers,
    ]
    return text_table(rows, ("", *comparison.names))


def _short_names(runs: Sequence[Run]) -> tuple[str, ...]:
    """The last part of each path, or the whole paths where last parts repeat."""
    names = tuple(run.path.resolve().name for run in runs)
    return names if len(set(names)) == len(names) else tuple(str(run.path) for run in runs)
