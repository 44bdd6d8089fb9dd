"""The report: one self-contained HTML page, and its figures as PNG files beside it."""

from __future__ import annotations

import base64
import math
import os
import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollcorr.core.metric_registry import PREFIX, metric
from rollcorr.diagnostics.health.diffusion_rules import step_range
from rollcorr.diagnostics.health.evidence import Metrics, bare_metrics
from rollcorr.diagnostics.health.health_check import HealthReport, healthy_range
from rollcorr.diagnostics.numbers import format_number

try:
    import jinja2
except ImportError as error:
    raise ImportError("reports need Jinja2: pip install 'rollcorr[report]'") from error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from rollcorr.diagnostics.report.plots import DARK, LAST, LIGHT, Panel, Theme, draw, over_timesteps, panels_of, to_png
from rollcorr.diagnostics.report.report_data import ReportData
from rollcorr.diagnostics.report.verdict_content import CONSEQUENCES, EXPECTED, expected_text, verdict_content
from rollcorr.diagnostics.run_comparison import REWARD

HTML_FILE = "report.html"


def write_report(data: ReportData, directory: str | os.PathLike[str]) -> Path:
    """Write report.html and one PNG per figure into a directory; return the path of the page.

    A symbolic link in the place of a file is replaced and not followed.

    Args:
        data: the run.
        directory: where to; made if it is not there.
    """
    directory = Path(directory)
    series = series_by_name(data.series)
    series |= over_timesteps(series)
    panels = panels_of(series, diffusion=data.health.diffusion)
    drawings = [
        (panel, lambda theme, panel=panel: draw(panel, series, theme), caption(panel, series)) for panel in panels
    ]
    return write_page(directory / HTML_FILE, render(data, write_figures(drawings, directory)))


def write_figures(
    drawings: Iterable[tuple[Panel, Callable[[Theme], Figure], str]], directory: Path
) -> list[dict[str, Any]]:
    """Draw figures, write one PNG of each into a directory, and return what a page needs to show them.

    Args:
        drawings: (panel, a function that draws it in a theme, caption).
        directory: made if it does not exist.
    """
    directory.mkdir(parents=True, exist_ok=True)

    # Each figure is drawn twice: the page shows the one that suits the reader's color scheme.
    figures = []
    for panel, draw_in, text in drawings:
        light, dark = (to_png(draw_in(theme)) for theme in (LIGHT, DARK))
        _write(directory / f"{panel.name}.png", light)
        figures.append({"panel": panel, "light": _base64(light), "dark": _base64(dark), "caption": text})
    return figures


def write_page(path: Path, text: str) -> Path:
    """Write a page; a symbolic link in its place is replaced and not followed."""
    _write(path, text.encode())
    return path


def _write(path: Path, content: bytes) -> None:
    if path.is_symlink():
        path.unlink()
    path.write_bytes(content)


def page_environment() -> jinja2.Environment:
    """The templates, with what every page needs."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rollcorr.diagnostics.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    return environment


def render(data: ReportData, figures: Sequence[Mapping[str, Any]]) -> str:
    """The page as text."""
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            data=data,
            figures=figures,
            pictures=[{"title": title, "png": _base64(file.read_bytes())} for title, file in data.pictures],
            content=verdict_content(data.health),
            consequences=CONSEQUENCES,
            from_noise=EXPECTED,
            reward=reward_gain(data.series),
            defined=[_definition(name, value, data.health) for name, value in data.metrics.items() if _is_known(name)],
            others={name: value for name, value in data.metrics.items() if not _is_known(name)},
            checked=sum(_can_warn(name, diffusion=data.health.diffusion) for name in data.health.values),
        )
    )


def series_by_name(series: Sequence[Metrics]) -> dict[str, Any]:
    """Arrays of (step, value) by bare metric name, of the steps that measured a token; the reward of every step."""
    found: dict[str, array[float]] = {}
    for index, metrics in enumerate(series, start=1):
        step, bare = int(metrics.get("step", index)), bare_metrics(metrics)
        measured = bare.get("token_count", 1.0) > 0
        for name, value in bare.items():
            if measured or name.startswith("reward/"):
                found.setdefault(name, array("d")).extend((step, value))
    return {name: np.asarray(points).reshape(-1, 2) for name, points in found.items()}


def reward_gain(series: Sequence[Metrics], *, window: int = 10) -> dict[str, float] | None:
    """Mean reward of the last steps minus the first, with its standard error; None with fewer than four rewards.

    The windows are ten steps, or half of the series when it is shorter than twenty.
    """
    rewards = [
        value
        for metrics in series
        for value in bare_metrics({REWARD: metrics.get(REWARD)}).values()
        if math.isfinite(value)
    ]
    window = min(window, len(rewards) // 2)
    if window < 2:
        return None

    first, last = rewards[:window], rewards[-window:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / window)
    first_mean, last_mean = statistics.fmean(first), statistics.fmean(last)
    return {"first": first_mean, "last": last_mean, "gain": last_mean - first_mean, "error": error, "window": window}


def caption(panel: Panel, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """The latest value of each curve and the range it moved in; over timesteps, the latest value at each."""
    if panel.across == "timestep":
        by_timestep = (f"{format_number(value)} at {time:g}" for time, value in reversed(series.get(LAST, ())))
        return ", ".join(by_timestep)
    parts = []
    for name, label in panel.curves.items():
        values = [value for _, value in series.get(name, ()) if math.isfinite(value)]
        if values:
            span = f"{format_number(min(values))} to {format_number(max(values))}"
            parts.append(f"{label} {format_number(values[-1])}" + (f" ({span})" if min(values) < max(values) else ""))
    return "; ".join(parts)


def _definition(name: str, value: float, health: HealthReport) -> dict[str, Any]:
    found = metric(name)
    unit, formula = found.unit, found.formula

    # The registry defines a metric once; what it counts and averages over are then denoising steps.
    if health.diffusion:
        unit, formula = (text.replace("tokens", "steps") for text in (unit, formula))
    return {
        "name": found.name,
        "value": value,
        "expected": expected_text(name, health),
        "unit": unit,
        "formula": formula,
        "ideal": found.healthy.ideal if found.healthy is not None else "",
    }


def _is_known(name: str) -> bool:
    try:
        metric(PREFIX + name)
    except KeyError:
        return False
    return True


def _can_warn(name: str, *, diffusion: bool) -> bool:
    limits = healthy_range(name)
    if limits is not None and diffusion:
        limits = step_range(name, limits)
    return limits is not None and (limits.warn_below is not None or limits.warn_above is not None)


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode("ascii")
