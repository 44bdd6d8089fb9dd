"""Runs side by side as one self-contained HTML page, with its figures as PNG files beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcorr.config.documents import load_yaml
from rollcorr.diagnostics.numbers import HEADLINES, format_number
from rollcorr.diagnostics.report.html_page import page_environment, series_by_name, write_figures, write_page
from rollcorr.diagnostics.report.plots import COMPARED, Panel, draw_runs
from rollcorr.diagnostics.report.verdict_content import CONSEQUENCES, verdict_content
from rollcorr.diagnostics.run_comparison import RunComparison, compare_runs
from rollcorr.run_directory.stored_run import Run

COMPARISON_FILE = "comparison.html"
OF_THE_RUN = frozenset({"run_dir", "stop_after_minutes", "resume"})
"""Options that say where and when a run goes on, and not what it does."""
ABSENT = "–"
"""Stands for an option or a number that a run lacks."""


@dataclass(frozen=True, kw_only=True)
class ShownResponse:
    """What a policy answered.

    Attributes:
        title: whose answer it is.
        text: the answer.
        right: whether it is; None if that is not known.
        wrong_from: the number of characters before the first wrong one; None to mark nothing.
    """

    title: str
    text: str
    right: bool | None = None
    wrong_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A problem, and what several policies answered.

    Attributes:
        prompt: the problem.
        answer: the right answer.
        responses: what each policy answered.
    """

    prompt: str
    answer: str
    responses: tuple[ShownResponse, ...]


@dataclass(frozen=True, kw_only=True)
class ComparisonData:
    """Everything that the page of a comparison shows.

    Attributes:
        runs: from `rollcorr.read_run`.
        comparison: of these runs, in the same order.
        title: heading.
        subtitle: one line under it.
        remarks: what a reader has to know besides, a paragraph each.
        conclusions: sentences that come before everything else.
        roles: what each run is, in a sentence; empty for none.
        extra: (panel, run name → (step, value) points) of what was measured besides the metrics; drawn first.
        samples: problems with the answers of several policies.
    """

    runs: tuple[Run, ...]
    comparison: RunComparison
    title: str
    subtitle: str
    remarks: tuple[str, ...] = ()
    conclusions: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    extra: tuple[tuple[Panel, Mapping[str, Sequence[tuple[float, float]]]], ...] = ()
    samples: tuple[ShownSample, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.roles and len(self.roles) != len(self.runs):
            raise ValueError(f"give a role for each of the {len(self.runs)} runs, or none; got {len(self.roles)}")


def comparison_report(runs: Sequence[Run], metrics: Sequence[str] = (), **shown: Any) -> ComparisonData:  # noqa: ANN401
    """What the page shows of some runs.

    Args:
        runs: from `rollcorr.read_run`.
        metrics: as for `compare_runs`.
        shown: other fields of `ComparisonData`.

    Raises:
        ValueError: no run has one of the metrics.
    """
    comparison = compare_runs(runs, metrics)
    texts = {"title": "Runs side by side", "subtitle": ", ".join(comparison.names)}
    return ComparisonData(**{"runs": tuple(runs), "comparison": comparison, **texts, **shown})


def write_comparison(data: ComparisonData, directory: str | os.PathLike[str]) -> Path:
    """Write comparison.html and one PNG per figure into a directory; return the path of the page.

    A symbolic link in the place of a file is replaced and not followed.

    Args:
        data: the runs to compare.
        directory: where to; made if it is not there.
    """
    directory = Path(directory)
    names = data.comparison.names
    series = [series_by_name(run.series) for run in data.runs]
    panels = list(data.extra)

    # A metric that is 0 in every run, such as the rejected share, has nothing to show.
    for panel in COMPARED:
        (metric,) = panel.curves
        if any(value for values in series for _, value in values.get(metric, ())):
            panels.append((panel, {name: values.get(metric, ()) for name, values in zip(names, series, strict=True)}))

    drawings = [
        (panel, lambda theme, panel=panel, curves=curves: draw_runs(panel, curves, theme), last_values(curves))
        for panel, curves in panels
    ]
    figures = write_figures(drawings, directory)
    text = (
        page_environment()
        .get_template("comparison.html.j2")
        .render(
            data=data,
            names=names,
            figures=figures,
            differences=config_differences([run.config_text for run in data.runs]),
            numbers={
                HEADLINES.get(name, name): [ABSENT if value is None else format_number(value) for value in values]
                for name, values in data.comparison.values.items()
            },
            latest={panel.title: [_latest(curves.get(name, ())) for name in names] for panel, curves in data.extra},
            contents=[verdict_content(report) for report in data.comparison.reports],
            consequences=CONSEQUENCES,
        )
    )
    return write_page(directory / COMPARISON_FILE, text)


def last_values(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """The latest finite value of each run."""
    latest = {name: _latest(points) for name, points in curves.items()}
    return "; ".join(f"{name} {value}" for name, value in latest.items() if value != ABSENT)


def _latest(points: Sequence[tuple[float, float]]) -> str:
    value = next((value for _, value in reversed(points) if math.isfinite(value)), None)
    return ABSENT if value is None else format_number(value)


def config_differences(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The options in which some configurations differ: dotted name → the value in each, as text.

    Args:
        texts: YAML, as a run keeps it; a text that holds no mapping counts as empty.
    """
    options = [_flat(load_yaml(text) if text.strip() else {}) for text in texts]
    names = dict.fromkeys(name for one in options for name in one if name not in OF_THE_RUN)
    values = {name: tuple(one.get(name, ABSENT) for one in options) for name in names}
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def _flat(value: object, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        inner = [_flat(one, f"{prefix}.{name}" if prefix else str(name)) for name, one in value.items()]
        return {name: text for part in inner for name, text in part.items()}
    if not prefix:
        return {}
    return {prefix: "none" if value is None else str(value)}
