"""docs/guides/calibration.md: how thresholds are calibrated, and the table of what noise does to customary ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rollcorr.diagnostics.advice.noise_table import NOISE_LENGTHS, SIGMAS, noise_table
from rollcorr.diagnostics.advice.spliced_rows import FEWEST
from rollcorr.diagnostics.report.advice_text import share_text

Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]
Limit = tuple[str, str]
"""The setting with its threshold, and what the shares are of."""


def calibration_page(generated: str, table: Table) -> str:
    """The page, as Markdown."""
    by_length = [_shares(place) for place in range(len(NOISE_LENGTHS))]
    first = by_length[0]

    # What no length changes stands once, and what noise never reaches is only named.
    same = {limit for limit in first if all(shares[limit] == first[limit] for shares in by_length)}
    never = {limit for limit in same if set(first[limit]) == {"0"}}
    above = {limit for limit in never if limit[1] == "weights above the band"}  # their lower end is not in the table
    sections = [f"### Same at every T\n\n{_table_of(first, same - never, table)}"]
    for length, shares in zip(NOISE_LENGTHS, by_length, strict=True):
        sections.append(f"### T = {length:,}\n\n{_table_of(shares, set(first) - same, table)}")

    frame = Path(__file__).with_name("calibration_frame.md").read_text(encoding="utf-8")
    return frame.format(
        generated=generated,
        sections="\n\n".join(sections),
        never=_in_words([f"`{limit[0]}`" for limit in first if limit in never - above]),
        above=", ".join(f"`{limit[0]}`" for limit in first if limit in above),
        fewest=FEWEST,
    )


def _shares(place: int) -> dict[Limit, list[str]]:
    """Each limit at one length → its shares, by σ."""
    shares: dict[Limit, list[str]] = {}
    for row in noise_table():
        shares.setdefault((row.limit, row.shows), []).append(share_text(row.shares[place]))
    return shares


def _table_of(shares: Mapping[Limit, Sequence[str]], limits: set[Limit], table: Table) -> str:
    """A row for each of these limits, a column for each σ."""
    header = ("limit", "share", *(f"σ = {sigma:g}" for sigma in SIGMAS))
    rows = [(f"`{limit[0]}`", limit[1], *cells) for limit, cells in shares.items() if limit in limits]
    return table(header, rows)


def _in_words(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}"
