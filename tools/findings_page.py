"""docs/reference/findings.md: every finding of `rollcorr check`, `report` and Monitor, from the table of faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollcorr.diagnostics.fault_row import Fault
from rollcorr.diagnostics.faults import FAULTS

Table = Callable[[Sequence[str], Sequence[Sequence[object]]], str]

KINDS = {
    "data": "Values that are not the log-probs of their tokens",
    "settings": "Other sampling settings, or another context, on one side",
    "weights": "Other weights",
    "noise": "Noise of precision, kernels or random layers",
    "course": "Changes over the steps",
    "symptom": "Symptoms",
    "no finding": "Notes",
}
NEEDS = {
    "record": "recorded settings",
    "pairs": "both log-probs",
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
            blocks.append(f"## {heading}\n\n{table(['code', 'finding', 'needs', 'fix', 'to confirm it'], rows)}")
    tables = "\n\n".join(blocks)
    return f"""# Findings

{generated}

For everyone who reads a verdict: the codes that `rollcorr check`, `report`, `watch` and a Monitor print, and that
`--json` and Python list in `hypotheses` and `findings`. The first four tables have causes: a verdict names the most
likely one that no test refuted. A symptom or a change over the steps follows from a cause, or stands for itself if
none is known. [Health](../guides/health.md) explains the verdict, [the null](../guides/null.md) what needs one.

{tables}
"""


def _row(fault: Fault) -> list[object]:
    cells = [fault.title, NEEDS[fault.needs], fault.fix, fault.confirm]
    return [f"`{fault.code}`", *(cell.replace("|", "\\|").strip() or None for cell in cells)]
