"""Render a verdict in a notebook: the terminal's text as HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from rollcorr.diagnostics.report.verdict_content import EXPECTED, verdict_content

if TYPE_CHECKING:
    from rollcorr.diagnostics.health.health_check import HealthReport
    from rollcorr.diagnostics.log_check.log_totals import HeavyToken

COLORS = {"healthy": "#15803d", "unhealthy": "#c02626", "not judged": "#5b6470"}


def verdict_html(health: HealthReport, worst_tokens: Sequence[HeavyToken] = ()) -> str:
    """Return the verdict with its cause, the fix and the place, then the headline numbers.

    Args:
        health: the verdict.
        worst_tokens: the few tokens that carry most of k3.
    """
    content = verdict_content(health)
    first, *others = content.opening or (content.headline,)
    lines = [f'<b style="color: {COLORS[health.verdict]}">{escape(first)}</b>', *map(escape, others)]
    lines += [
        f"token {token.token_id} in row {token.row}, position {token.position}: {token.share:.0%} of k3"
        for token in worst_tokens
    ]

    rows = [("", "measured", EXPECTED), *((number.label, number.value, number.expected) for number in content.numbers)]
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<div>{'<br>'.join(lines)}</div><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
