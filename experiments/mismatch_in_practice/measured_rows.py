"""The rows of the measured study, and what several pages and figures read from them."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]

CUT = "0.7, 0.8, 20"
SAMPLINGS = {"1.0": "temperature 1.0", "0.4": "temperature 0.4", CUT: "temperature 0.7, top-p 0.8, top-k 20"}
CLAMP = 20.0

TEXT = ("engine", "sampling", "mode", "warnings", "verdict", "engine_version", "sha256", "knob")
WHOLE = ("updates", "T", "windows", "false_positive", "saturation")
FIT_RANGE = 1.0
"""The law of growth is fitted where its exponent is below this many nats."""


def read_table(path: Path) -> list[dict[str, Any]]:
    """Rows of a table; numbers as numbers."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def select(rows: Rows, **wanted: Any) -> list[Row]:  # noqa: ANN401
    """The rows with these values; a tuple allows several."""

    def fits(value: object, asked: object) -> bool:
        return value in asked if isinstance(asked, tuple) else value == asked

    return [row for row in rows if all(fits(row[name], value) for name, value in wanted.items())]


def distance(row: Row) -> float:
    """T × KL, nats: KL by k3, which is never negative, so that small ones have a logarithm."""
    return float(row["T"] * row["k3"])


def law(row: Row) -> float:
    """T log(1 + χ̄²)."""
    return float(row["T"] * math.log1p(max(row["chi2_token"], -0.999)))


def growth_fit(rows: Rows) -> tuple[float, float, float, int, int] | None:
    """Slope of log(1 + χ²_seq) in T with its error, log(1 + χ̄²), and the range of T."""
    inside = [row for row in rows if law(row) < FIT_RANGE and row["log_second_moment_error"] > 0]
    if len(inside) < 3:
        return None
    weights = [row["log_second_moment_error"] ** -2 for row in inside]
    squares = sum(weight * row["T"] ** 2 for weight, row in zip(weights, inside, strict=True))
    products = sum(w * row["T"] * row["log_second_moment"] for w, row in zip(weights, inside, strict=True))
    lengths = [row["T"] for row in inside]
    slope = products / squares

    # All lengths read the same streams, so the errors of a fit to independent points would be too small.
    relative = min(row["log_second_moment_error"] / max(abs(row["log_second_moment"]), 1e-12) for row in inside)
    return slope, max(squares**-0.5, relative * abs(slope)), law(rows[0]) / rows[0]["T"], min(lengths), max(lengths)


def half_clamped(pair: Rows) -> float | None:
    """The length at which half of the sequences are at the clamp, interpolated in log T; None if not within range."""
    points = [(math.log(row["T"]), row["saturated_low"] + row["saturated_high"]) for row in pair]
    for (left, low), (right, high) in itertools.pairwise(points):
        if low < 0.5 <= high:
            return math.exp(left + (0.5 - low) / (high - low) * (right - left))
    return None


def clip_values(row: Row, column: str) -> list[float]:
    """What a two-sided clip gave at each ceiling."""
    return [float(value) for value in str(row[f"clip_{column}"]).split()]


def pairs_of(rows: Rows) -> list[list[Row]]:
    """Rows of one engine, sampling, staleness and mode, by length."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in ("engine", "sampling", "updates", "mode")), []).append(row)
    return [sorted(pair, key=lambda row: row["T"]) for pair in found.values()]


def name_of(row: Row) -> str:
    """The engine, and how far the trainer is ahead of it."""
    return f"{row['engine']}, {row['updates']} updates" if row["updates"] else str(row["engine"])


def clamped(row: Row) -> float:
    """The share of sequence weights at the clamp, on either side."""
    return float(row["saturated_low"] + row["saturated_high"])


def longest_of(grid: Rows) -> int:
    """The longest response; 0 without rows."""
    return max((row["T"] for row in grid), default=0)


def _value(name: str, text: str) -> Any:  # noqa: ANN401
    if name in TEXT or name.startswith("clip_"):
        return text
    if name in WHOLE:
        return int(text)
    return float(text) if text else math.nan
