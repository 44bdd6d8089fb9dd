"""The verdict on a run directory, from its metrics, its null and the tokens of its rollouts, and runs side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.health.evidence import bare_metrics, history_of, recent_medians
from rollcorr.diagnostics.health.health_check import HealthReport, evidence_of, measured_findings, report_of
from rollcorr.diagnostics.numbers import HEADLINES, STEP_HEADLINES, format_number, headlines, text_table
from rollcorr.diagnostics.resolver import resolve_findings, standing
from rollcorr.run_directory import Run, read_run
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.stored_run import BadInputError

if TYPE_CHECKING:
    from rich.table import Table

    from rollcorr.diagnostics.log_check.check import CheckResult

REWARD = "reward/mean"
MOST_BYTES = 1 << 28
"""Size of the rollouts that a verdict reads besides the metrics; `rollcorr check` reads any size."""


def causes(directory: str | os.PathLike[str]) -> tuple[Finding, ...]:
    """Return the causes of a mismatch, most likely first; empty without any.

    `rollcorr check`, `report`, `watch` and `advise` and `Monitor.causes` name the first of them.

    Args:
        directory: of a run, or a folder of rollout logs.

    Raises:
        BadInputError: the directory holds neither metrics nor rollouts, or its null cannot be read.
    """
    path = Path(directory)
    if RunDirectory(path).metrics.exists():
        return standing(run_health(read_run(path), tokens=True).findings)
    from rollcorr.diagnostics.log_check.check import check_logs  # it needs Arrow

    return check_logs([path]).causes


def run_health(run: Run, *, diffusion: bool = False, tokens: bool = False) -> HealthReport:
    """Return the verdict on a run, by the null in its directory if there is one.

    Args:
        run: from `rollcorr.read_run`.
        diffusion: judge it as a diffusion sampler's, also if its configuration does not show that.
        tokens: also look at logged rollouts, up to `MOST_BYTES`; pictures are judged by them alone, and by their null.

    Raises:
        BadInputError: the null cannot be read.
    """
    null, diffusion = None, diffusion or run.diffusion
    if RunDirectory(run.path).null.exists():
        # Imported only for a null: it needs Arrow.
        from rollcorr.diagnostics.null import noise_beside

        null = noise_beside(run.path)
    evidence = evidence_of(run.series, run.config, diffusion=diffusion, null=null)
    evidence = replace(evidence, sampling=run.sampling)
    checked = _checked(run.path) if tokens else None
    of_rows = () if checked is None else tuple(f for f in checked.hypotheses if f.severity != "note")
    if not diffusion or checked is None or not checked.health.diffusion:
        found = resolve_findings(pairs=of_rows, metrics=measured_findings(evidence), evidence=evidence)
        return report_of(evidence, found)
    found = resolve_findings(null=of_rows, metrics=measured_findings(evidence), evidence=evidence)
    report = report_of(evidence, found, checked.health.judged_against)
    return replace(report, not_judged=(*checked.health.not_judged, *report.not_judged))


def _checked(path: Path) -> CheckResult | None:
    """Return what logged rollouts show; None without any, or if they are too large, links or unreadable."""
    folder = RunDirectory(path).rollouts
    files = [] if folder.is_symlink() or not folder.is_dir() else list(folder.iterdir())
    linked = any(file.is_symlink() for file in files)  # a run may be untrusted: a link may lead out of it
    if not files or linked or sum(file.stat().st_size for file in files) > MOST_BYTES:
        return None
    try:
        from rollcorr.diagnostics.log_check.check import check_logs
    except ImportError:  # without Arrow the metrics decide
        return None
    try:
        return check_logs([path], keep_going=True)
    except BadInputError:
        return None


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

    # The last part of each path, unless last parts repeat.
    names = tuple(run.path.resolve().name for run in runs)
    return RunComparison(
        names=names if len(set(names)) == len(names) else tuple(str(run.path) for run in runs),
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
