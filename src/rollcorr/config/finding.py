"""What is wrong, why, and how to fix it: the one type in which every check of the library answers.

The comparison of sampling settings, the validation of rollout logs, the health check, the check of logs and the
estimate of provenance all return `Finding`s. The comparison is the lowest of them and lives in this room. Imports point
down only, so the type lives here too, without torch. `rollcorr.diagnostics` exports it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth knowing. A field that does not apply, or that nobody knows, is None or empty.

    Attributes:
        code: stable identifier of the kind of finding, for programs ("length", "out_of_range", "tempered", …).
        title: what is wrong, in a few words.
        value: the number that shows it.
        limit: what the number should have been, in words.
        reason: why it matters, or what it means.
        fix: what to change; empty when nothing is wrong.
        severity: an error means that the input cannot be trusted, a warning makes the verdict, a note does not.
        metric: bare name of the metric that shows it.
        first_step: first training step that showed it.
        steps: how many training steps showed it.
        file: the file, as it was given.
        column: the column of the rollout log.
        first_row: first row that shows it, counted from 0 within the file.
        rows: how many rows show it.
        tokens: how many tokens show it.
        confidence: z² / (1 + z²), with z the evidence in standard errors. By Cantelli's inequality, chance alone
            produces this evidence with probability 1 − confidence at most. Tokens count as independent.
        evidence: further numbers behind it, by name.
        confirm: what would confirm it, or rule it out.
        row_share: share of the rows that show it; of a mixture of causes, the share of this one.
        follows_from: the code of the finding that causes this one. A consequence is shown under its cause.
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
    follows_from: str | None = None

    @property
    def place(self) -> str:
        """The file, the first row and the column, as far as they are known."""
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
    """An answer that consists of findings, sorted by severity."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which the input cannot be trusted."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that make the verdict."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are only worth knowing."""
        return self._of("note")

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)


def merge_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding for each code and column: the first one, with the rows and tokens of all of them."""
    merged: dict[tuple[str, str | None], Finding] = {}
    for finding in findings:
        key = finding.code, finding.column
        first = merged.get(key)
        if first is not None:
            finding = replace(first, rows=_sum(first.rows, finding.rows), tokens=_sum(first.tokens, finding.tokens))
        merged[key] = finding
    return tuple(merged.values())


def _sum(one: int | None, other: int | None) -> int | None:
    """A sum is known only when both of its parts are."""
    return None if one is None or other is None else one + other
