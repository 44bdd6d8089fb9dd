"""Judge a run directory by its metrics, its null and its logged rollouts, and compare runs."""

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
"""Maximum size of rollouts that a verdict reads in addition to the metrics; `rollcorr check` has no limit."""


def causes(directory: str | os.PathLike[str]) -> tuple[Finding, ...]:
    """Return the causes of a mismatch, most likely first; empty if there are none.

    `rollcorr check`, `report`, `watch` and `advise` and `Monitor.causes` name the first cause.

    Args:
        directory: run directory, or a folder of rollout logs.

    Returns:
        The causes that no test refuted.

    Raises:
        BadInputError: the directory contains neither metrics nor rollouts, or its null cannot be read.
    """
    path = Path(directory)
    if RunDirectory(path).metrics.exists():
        return standing(run_health(read_run(path), tokens=True).findings)
    from rollcorr.diagnostics.log_check.check import check_logs  # it needs Arrow

    return check_logs([path]).causes


def run_health(run: Run, *, diffusion: bool = False, tokens: bool = False) -> HealthReport:
    """Return the verdict on a run, using the null in its directory if there is one.

    Args:
        run: result of `rollcorr.read_run`.
        diffusion: judge the run as a diffusion sampler, even if its configuration does not show that; default False.
        tokens: also read logged rollouts of at most `MOST_BYTES`; default False.

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
    checked, measured = _checked(run.path) if tokens else None, measured_findings(evidence)
    if checked is None:
        return report_of(evidence, resolve_findings(metrics=measured, evidence=evidence))
    of_rows = tuple(finding for finding in checked.hypotheses if finding.severity != "note")
    if diffusion and checked.health.diffusion:
        found = resolve_findings(null=of_rows, metrics=measured, evidence=evidence)
        report = report_of(evidence, found, checked.health.judged_against)
        return replace(report, not_judged=(*checked.health.not_judged, *report.not_judged))

    # If the tokens were compared with the null too, drop the metrics' less precise finding `above_null`.
    again = any(finding.code == "measure_null_again" for finding in checked.hypotheses)
    if checked.null is not None and (checked.causes or again):
        measured = tuple(finding for finding in measured if finding.code != "above_null")
    report = report_of(evidence, resolve_findings(pairs=of_rows, metrics=measured, evidence=evidence))
    return replace(report, not_judged=(*checked.health.not_judged, *report.not_judged)) if again else report


def _checked(path: Path) -> CheckResult | None:
    """Return the check of the logged rollouts; None if they are missing, oversized, links or unreadable."""
    folder = RunDirectory(path).rollouts
    files = [] if folder.is_symlink() or not folder.is_dir() else list(folder.iterdir())
    linked = any(file.is_symlink() for file in files)  # a run may be untrusted, and a link may point outside of it
    if not files or linked or sum(file.stat().st_size for file in files) > MOST_BYTES:
        return None
    try:
        from rollcorr.diagnostics.log_check.check import check_logs

        return check_logs([path], keep_going=True)
    except (ImportError, BadInputError):  # without Arrow, judge only the metrics
        return None


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Several runs, in the given order.

    Attributes:
        names: name of each run: the last part of its path, or the full path if last parts repeat.
        steps: number of steps of each run.
        reports: verdict on each run.
        values: metric → its median over the last ten steps of each run; None if a run does not contain it.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    reports: tuple[HealthReport, ...]
    values: dict[str, tuple[float | None, ...]]


def compare_runs(runs: Sequence[Run], metrics: Sequence[str] = ()) -> RunComparison:
    """Judge several runs, and tabulate their metrics.

    Args:
        runs: results of `rollcorr.read_run`.
        metrics: names of the metrics, with or without a prefix; default: the reward and every headline metric that any
            run contains.

    Returns:
        The comparison.

    Raises:
        ValueError: no run contains one of the metrics.
    """
    medians = [recent_medians(history_of(run.series)) for run in runs]
    wanted = [next(iter(bare_metrics({name: 0.0}))) for name in metrics]
    for name, bare in zip(metrics, wanted, strict=True):
        if not any(bare in values for values in medians):
            raise ValueError(f"no run has the metric {name!r}; they have {', '.join(sorted(set().union(*medians)))}")
    kinds = dict.fromkeys(name for run in runs for name in (REWARD, *headlines(diffusion=run.diffusion)))
    shown = wanted or [name for name in kinds if any(name in values for values in medians)]

    # Use the last part of each path, or the full path if these repeat.
    names = tuple(run.path.resolve().name for run in runs)
    return RunComparison(
        names=names if len(set(names)) == len(names) else tuple(str(run.path) for run in runs),
        steps=tuple(len(run.series) for run in runs),
        reports=tuple(run_health(run) for run in runs),
        values={name: tuple(values.get(name) for values in medians) for name in shown},
    )


def comparison_table(comparison: RunComparison) -> Table:
    """Return the comparison as a terminal table with one column per run."""
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
