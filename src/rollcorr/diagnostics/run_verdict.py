"""The verdict on a run directory: its metrics, its null and the tokens of its rollouts give one list of causes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.health.health_check import HealthReport, evidence_of, measured_findings, report_of
from rollcorr.diagnostics.resolver import resolve_findings, standing
from rollcorr.run_directory import Run, read_run
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.stored_run import BadInputError

if TYPE_CHECKING:
    from rollcorr.diagnostics.log_check.check import CheckResult

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
