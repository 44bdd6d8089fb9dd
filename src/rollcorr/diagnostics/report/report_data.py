"""What a report shows of a run or of checked logs. Nothing here needs Jinja2 or matplotlib, so a verdict does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollcorr.config.documents import dump_yaml
from rollcorr.config.finding import Finding
from rollcorr.diagnostics.health.evidence import Metrics, bare_metrics, history_of
from rollcorr.diagnostics.health.health_check import HealthReport
from rollcorr.diagnostics.numbers import shown_metrics
from rollcorr.diagnostics.report.verdict_content import WhatIfContent, what_if_content
from rollcorr.diagnostics.run_verdict import run_health
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.stored_run import Run

# Codes of a sampler that did not get the weights of each step.
OF_OLD_WEIGHTS = frozenset({"frozen_sampler", "stale_by_lag", "growing_mismatch"})

if TYPE_CHECKING:
    from rollcorr.diagnostics.log_check.check import CheckResult


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything a page shows.

    Attributes:
        title: heading.
        subtitle: one line under it: what was looked at.
        health: the verdict.
        series: one dictionary of metrics per step.
        metrics: the numbers of the last table, by bare name; those of the last step, or of the whole log.
        metrics_title: the heading of that table.
        config_text: configuration, shown as it stands.
        remarks: what the reader should know about the input.
        pictures: (heading, PNG file) of what a diffusion model drew.
        what_if: what every preset would do, where that was asked for.
        over_log: the numbers are of all rows of a log, and not of recent steps.
    """

    title: str
    subtitle: str
    health: HealthReport
    series: Sequence[Metrics]
    metrics: Mapping[str, float]
    metrics_title: str
    config_text: str
    remarks: tuple[str, ...] = ()
    pictures: tuple[tuple[str, Path], ...] = ()
    what_if: WhatIfContent | None = None
    over_log: bool = False


def run_report(run: Run, *, diffusion: bool = False) -> ReportData:
    """The report of a training run: judged by its recent steps, as a diffusion sampler's if it is one."""
    verdict = run_health(run, diffusion=diffusion, tokens=True)
    verdict = replace(verdict, findings=tuple(_with_refresh(finding, run) for finding in verdict.findings))
    measured = history_of(run.series)
    step, last = measured[-1] if measured else (run.series[-1]["step"], bare_metrics(run.series[-1]))
    return ReportData(
        title=f"Run {run.path.resolve().name}",
        subtitle=f"{len(run.series)} step{'s' * (len(run.series) != 1)}, the last is {run.series[-1]['step']}",
        health=verdict,
        series=run.series,
        metrics={
            name: value for name, value in shown_metrics(last, diffusion=verdict.diffusion).items() if name != "step"
        },
        metrics_title=f"All metrics of step {step}",
        config_text=run.config_text,
        remarks=(*run.remarks, *_where_tokens_are(run, verdict)),
        pictures=run.pictures,
    )


def _with_refresh(finding: Finding, run: Run) -> Finding:
    """Name the setting of this run that keeps its sampler on old weights, where that is the cause."""
    every = run.config_text.partition("\n  refresh_every: ")[2].partition("\n")[0]
    if finding.code not in OF_OLD_WEIGHTS or every in ("", "1"):
        return finding
    return replace(
        finding,
        fix=f"lower rollout.refresh_every: it is {every}, so the sampler gets new weights every {every} steps; else: "
        f"{finding.fix}",
    )


def _where_tokens_are(run: Run, verdict: HealthReport) -> tuple[str, ...]:
    """How to ask the tokens, where the run logged some: its metrics say how large a mismatch is, and seldom why."""
    directory = RunDirectory(run.path)
    if verdict.healthy or not directory.rollouts.is_dir() or not any(directory.rollouts.iterdir()):
        return ()
    return (f"rollouts are logged: `rollcorr check {run.path}` looks at the tokens, and names causes by them",)


def check_report(result: CheckResult, *, what_if: bool | None = None) -> ReportData:
    """The report of checked rollout logs: judged over all their rows.

    Args:
        result: of `check_logs`.
        what_if: show what every preset would do; None does so where it was measured.
    """
    shows_presets = bool(result.what_if) if what_if is None else what_if
    count, diffusion = len(result.files), result.health.diffusion
    what = "pictures" if diffusion else "sequences"
    return ReportData(
        title=f"Rollout log {Path(result.files[0]).name}" + (f" and {count - 1} more" if count > 1 else ""),
        subtitle=f"{result.rows:,} {what}, {len(result.series)} step{'s' * (len(result.series) != 1)}",
        health=result.health,
        series=result.series,
        metrics=shown_metrics(bare_metrics(result.metrics), diffusion=diffusion),
        metrics_title="All metrics, over all rows",
        config_text=dump_yaml(result.config.to_dict()),
        remarks=result.remarks,
        what_if=what_if_content(result.what_if) if shows_presets else None,
        over_log=True,
    )
