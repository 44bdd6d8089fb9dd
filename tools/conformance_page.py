"""docs/reference/conformance.md: the fifteen properties, and the recorded grades of other frameworks."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollcorr.conformance import PROPERTIES

Table = Callable[..., str]
RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "conformance" / "results.json"
MARKS = {"pass": "pass", "fail": "**fail**", "not applicable": "–", "error": "error"}


def conformance_page(generated: str, table: Table) -> str:
    """Return the page with the grades of the last `make conformance`."""
    rows = [(wanted.number, wanted.title, wanted.statement) for wanted in PROPERTIES]
    return f"""# Properties of a correction

{generated}

Fifteen properties of a correct rollout correction, and the frameworks whose functions have them.

d = log π − log μ of a token, in nats; w is the weight.

{table(("", "property", "requirement"), rows)}

{_grades(json.loads(RESULTS.read_text(encoding="utf-8")), table)}
Where to go next: [your own function](../guides/conformance.md), [known failures](../contributing/known_failures.md).
"""


def _grades(peers: list[dict[str, Any]], table: Table) -> str:
    header = ("", *(f"{peer['framework']} {peer['version']}" for peer in peers))
    rows = []
    for wanted in PROPERTIES:
        verdicts = [peer["grades"][wanted.number - 1]["verdict"] for peer in peers]
        rows.append((f"{wanted.number} {wanted.title}", *(MARKS[verdict] for verdict in verdicts)))
    return f"""## Other frameworks

`make conformance` installs released versions from PyPI, without dependencies; `SOURCES=DIR` reads the others from
checkouts in DIR. Each function below runs unchanged: it is extracted from its file together with its helpers
(experiments/conformance/peers.py). "–": not applicable, because there is no such option or output.

{table(header, rows)}

{"".join(_peer(peer) for peer in peers)}"""


def _peer(peer: dict[str, Any]) -> str:
    """Return what was run, and the smallest counterexample of each failure."""
    failed = [grade["text"] for grade in peer["grades"] if grade["verdict"] in ("fail", "error")]
    counterexamples = "```text\n" + "\n".join(failed) + "\n```\n\n" if failed else ""
    return f"""### {peer["framework"]} {peer["version"]}

[`{peer["function"]}`]({peer["link"]}), file sha256 `{peer["sha256"][:16]}…`. {peer["how"]} Call checked
against: {peer["origin"]}.

```python no-run
{textwrap.dedent(peer["call"]).rstrip()}
```

{counterexamples}"""
