"""Rank the causes from all checks of a log or a run in one list.

Choose the most direct cause that no test refuted, attribute to it the findings that it explains, and repeat:

1. A cause that a test refutes is ruled out, or attributed to the finding that explains it instead.
2. The cause with the highest score explains each finding with a lower score, if it concerns most of the rows.
3. The next cause explains the remaining findings, until there are no more causes. Then the course over the steps
   explains the symptoms.

A symptom explains no cause, so an additional symptom never changes the first cause. `faults` declares kinds, scores and
tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.fault_row import Case, Fault
from rollcorr.diagnostics.faults import fault, is_cause, measures, refutation
from rollcorr.diagnostics.health.evidence import Evidence

WEAK = 0.5
"""Default confidence of a cause."""
MOST_ROWS = 0.5
"""Share of rows from which a cause explains metrics of the entire log."""
CONFIDENCE = ((0.0, 0.67), (0.8, 0.88), (0.93, 0.97), (0.99, 0.97))
"""(Smallest score, confidence): the share of fault logs with this score whose first cause was right. Printed by
experiments/judge/calibrate.py."""


@dataclass(frozen=True)
class Folded:
    """A finding with its consequences."""

    finding: Finding
    consequences: tuple[Folded, ...] = ()


@dataclass
class _Entry:
    """Working state of a finding in the resolver.

    Attributes:
        finding: the finding, updated by each step.
        row: its row of the table of faults.
        by_null: True if it comes from the comparison with a null.
        doubted: True if a test refuted it.
    """

    finding: Finding
    row: Fault
    by_null: bool = False
    doubted: bool = False

    @property
    def score(self) -> float:
        """Return how direct the evidence is. Causes of pairs score 1 from a null, which shows only their positions."""
        return 1.0 if self.by_null and self.row.needs == "pairs" else self.row.score

    @property
    def wide(self) -> bool:
        """Return whether the finding concerns most of the rows."""
        if self.row.part == "nothing":
            return False
        known = self.finding.row_share
        return self.row.part != "filled" if known is None else known >= MOST_ROWS

    @property
    def stands(self) -> bool:
        """Return whether the finding is a warning without an explanation so far."""
        return self.finding.severity != "note" and self.finding.follows_from is None and not self.doubted


def resolve_findings(
    *,
    pairs: Sequence[Finding] = (),
    null: Sequence[Finding] = (),
    steps: Sequence[Finding] = (),
    metrics: Sequence[Finding] = (),
    evidence: Evidence | None = None,
) -> tuple[Finding, ...]:
    """Rank findings: causes first, then consequences with their cause in `follows_from`, notes last.

    Args:
        pairs: findings from the log's record and from pairs of log-probs.
        null: findings from the comparison with a null.
        steps: findings from weight versions and from series of steps.
        metrics: findings from the metrics of a run or a log.
        evidence: series of steps, which refutes causes; default: no series.

    Returns:
        Each finding once; a symptom once for each metric. A finding that already has a cause keeps it.

    Raises:
        LookupError: a code is not declared.
    """
    entries = _distinct(pairs, null, (*steps, *metrics))
    for entry in entries:
        if is_cause(entry.finding) or entry.row.kind == "course":
            _refute(entry, entries, null, evidence)

    # Attribute a finding to the first present finding that its row declares.
    for entry in entries:
        present = [other.finding.code for other in entries if other.finding.severity != "note" and not other.doubted]
        declared = [code for code in entry.row.explained_by if code in present]
        if declared and entry.stands:
            entry.finding = replace(entry.finding, follows_from=declared[0])

    # A cause of few rows explains the entire mismatch only if the remaining rows are ordinary.
    ordinary = [entry.finding for entry in entries if entry.finding.code == "ordinary_noise"]
    causes = sorted(
        (e for e in entries if e.stands and is_cause(e.finding)), key=lambda e: (not e.wide, -e.score, *_rank(e))
    )
    courses = sorted((e for e in entries if e.stands and e.row.kind == "course"), key=lambda e: -e.score)
    for cause in (*causes, *courses):
        if cause.stands:
            _remove(cause, entries, everything=cause.wide or (bool(ordinary) and cause.row.part != "nothing"))

    # A declared precision explains a mismatch that is as large as in its null.
    sizes = [e for e in entries if e.stands and e.row.kind in ("symptom", "no finding") and e.row.needs != "steps"]
    for entry in sizes if any(finding.evidence.get("declared") for finding in ordinary) else []:
        if entry.finding.metric not in entry.row.apart:
            entry.finding = replace(entry.finding, severity="note", follows_from="ordinary_noise")
    return tuple(_calibrated(entry.finding) for entry in sorted(entries, key=_rank))


def _calibrated(finding: Finding) -> Finding:
    """Return a cause with its calibrated confidence, and with its score among the evidence."""
    score = finding.confidence
    if score is None or not is_cause(finding) or "score" in finding.evidence:
        return finding
    confidence = [share for least, share in CONFIDENCE if score >= least][-1]
    return replace(finding, confidence=confidence, evidence={**finding.evidence, "score": score})


def standing(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the causes, and the courses without a cause, from a ranked list."""
    return tuple(
        finding
        for finding in findings
        if finding.follows_from is None
        and (is_cause(finding) or (finding.severity != "note" and fault(finding.code).kind == "course"))
    )


def _distinct(pairs: Sequence[Finding], null: Sequence[Finding], others: Sequence[Finding]) -> list[_Entry]:
    """Return one entry for each code, or for each code and metric of a symptom.

    If one source shows a cause in a few rows and a second source in most rows, keep the second: the fault concerns the
    log.
    """
    entries: dict[object, _Entry] = {}
    for number, finding in enumerate((*pairs, *null, *others)):
        row = fault(finding.code)
        entry = _Entry(finding, row, by_null=len(pairs) <= number < len(pairs) + len(null))
        key = (row.code, finding.metric) if row.kind == "symptom" else row.code
        known = entries.setdefault(key, entry)
        if is_cause(finding) and entry.wide and not known.wide:
            entries[key] = entry
    return list(entries.values())


def _refute(entry: _Entry, entries: Sequence[_Entry], null: Sequence[Finding], evidence: Evidence | None) -> None:
    """Rule a cause out, or attribute it to the finding that explains it instead."""
    refuted = refutation(entry.row.code, Case(entry.finding, evidence, null, entry.by_null))
    if refuted is None or (refuted.instead and all(e.finding.code != refuted.instead for e in entries)):
        return
    entry.doubted = True
    if refuted.instead:
        entry.finding = replace(entry.finding, follows_from=refuted.instead)
        return
    title, reason = f"ruled out: {entry.finding.title}", f"{refuted.reason}; {entry.finding.reason}"
    entry.finding = replace(entry.finding, title=title, reason=reason, fix="", severity="note")


def _remove(cause: _Entry, entries: Sequence[_Entry], *, everything: bool) -> None:
    """Remove the part that a cause concerns: attribute each finding that it explains to it."""
    code, onset = cause.finding.code, None
    for other in entries:
        if other is cause or other.finding.follows_from is not None:
            continue
        unknown = other.row.kind == "no finding" and other.finding.severity != "note"
        lower = is_cause(other.finding) and other.row.part != "nothing" and other.score < cause.score
        if everything and (unknown or lower or measures(other.finding)):
            other.finding = replace(other.finding, follows_from=code)
            if other.row.needs == "steps" and other.finding.severity != "note":
                onset = onset or other.finding

    # A cause in the weights inherits the onset of the course that it explains.
    if onset is not None and cause.by_null and cause.row.kind == "weights" and cause.finding.first_step is None:
        cause.finding = replace(cause.finding, first_step=onset.first_step, steps=onset.steps)


def _rank(entry: _Entry) -> tuple[bool, bool, bool, float, float]:
    """Return the sort key: causes, then consequences, then the unexplained, then notes; the most certain first."""
    finding = entry.finding
    share = float(entry.wide or entry.row.part == "nothing") if finding.row_share is None else finding.row_share
    return (
        finding.severity == "note",
        finding.follows_from is not None,
        entry.row.kind == "no finding",
        -share,
        -(WEAK if finding.confidence is None else finding.evidence.get("score", finding.confidence)),
    )


def folded(findings: Sequence[Finding]) -> tuple[Folded, ...]:
    """Nest consequences under their causes, recursively: warnings before notes, else in the given order.

    A consequence whose cause is missing becomes a root, and so does a finding in a cycle.
    """
    ordered = sorted(findings, key=lambda finding: finding.severity == "note")
    by_code = {finding.code: finding for finding in reversed(ordered)}
    below: dict[int, list[Finding]] = {}
    for finding in ordered:
        cause = by_code.get(finding.follows_from or "")

        # A warning is not hidden under a note.
        hidden = cause is not None and cause.severity == "note" and finding.severity != "note"
        stands = cause is None or hidden or _in_circle(finding, cause, by_code)
        below.setdefault(0 if stands else id(cause), []).append(finding)

    def fold(key: int) -> tuple[Folded, ...]:
        return tuple(Folded(finding, fold(id(finding))) for finding in below.get(key, ()))

    return fold(0)


def unfolded(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings in order, with each consequence below its cause."""

    def flat(one: Folded) -> list[Finding]:
        return [one.finding, *(finding for below in one.consequences for finding in flat(below))]

    return tuple(finding for root in folded(findings) for finding in flat(root))


def _in_circle(finding: Finding, cause: Finding | None, by_code: Mapping[str, Finding]) -> bool:
    """Return whether the chain of causes leads back to the finding: then neither explains the other."""
    seen = {finding.code}
    while cause is not None and cause.code not in seen:
        seen.add(cause.code)
        cause = by_code.get(cause.follows_from or "")
    return cause is not None
