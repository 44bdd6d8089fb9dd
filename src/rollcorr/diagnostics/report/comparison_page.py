"""Runs side by side as one self-contained HTML page."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcorr.config.documents import load_yaml
from rollcorr.diagnostics.numbers import HEADLINES, format_number
from rollcorr.diagnostics.report.curves import (
    COMPARED,
    Panel,
    Points,
    chart_of,
    guides_of,
    series_by_name,
    single_panel,
)
from rollcorr.diagnostics.report.html_page import render_page, write_page
from rollcorr.diagnostics.report.verdict_content import verdict_content
from rollcorr.diagnostics.run_verdict import RunComparison, compare_runs
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
    return ComparisonData(
        runs=tuple(runs),
        comparison=comparison,
        **{"title": "Runs side by side", "subtitle": ", ".join(comparison.names), **shown},
    )


def write_comparison(
    data: ComparisonData, directory: str | os.PathLike[str], page: Mapping[str, Any] | None = None
) -> Path:
    """Write comparison.html into a directory; return its path.

    A symbolic link in the place of a file is replaced and not followed.

    Args:
        data: the runs to compare.
        directory: where to; made if it is not there.
        page: as for `render_comparison`.
    """
    return write_page(Path(directory) / COMPARISON_FILE, render_comparison(data, page))


def render_comparison(data: ComparisonData, page: Mapping[str, Any] | None = None) -> str:
    """The page of some runs as text; `page` is what its script reads besides the charts, such as tokens."""
    names = data.comparison.names
    series = [series_by_name(run.series) for run in data.runs]
    panels: list[tuple[Panel, Mapping[str, Points]]] = list(data.extra)

    # A metric that is 0 in every run, such as the rejected share, has nothing to show.
    known = [*COMPARED, *map(single_panel, sorted(set().union(*series) - {m for p in COMPARED for m in p.curves}))]
    for panel in known:
        (metric,) = panel.curves
        if any(value for values in series for _, value in values.get(metric, ())):
            panels.append((panel, {name: values.get(metric, ()) for name, values in zip(names, series, strict=True)}))

    # A run keeps its color in every chart, also where another run lacks the metric.
    charts = [
        chart_of(panel, curves, guides=guides_of(panel.curves, labels=panel.curves))
        | {"optional": panel in known[len(COMPARED) :]}
        for panel, curves in panels
    ]
    return render_page(
        "comparison.html.j2",
        {"charts": charts, "runs": list(names), **(page or {})},
        data=data,
        names=names,
        differences=config_differences([run.config_text for run in data.runs]),
        numbers={
            HEADLINES.get(name, name): [ABSENT if value is None else format_number(value) for value in values]
            for name, values in data.comparison.values.items()
        },
        latest={panel.title: [_latest(curves.get(name, ())) for name in names] for panel, curves in data.extra},
        contents=[verdict_content(report) for report in data.comparison.reports],
    )


def _latest(points: Points) -> str:
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
    return {prefix: "none" if value is None else str(value)} if prefix else {}
