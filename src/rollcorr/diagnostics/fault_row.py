"""A row of the table of faults: all that is declared about one code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.refuting_tests import RefutingTest

Kind = Literal["data", "settings", "weights", "noise", "symptom", "course", "no finding"]
Evidence = Literal["record", "pairs", "null", "routing", "steps", "metrics"]
Part = Literal["log", "rows", "positions", "filled", "nothing"]

CAUSES: frozenset[Kind] = frozenset({"data", "settings", "weights", "noise"})
"""Kinds that name a cause. A symptom measures the mismatch, and a course tells when or by how much it changed."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table.

    Attributes:
        code: of its findings.
        kind: the kind of fault.
        needs: evidence that shows it: the log's own record, pairs of log-probs, a null, the routing, a series of steps,
            or the metrics of one batch.
        part: what it concerns and a resolver removes: the log, the rows that it counts, positions of the responses,
            values that were filled in, or nothing of the mismatch.
        score: how direct its evidence is. A cause explains what has a lower score.
        refuted_by: tests, each of which may refute it.
        explained_by: codes that explain it before any cause does; the first one that is present.
        apart: metrics whose findings stand for themselves.
        title: the problem.
        reason: its meaning.
        fix: the change to make.
        confirm: the experiment that confirms it or rules it out.
        number: the name of the number that shows it, for a pair of log-probs.
        limit: what that number should be.
    """

    code: str
    kind: Kind
    needs: Evidence
    part: Part = "log"
    score: float = 0.0
    refuted_by: tuple[RefutingTest, ...] = ()
    explained_by: tuple[str, ...] = ()
    apart: frozenset[str] = frozenset()
    title: str = ""
    reason: str = ""
    fix: str = ""
    confirm: str = ""
    number: str = ""
    limit: str = ""

    @property
    def finding(self) -> Finding:
        """A finding in the words of the row, to be completed with `dataclasses.replace`."""
        metric = f"log/{self.number}" if self.number else None
        nothing_wrong = self.kind == "no finding" and not self.fix
        return Finding(
            code=self.code,
            title=self.title,
            limit=self.limit,
            reason=self.reason,
            fix=self.fix,
            confirm=self.confirm,
            metric=metric,
            severity="note" if nothing_wrong else "warning",
        )
