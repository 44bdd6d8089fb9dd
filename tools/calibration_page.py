"""docs/guides/calibration.md: how thresholds are calibrated, and the table of what noise does to customary ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rollcorr.diagnostics.advice.noise_table import NOISE_LENGTHS, SIGMAS, NoiseRow, noise_table
from rollcorr.diagnostics.advice.situations import FEW_TIMES, SEQUENCE_WEIGHTS_UNTIL, SITUATIONS
from rollcorr.diagnostics.advice.spliced_rows import FEWEST
from rollcorr.diagnostics.report.advice_text import share_text

Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]


def calibration_page(generated: str, table: Table) -> str:
    """The page, as Markdown."""
    rows = noise_table()
    sections = "\n\n".join(
        f"### T = {length:,}\n\n{_table_at(rows, place, table)}" for place, length in enumerate(NOISE_LENGTHS)
    )
    situations = table(
        ("mismatch", "signs", f"T × KL below {SEQUENCE_WEIGHTS_UNTIL:g}", "beyond"),
        [(one.name, one.signs, f"`{one.short}`", f"`{one.long}`") for one in SITUATIONS],
    )
    frame = Path(__file__).with_name("calibration_frame.md").read_text(encoding="utf-8")
    return frame.format(
        generated=generated, sections=sections, situations=situations, few_times=FEW_TIMES, fewest=FEWEST
    )


def _table_at(rows: Sequence[NoiseRow], place: int, table: Table) -> str:
    """The table of one length: a row for each limit, a column for each σ."""
    shares: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        shares.setdefault((row.limit, row.shows), []).append(share_text(row.shares[place]))
    header = ("limit", "share", *(f"σ = {sigma:g}" for sigma in SIGMAS))
    return table(header, [(f"`{limit}`", shows, *cells) for (limit, shows), cells in shares.items()])
