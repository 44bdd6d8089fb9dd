"""docs/reference/findings.md: every finding of `rollcorr check`, `report` and Monitor, from the table of faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollcorr.diagnostics.fault_row import Fault
from rollcorr.diagnostics.faults import FAULTS

Table = Callable[[Sequence[str], Sequence[Sequence[object]]], str]

KINDS = {
    "data": "Values that are not the log-probs of their tokens",
    "settings": "Different sampling settings or contexts on the two sides",
    "weights": "Different weights",
    "noise": "Noise of precision, kernels or random layers",
    "course": "Changes over the steps",
    "symptom": "Symptoms",
    "no finding": "Notes",
}
NEEDS = {
    "record": "a rollout log",
    "pairs": "log-probs of both sides",
    "null": "a null",
    "routing": "routed experts",
    "steps": "several steps",
    "metrics": "metrics of steps",
}


def findings_page(generated: str, table: Table) -> str:
    """A table per kind of finding."""
    blocks = []
    for kind, heading in KINDS.items():
        rows = [_row(fault) for fault in FAULTS.values() if fault.kind == kind and fault.title]
        if rows:
            blocks.append(f"## {heading}\n\n{table(['code', 'finding', 'needs', 'fix', 'confirmation'], rows)}")
    tables = "\n\n".join(blocks)
    return f"""# Findings

{generated}

This page lists the findings of `rollcorr check`, `report`, `watch` and a Monitor. `--json` and Python return their
codes in `hypotheses` and `findings`. The first four tables contain causes: a verdict names the most likely cause that
no test refutes. The tables "Symptoms" and "Changes over the steps" list consequences, which are reported alone if no
cause is known. The column "needs" names the required evidence. [Health](../guides/health.md) explains verdicts;
[the null](../guides/null.md) explains findings that need one.

{tables}
"""


def _row(fault: Fault) -> list[object]:
    cells = [fault.title, NEEDS[fault.needs], fault.fix, fault.confirm]
    return [f"`{fault.code}`", *(cell.replace("|", "\\|").strip() or None for cell in cells)]
