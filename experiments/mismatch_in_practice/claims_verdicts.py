"""What a verdict on a claim is, and the standards by which all judges reach one."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from measured_rows import Rows, read_table

HERE = Path(__file__).resolve().parent
LABORATORY = HERE.parent / "laboratory"
CELLS = (HERE / "trained" / "cells", HERE.parent / "bench" / "cells")
"""Trainings of the study and of the bench; a cell of the bench wins."""

REPEATS = "repeats"
FAILS = "does not repeat"
PARTLY = "repeats in part"
NOT_SEEN = "not seen"
UNDECIDED = "undecided"
CANNOT = "cannot be tested here"
WORDS = (REPEATS, PARTLY, FAILS, NOT_SEEN, UNDECIDED, CANNOT)

MARGIN = 2.0
"""Standard errors that make a difference."""

NEARLY_ALL, HARDLY_ANY = 0.9, 0.1
"""A claim about many cases repeats if it holds in the first share of them; up to the second, it does not repeat."""


class Verdict(NamedTuple):
    """One of `WORDS`, what was seen, and which part repeats, or why nothing was decided."""

    word: str
    seen: str
    why: str = ""

    def __str__(self) -> str:
        if not self.why:
            return self.word
        return f"{self.word}, because {self.why}" if self.word == CANNOT else f"{self.word}: {self.why}"


@dataclass(frozen=True)
class Evidence:
    """Everything that a judge may read; an empty table was not measured."""

    grid: Rows = ()
    temperature: Rows = ()
    cells: Sequence[dict[str, Any]] = ()
    orders: Rows = ()
    exact: Rows = ()
    regimes: Rows = ()
    threshold: Rows = ()
    growth: Rows = ()
    clamp: Rows = ()
    table_training: Rows = ()


Judge = Callable[[Evidence], Verdict | None]
"""A verdict on one claim; None if its rows are not measured yet."""


def committed_evidence() -> Evidence:
    """The tables and cells that lie in the repository."""
    paths = {path.stem: path for folder in CELLS for path in folder.glob("*.json")}
    cells = [json.loads(paths[name].read_text(encoding="utf-8")) for name in sorted(paths)]
    names = ("orders", "regimes", "threshold", "growth", "clamp", "table_training")
    tables: dict[str, Rows] = {name: _laboratory_table(name) for name in names}

    # The two tables share a few cases; each counts once.
    exact = {
        tuple(row[name] for name in ("kind", "T", "kl", "batch_size", "estimator")): row
        for row in (*_laboratory_table("kl"), *_laboratory_table("length"))
    }
    return Evidence(
        grid=read_table(HERE / "measured" / "grid.csv"),
        temperature=read_table(HERE / "measured" / "temperature.csv"),
        cells=cells,
        exact=list(exact.values()),
        **tables,
    )


def direction(value: float, error: float) -> int:
    """1 if a value is above 0 by more than `MARGIN` standard errors, −1 if below, else 0; 0 without an error."""
    if math.isnan(error):
        return 0
    return (value > MARGIN * error) - (value < -MARGIN * error)


def said(truth: bool, seen: str) -> Verdict:
    """A claim that is true or not."""
    return Verdict(REPEATS if truth else FAILS, seen)


def by_direction(sign: int, seen: str, *, why: str = "there is no difference of two standard errors") -> Verdict:
    """A claim of a difference, by its `direction`; `why` it is undecided where that is 0."""
    if sign == 0:
        return Verdict(UNDECIDED, seen, why)
    return said(sign > 0, seen)


def by_cases(holds: int, cases: int, seen: str) -> Verdict:
    """A claim about many cases."""
    if holds >= NEARLY_ALL * cases:
        return Verdict(REPEATS, seen)
    if holds <= HARDLY_ANY * cases:
        return Verdict(FAILS, seen)
    return Verdict(PARTLY, seen, f"in {holds} of {cases} cases")


def misses_rare(sequences: int) -> str:
    """Return why a small χ²_seq of so many sequences refutes nothing."""
    return f"{sequences} sequences do not hold the rare ones that make χ²_seq large"


def overall(found: Sequence[tuple[str, Verdict | None]]) -> Verdict:
    """One verdict from those of several sources: theirs if they agree; what cannot be tested does not count."""
    measured = [(source, verdict) for source, verdict in found if verdict is not None]
    if not measured:
        return Verdict(UNDECIDED, "", "its cells are not measured yet")
    judged = [(source, verdict) for source, verdict in measured if verdict.word != CANNOT] or measured
    words = {verdict.word for _, verdict in judged}
    if len(words) == 1:
        whys = dict.fromkeys(verdict.why for _, verdict in judged if verdict.why)
        return Verdict(judged[0][1].word, "", "; ".join(whys))
    parts = "; ".join(_brief(source, verdict) for source, verdict in judged)
    return Verdict(PARTLY if words & {REPEATS, PARTLY} else UNDECIDED, "", parts)


def _brief(source: str, verdict: Verdict) -> str:
    if verdict.word == PARTLY and verdict.why:
        return f"{source} in part ({verdict.why})"
    return f"{source} {verdict.word}"


def _laboratory_table(name: str) -> list[dict[str, Any]]:
    with (LABORATORY / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
