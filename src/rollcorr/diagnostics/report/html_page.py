"""The page of a run or a log: one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rollcorr.core.metric_registry import PREFIX, metric
from rollcorr.diagnostics.health.diffusion_rules import step_range
from rollcorr.diagnostics.health.evidence import Metrics, bare_metrics
from rollcorr.diagnostics.health.health_check import HealthReport, healthy_range
from rollcorr.diagnostics.numbers import format_number

try:
    import jinja2
    from markupsafe import Markup
except ImportError as error:
    raise ImportError("reports need Jinja2: pip install 'rollcorr[report]'") from error

from rollcorr.diagnostics.report.curves import (
    Points,
    chart_of,
    guides_of,
    over_timesteps,
    panels_of,
    series_by_name,
    single_panel,
)
from rollcorr.diagnostics.report.report_data import ReportData
from rollcorr.diagnostics.report.verdict_content import CONSEQUENCES, EXPECTED, expected_text, verdict_content
from rollcorr.diagnostics.run_verdict import REWARD

HTML_FILE = "report.html"
SCRIPTS = ("uPlot.iife.min.js", "page.js", "charts.js", "tokens.js")
STYLES = ("uPlot.min.css", "page.css")


def write_report(data: ReportData, directory: str | os.PathLike[str], page: Mapping[str, Any] | None = None) -> Path:
    """Write report.html into a directory; return its path.

    A symbolic link in the place of a file is replaced and not followed.

    Args:
        data: the run.
        directory: where to; made if it is not there.
        page: as for `render`.
    """
    return write_page(Path(directory) / HTML_FILE, render(data, page))


def write_page(path: Path, text: str) -> Path:
    """Write a page and the directory it is in; a symbolic link in its place is replaced and not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    path.write_bytes(text.encode())
    return path


def render_page(template: str, page: Mapping[str, Any], **shown: Any) -> str:  # noqa: ANN401 - of the template
    """Return a page as text: self-contained, with scripts that only their hash allows.

    Args:
        template: its file.
        page: what the page's script reads: charts, tokens, and whether it follows a run.
        shown: what the template shows.
    """
    style, script = map(_joined, (STYLES, SCRIPTS))
    policy = {
        "default-src": "'none'",
        "img-src": "data: blob:",
        "connect-src": "'self'" if page.get("live") else "'none'",
        "style-src": _csp_hash(style),
        "script-src": _csp_hash(script),
        "base-uri": "'none'",
        "form-action": "'none'",
    }

    # In a script element only "<" can end the element, so no text of a run can.
    data = json.dumps(page, ensure_ascii=False, separators=(",", ":"), default=float).replace("<", "\\u003c")
    return (
        page_environment()
        .get_template(template)
        .render(
            policy=Markup("; ".join(f"{name} {value}" for name, value in policy.items())),
            style=Markup(style),
            script=Markup(script),
            page_data=Markup(data),
            tokens=page.get("tokens", ()),
            charts=page["charts"],
            rule=page.get("rule", ""),
            consequences=CONSEQUENCES,
            from_noise=EXPECTED,
            **shown,
        )
    )


@cache
def _joined(files: Sequence[str]) -> str:
    folder = Path(__file__).with_name("page")
    return "\n".join((folder / file).read_text(encoding="utf-8") for file in files)


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


@cache
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


def render(data: ReportData, page: Mapping[str, Any] | None = None) -> str:
    """The page of a run or a log as text.

    Args:
        data: the run.
        page: what its script reads besides the charts, such as tokens.
    """
    return render_page(
        "report.html.j2",
        {
            "charts": run_charts(data.series, diffusion=data.health.diffusion),
            "onset": next((finding.first_step for finding in data.health.warnings), None),
            "noise": data.health.expected.get("k3_kl") if data.health.judged_against else None,
            **(page or {}),
        },
        data=data,
        pictures=[
            {"title": title, "png": base64.b64encode(file.read_bytes()).decode("ascii")}
            for title, file in data.pictures
        ],
        content=verdict_content(data.health),
        reward=reward_gain(data.series),
        defined=[_definition(name, value, data.health) for name, value in data.metrics.items() if _is_known(name)],
        others={name: value for name, value in data.metrics.items() if not _is_known(name)},
        checked=sum(_can_warn(name, diffusion=data.health.diffusion) for name in data.health.values),
    )


def run_charts(series: Sequence[Metrics], *, diffusion: bool) -> list[dict[str, Any]]:
    """Return the charts of a run: the panels, then one for each other metric, which a reader can ask for."""
    curves = series_by_name(series)
    values: dict[str, Points] = {**curves, **over_timesteps(curves)}
    panels = panels_of(values, diffusion=diffusion)
    shown = {name for panel in panels for name in panel.curves}
    charts = []
    for panel in panels:
        there = {name: values[name] for name in panel.curves if len(values.get(name, ()))}
        if there and not any(value for points in there.values() for _, value in points):
            panel, there = replace(panel, absent="0 at every step"), {}
        guides = [*guides_of(there, labels=panel.curves), *panel.guides] if there else []
        charts.append(chart_of(panel, {panel.curves[name]: there[name] for name in there}, guides=guides))
    for name in sorted(curves.keys() - shown):
        guides = guides_of([name], labels={name: name})
        charts.append(chart_of(single_panel(name), {name: curves[name]}, guides=guides) | {"optional": True})
    return charts


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
    known = healthy_range(name)
    limits = step_range(name, known) if known is not None and diffusion else known
    return limits is not None and (limits.warn_below is not None or limits.warn_above is not None)
