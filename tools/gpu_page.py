"""The GPU section of docs/background/performance.md: what tools/gpu.py found, and what was expected before it ran."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu_cuda.json"
PREDICTIONS = ROOT / "tools" / "gpu_stages" / "predictions.json"

Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]


def gpu_section(table: Table, result: Path = RESULT) -> str:
    """Predictions beside figures; without a run, the predictions and that there was none."""
    content = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
    expected = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    return f"""{_said(content)}

{_predictions(expected, content, table)}

The predictions are for {expected["device"]}; they were written {expected["written"]}.
{_stages(content, table)}"""


def _said(content: dict[str, Any] | None) -> str:
    if content is None:
        return (
            "No run on a GPU has happened, so there are no measurements. `make test-triton` runs the kernels\n"
            "interpreted, and compiles them for sm_80, sm_90, sm_100 and gfx942. Both ran on Triton 3.4, 3.6 and\n"
            "3.9 on 2026-11-23."
        )
    return (
        f"{content['device']}, torch {content['torch']}, Triton {content['triton']}, Python {content['python']}, "
        f"{content['date']}, commit {content['commit']}: `{content['command']}`."
    )


def _predictions(expected: dict[str, Any], content: dict[str, Any] | None, table: Table) -> str:
    rows = []
    for prediction in expected["predictions"]:
        unit = "seconds" if "seconds" in prediction else "share"
        rows.append(
            (
                prediction["what"],
                _figure(prediction[unit], unit),
                _found(prediction["row"], unit, content),
                prediction["from"],
            )
        )
    return table(("", "predicted", "measured", "predicted from"), rows)


def _found(place: list[str], unit: str, content: dict[str, Any] | None) -> str:
    if content is None:
        return "not measured"
    stage, name = place
    for row in content["stages"].get(stage, {"rows": []})["rows"]:
        if row["name"] == name and "error" in row:
            return row["error"]
        if row["name"] == name:
            return _figure(row["median" if unit == "seconds" else "share"], unit)
    return "not measured"


def _figure(value: float | list[float], unit: str) -> str:
    if isinstance(value, list):
        return " to ".join(_figure(x, unit) for x in value)
    if unit == "share":
        return f"{value:.2%}"
    return f"{value * 1e6:.0f} µs" if value < 1e-3 else f"{value * 1e3:.1f} ms"


def _stages(content: dict[str, Any] | None, table: Table) -> str:
    """How each stage ended, and every row of it that is timed or wrong."""
    if content is None:
        return ""
    ends = [(name, x["status"], f"{x['seconds']:.0f} s", x.get("reason", "")) for name, x in content["stages"].items()]
    parts = ["", table(("stage", "ended", "took", "because"), ends)]
    for name, stage in content["stages"].items():
        rows = [(row["name"], *_cells(row)) for row in stage["rows"]]
        parts += ["", f"### Stage: {name.replace('_', ' ')}", "", table(("", "median", "least", "says"), rows)]
    return "\n".join(parts)


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    times = [_figure(row[key], "seconds") if key in row else "" for key in ("median", "min")]
    if "error" in row:
        return "", "", row["error"]
    shown = (
        "not_run",
        "waits",
        "launches",
        "replays",
        "cases",
        "batches",
        "differing",
        "differences",
        "share",
        "reason",
    )
    says = [f"{key.replace('_', ' ')}: {row[key]}" for key in shown if key in row and row[key] not in ("", [])]
    return times[0], times[1], ("WRONG; " if row.get("wrong") else "") + "; ".join(says)
