"""Every claim of the document on one page, whichever study judges it.

`measured.py --page` and `trained.py --page` write it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import measured_claims
import trained_page
from measured_rows import read_table

HERE = Path(__file__).resolve().parent
PAGE = HERE / "claims.md"

HEAD = """# Each claim of the document

<!-- Written by `measured.py --page` and by `trained.py --page`. Edit measured_claims.py or trained_page.py. -->

The document is Qi Fang and Daanish Khazi,
[Mismatch Praxis: Rollout Settings and IS Corrections](https://www.llmdata.com/blog/mismatch-praxis/), 2025. Each claim
has a verdict, and the page that it comes from: [measured](measured.md) on fixed rollouts of real engines,
[trained](trained.md) in short trainings, or computed in [the laboratory](../../docs/laboratory.md#the-published-orders)
and by arithmetic. The policies here are small ([how it is measured](measured.md#how-it-is-measured)), so "repeats" is
about the direction and the mechanism; numbers stand beside it.

| section | claim | verdict | from | what was seen here |
| --- | --- | --- | --- | --- |
"""


class Line(NamedTuple):
    """One row of the page."""

    section: str
    claim: str
    verdict: str
    source: str
    seen: str


def claims_text() -> str:
    """The page, from the committed tables and cells."""
    grid, temperature = (read_table(HERE / "measured" / f"{name}.csv") for name in ("grid", "temperature"))
    cells = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((HERE / "trained" / "cells").glob("*.json"))
    ]
    lines = [*_measured_lines(grid, temperature), *_trained_lines(cells)]
    lines.sort(key=lambda line: line.section.partition(",")[0])  # a stable sort: the order of the document's own text
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_claims_page() -> Path:
    """Write claims.md; its path."""
    PAGE.write_text(claims_text(), encoding="utf-8")
    return PAGE


def _measured_lines(grid: measured_claims.Rows, temperature: measured_claims.Rows) -> Iterator[Line]:
    for claim in measured_claims.CLAIMS:
        verdict, seen = claim.judge(grid, temperature) or ("not measured yet", "–")
        yield Line(claim.section, claim.text, verdict, claim.source, seen)


def _trained_lines(cells: list[dict[str, Any]]) -> Iterator[Line]:
    for claim in trained_page.CLAIMS:
        verdict = claim.judge(cells) or trained_page.UNJUDGED
        yield Line(claim.section, claim.text, verdict.word, "trained", verdict.evidence)
