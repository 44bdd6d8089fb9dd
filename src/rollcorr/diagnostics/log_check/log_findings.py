"""What a log says of itself: findings and remarks of its validation, its recorded settings and its log-probs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from rollcorr.config import Finding
from rollcorr.diagnostics.faults import FAULTS, fault
from rollcorr.diagnostics.log_check.log_tally import LogTally
from rollcorr.diagnostics.log_check.tally import Tally
from rollcorr.diagnostics.null.origin import Origin
from rollcorr.diagnostics.provenance.provenance_findings import Provenance


def log_remarks(read: LogTally, *, diffusion: bool) -> Iterator[str]:
    """What the reader should know about the input, a line each."""
    yield f"π is the column {read.train_column}, μ is rollout_log_prob"
    if read.denoising:
        yield "log-probs are of denoising steps; weights and bounds are of the joint likelihood ratio, over all D"
    for finding in read.tally.findings:
        if finding.code not in FAULTS:
            yield _remark(finding, diffusion)
    if read.tally.interrupted:
        yield f"interrupted: this covers {read.tally.rows} of {read.total} rows only"
    yield from (f"left out: {problem}" for problem in read.unreadable)


def log_findings(tally: Tally, provenance: Provenance, *, diffusion: bool, kept: bool) -> list[Finding]:
    """Return what the log's validation, its recorded settings and the log-probs themselves add to the verdict.

    Codes of the validation without a row in the table of faults are about the file, and become remarks.
    """
    found = [_judged(finding, tally.rows) for finding in tally.findings if finding.code in FAULTS]

    # Densities may exceed 1 or be 0, and follow no rule of token probabilities.
    if diffusion:
        row = fault("sentinel")
        return [
            replace(finding, reason=row.reason, fix=row.fix, limit="0 pictures", tokens=None)
            for finding in found
            if finding.code == "sentinel"
        ]
    found += tally.claims.values()
    return found + [_implied(finding, kept=kept) for finding in provenance.warnings if fault(finding.code).number]


def partial_sentence(read: LogTally) -> tuple[str, ...]:
    """The sentence that a verdict on part of a log needs."""
    if not read.unreadable:
        return ()
    some = "1 file" if len(read.unreadable) == 1 else f"{len(read.unreadable)} files"
    return (f"this is the verdict on part of the log: {some} could not be read to the end",)


def mixed_settings(origin: Origin) -> list[Finding]:
    """Several settings, engines or models in one log: what holds for all rows together may not hold for each."""
    mixed = {}
    settings = [json.loads(text) for text in origin.sampling]
    for name in dict.fromkeys(name for one in settings for name in one):
        values = dict.fromkeys(str(one.get(name, "not recorded")) for one in settings)
        if len(values) > 1:
            mixed[name.replace("_", " ")] = tuple(values)
    for name in ("engine", "engine_version", "model"):
        if len(getattr(origin, name)) > 1:
            mixed[name.replace("_", " ")] = getattr(origin, name)
    if not mixed:
        return []
    return [
        replace(
            fault("mixed_settings").finding,
            metric="log/sampling",
            reason="; ".join(f"{name}: {', '.join(values)}" for name, values in mixed.items()),
            severity="note",
        )
    ]


def _remark(finding: Finding, diffusion: bool) -> str:
    """A finding of the log's validation in a line; of denoising steps without what it says of tokens."""
    if not diffusion:
        return str(finding)
    rows = finding.rows or 0
    return f"{finding.title}" + (f", in {rows:,} picture{'s' * (rows != 1)}" if rows else "")


def _judged(finding: Finding, rows: int) -> Finding:
    """A finding of the log's validation, as one that makes the verdict."""
    # Logits in place of log-probs explain a mismatch of all rows; one value above 0 explains its own row.
    share = (finding.rows or 0) / rows if fault(finding.code).part == "rows" else finding.row_share
    return replace(
        finding,
        row_share=share,
        metric=f"log/{finding.column}",
        value=float(finding.rows or 0),
        limit="0 sequences",
        severity="warning",
    )


def _implied(finding: Finding, *, kept: bool) -> Finding:
    """A finding of provenance, with what this log has for its fix."""
    if kept and finding.code == "truncated":
        return replace(finding, fix=f"{finding.fix}; this log has the sets, in kept_ids and kept_offsets")
    return finding
