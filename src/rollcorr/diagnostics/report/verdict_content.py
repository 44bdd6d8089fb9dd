"""What a verdict says, once: the terminal, the page and JSON show the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.null.excess_place import place_in_words
from rollcorr.diagnostics.numbers import format_number, format_range, headlines
from rollcorr.diagnostics.resolver import Folded, standing

if TYPE_CHECKING:
    from rollcorr.diagnostics.health.health_check import HealthReport
    from rollcorr.diagnostics.log_check.log_totals import WhatIf

CONSEQUENCES = "from this follows"
"""What stands above the consequences of a finding."""
EXPECTED = "from noise alone"
"""The heading of the numbers that pure noise would show."""


class Number(NamedTuple):
    """A headline number.

    Attributes:
        name: of the metric.
        label: the metric in words.
        value: as text.
        expected: what noise alone would show, as text: a number or a range; empty where that is not known.
        alarming: whether a warning is about it.
    """

    name: str
    label: str
    value: str
    expected: str
    alarming: bool


@dataclass(frozen=True)
class ShownFinding:
    """A finding as it is shown.

    Attributes:
        finding: what it is about.
        numbers: the metric, its value, limit and expectation, and when it showed, in one line.
        lines: (heading, text) of what else is known, in order.
        consequences: what follows from it.
    """

    finding: Finding
    numbers: str
    lines: tuple[tuple[str, str], ...]
    consequences: tuple[ShownFinding, ...]


@dataclass(frozen=True, kw_only=True)
class VerdictContent:
    """A verdict as it is shown.

    Attributes:
        headline: the verdict, and how many findings made it.
        count: the number of findings and of their consequences; empty without any.
        opening: the verdict with its cause, the fix and the place, a line each; empty if healthy.
        sentences: what could not be judged, what the weights were compared with, and what noise is meant.
        numbers: the headline numbers.
        entries: causes with their consequences, warnings before notes.
    """

    headline: str
    count: str
    opening: tuple[str, ...]
    sentences: tuple[str, ...]
    numbers: tuple[Number, ...]
    entries: tuple[ShownFinding, ...]


def verdict_content(health: HealthReport) -> VerdictContent:
    """Put a verdict into words."""
    alarming = {finding.metric for finding in health.warnings}
    numbers = tuple(
        Number(name, label, format_number(health.values[name]), expected_text(name, health), name in alarming)
        for name, label in headlines(diffusion=health.diffusion).items()
        if name in health.values
    )
    count = _counted(health)
    return VerdictContent(
        headline=", ".join(filter(None, (health.verdict, count))),
        count=count,
        opening=tuple(_opening(health)),
        sentences=tuple(_describe_basis(health)),
        numbers=numbers,
        entries=tuple(_entry(cause, health) for cause in health.causes),
    )


@dataclass(frozen=True, kw_only=True)
class WhatIfContent:
    """What every preset would do to a log, as it is shown.

    Attributes:
        title: heading.
        headings: of the columns.
        rows: one for each preset, as texts in the order of `headings`; empty where nothing was measured.
        note: what the numbers mean, or why there are none.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def what_if_content(rows: Sequence[WhatIf]) -> WhatIfContent:
    """Put what each preset would do into words."""
    return WhatIfContent(
        title="what each preset would do to this log",
        headings=(
            "preset",
            "sequences rejected",
            "tokens rejected",
            "ESS",
            "gradient change",
            "k3 beyond random, nats",
        ),
        rows=tuple(_what_if_row(row) for row in rows),
        note="ESS: of all tokens, rejected ones with weight 0. Gradient change: relative, of the coefficients of the "
        "log-probs; it needs the column advantages. Beyond random: how much k3 per token is lower in what is left than "
        "after rejecting as many at random; a filter on k3 lowers it by construction."
        if rows
        else "nothing was measured: no valid token of a language model has log-probs of both policies",
    )


def _what_if_row(row: WhatIf) -> tuple[str, ...]:
    change, gain = "not recorded" if row.gradient_change is None else f"{row.gradient_change:.1%}", "–"
    if not row.effective_share:
        change = "nothing left"
    if row.gain is not None and row.gain_error is not None:
        gain = f"{format_number(row.gain)} ± {format_number(row.gain_error)}"
    shares = (f"{row.rejected_sequences:.1%}", f"{row.rejected_tokens:.1%}", f"{row.effective_share:.3f}")
    return (row.preset, *shares, change, gain)


def _counted(health: HealthReport) -> str:
    """Causes count; what follows from them does not count again."""
    found = sum(cause.finding.severity != "note" for cause in health.causes)
    more = len(health.warnings) - found
    if not found:
        return ""
    following = f" and {_count(more, 'consequence')}" if more > 0 else ""
    return f"{_count(found, 'finding')}{following}"


def _opening(health: HealthReport) -> Iterator[str]:
    """The verdict with its cause, the fix, and the place if it is known."""
    if health.warnings:
        first = next(iter((*standing(health.findings), *health.warnings)))
        yield f"{health.verdict}: {first.title}"
        yield f"fix: {first.fix or first.confirm or 'the evidence below shows what to look at'}"
        where = "; ".join(filter(None, (_concerned(first), _steps(first), first.place)))
        yield f"where: {where or 'everything that was measured'}"
    elif health.not_judged:
        # A sentence gives the reason first, and what to do last.
        reason, _, fix = health.not_judged[0].rpartition("; ")
        reason = (reason or fix).replace("weights not judged: ", "").removeprefix("not judged: ")
        yield f"{health.verdict}: {reason}"
        yield f"fix: {fix}"


def _describe_basis(health: HealthReport) -> Iterator[str]:
    for sentence in health.not_judged:
        yield sentence if "not judged" in sentence else f"not judged: {sentence}"
    if health.judged_against:
        yield f"the weights were compared with {health.judged_against}"
    if health.expected or health.expected_ranges:
        ranges = "; a range holds 95 % of batches of this size" if health.expected_ranges else ""
        yield f"{EXPECTED}: {health.expected_from}{ranges}"


def _entry(cause: Folded, health: HealthReport) -> ShownFinding:
    finding = cause.finding
    return ShownFinding(
        finding=finding,
        numbers=_numbers(finding, health),
        lines=tuple((heading, text) for heading, text in _lines(finding) if text),
        consequences=tuple(_entry(consequence, health) for consequence in cause.consequences),
    )


def _numbers(finding: Finding, health: HealthReport) -> str:
    value = "" if finding.value is None else format_number(finding.value)
    from_noise = expected_text(finding.metric or "", health)
    parts = (
        " ".join(filter(None, (finding.metric, value))),
        f"limit {finding.limit}" if finding.limit else "",
        f"{EXPECTED} {from_noise}" if from_noise else "",
    )
    return "; ".join(filter(None, (", ".join(filter(None, parts)), _steps(finding))))


def _steps(finding: Finding) -> str:
    return f"first at step {finding.first_step}, {_count(finding.steps, 'step')} in all" if finding.steps else ""


def _lines(finding: Finding) -> tuple[tuple[str, str], ...]:
    evidence = [f"{name.replace('_', ' ')} {format_number(value)}" for name, value in finding.evidence.items()]
    return (
        ("first in", finding.place),
        ("concerns", _concerned(finding)),
        ("evidence", ", ".join(evidence)),
        ("confidence", "" if finding.confidence is None else f"{finding.confidence:.3f}"),
        ("why", finding.reason),
        ("confirm", finding.confirm),
        ("fix", finding.fix),
    )


def _concerned(finding: Finding) -> str:
    counts = [
        place_in_words(finding.where),
        "" if finding.rows is None else _count(finding.rows, "row"),
        "" if finding.tokens is None else _count(finding.tokens, "token"),
        "" if finding.row_share is None else f"{finding.row_share:.1%} of the rows",
    ]
    return ", ".join(filter(None, counts))


def expected_text(name: str, health: HealthReport) -> str:
    """What noise alone gives for a metric: a number, a range for one of either sign, or nothing where it is unknown."""
    if name in health.expected_ranges:
        return format_range(*health.expected_ranges[name])
    return format_number(health.expected[name]) if name in health.expected else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
