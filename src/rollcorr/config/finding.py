"""Result type of every check in the library: the problem, its reason and the fix.

The comparison of sampling settings, the validation of rollout logs, the health check, the check of logs and the
estimate of provenance all return `Finding`s. The comparison is in this package, below all the other checks, and imports
only point down. So the type is also in this package, without torch. `rollcorr.diagnostics` exports it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem or note that a check found. A field that is unknown or does not apply is None or empty.

    Attributes:
        code: stable identifier of the kind of finding, for programs ("length", "out_of_range", "tempered", …).
        title: the problem in a few words.
        value: the number that shows it.
        limit: the limit for that number, in words.
        reason: why it matters, or its meaning.
        fix: the change to make; empty if there is no problem.
        severity: an error means that the input cannot be trusted; a warning affects the verdict; a note does not.
        metric: name of the metric that shows it, without prefix.
        first_step: first training step that showed it.
        steps: number of training steps that showed it.
        file: path of the file, as given.
        column: the column of the rollout log.
        first_row: first row that shows it, counted from 0 within the file.
        rows: number of rows that show it.
        tokens: number of tokens that show it.
        confidence: of a cause, the share of fault logs with this score whose first cause was right; see
            experiments/judge. The score is `evidence["score"]`. Of other findings, and before the causes are ranked, it
            is the score itself: z² / (1 + z²), with z the evidence in standard errors; tokens count as independent.
        evidence: further numbers behind it, by name.
        confirm: a measurement that would confirm it or rule it out.
        row_share: share of the rows that show it; of a mixture of causes, the share of this one.
        where: what carries it, by axis ("rows", "ids": lists; "positions", "from_end", …: [first, last] of stretches).
        follows_from: the code of the finding that causes this one. Reports show a consequence under its cause.
    """

    code: str
    title: str
    value: float | None = None
    limit: str = ""
    reason: str = ""
    fix: str = ""
    severity: Severity = "warning"
    metric: str | None = None
    first_step: int | None = None
    steps: int | None = None
    file: str | None = None
    column: str | None = None
    first_row: int | None = None
    rows: int | None = None
    tokens: int | None = None
    confidence: float | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)
    confirm: str = ""
    row_share: float | None = None
    where: Mapping[str, list[int] | list[list[int]]] = field(default_factory=dict)
    follows_from: str | None = None

    @property
    def place(self) -> str:
        """The file, the first row and the column, if known."""
        parts = (
            self.file,
            None if self.first_row is None else f"row {self.first_row}",
            None if self.column is None else f"column {self.column}",
        )
        return ", ".join(part for part in parts if part)

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        other_rows = (self.rows or 1) - 1
        more = f" (and {other_rows} more row{'s' * (other_rows > 1)})" if other_rows else ""
        return "; ".join(part for part in (f"{place}{self.title}{more}", self.reason, self.fix) if part)


class HasFindings:
    """Mixin for a result that contains findings, sorted by severity."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that make the input untrustworthy."""
        return self._with_severity("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that affect the verdict."""
        return self._with_severity("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings that do not affect the verdict."""
        return self._with_severity("note")

    def _with_severity(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)


def merge_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings by code and column: keep the first, with the rows and tokens of the entire group."""
    merged: dict[tuple[str, str | None], Finding] = {}
    for finding in findings:
        key = finding.code, finding.column
        first = merged.get(key)
        if first is not None:
            finding = replace(
                first, rows=_sum_or_none(first.rows, finding.rows), tokens=_sum_or_none(first.tokens, finding.tokens)
            )
        merged[key] = finding
    return tuple(merged.values())


def _sum_or_none(one: int | None, other: int | None) -> int | None:
    """Compute the sum; None if either part is None."""
    return None if one is None or other is None else one + other
