"""docs/coming_from/other_frameworks.md: the lines that put a correction into six more frameworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "conformance" / "lines.json"


def lines_page(generated: str) -> str:
    """Return the page with the lines of experiments/conformance/lines.py and the commits that ran them."""
    entries = json.loads(RESULTS.read_text(encoding="utf-8"))
    names = [entry["framework"] for entry in entries]
    return f"""# With {", ".join(names[:-1])} or {names[-1]}

{generated}

Add the correction to {len(names)} frameworks; Unsloth uses the adapter for TRL.

The code below ran once in each framework, at the commit in the heading. `experiments/conformance/lines.py`
inserts the lines into the framework's file, runs the framework's function on a batch with known weights and rejected
tokens, and compares the results. No training has run in these {len(names)}, because their trainers need GPUs or a
sampling server. In other versions, the place may differ. You can replace the preset by any
[decoupled preset with weights](../guides/choosing.md) (prime-rl: bypass).

{"".join(_entry(entry) for entry in entries)}## Unsloth

Unsloth replaces methods of TRL's trainers, so [the adapter for TRL](trl.md) attaches to them:

- Leave `vllm_importance_sampling_correction` off, as Unsloth does. The adapter then writes weights into `advantages`,
  which Unsloth's loss reads, and rejected tokens into `tool_mask`. If the option is on, training raises a
  `ValueError` before the first update, because the loss does not read `importance_sampling_ratio`.
- All prompts of a generation batch must have the same length in tokens. Otherwise Unsloth's log-probs have more columns
  than the completions, and torch raises an error.

`experiments/conformance/unsloth_in_trl.py` ran `compute_loss` of unsloth 015bdef0d94a and `grpo_compute_loss` of
unsloth-zoo ce232d6cef9c in the GRPOTrainer of TRL 1.16.0 on a CPU: loss and gradient of a corrected batch equal TRL's
to 1e-6, and 20 steps train. Unsloth itself can be imported on a GPU only, so `grpo_accumulated_loss`, which computes
log-probs in chunks, was read but did not run.

Where to go next: [dumps of these frameworks](../reference/dumps.md), [names side by side](index.md).
"""


def _entry(entry: dict[str, Any]) -> str:
    link = f"{entry['web']}/blob/{entry['commit']}/{entry['file']}"
    return f"""## {entry["framework"]} {entry["commit"]}

Set {entry["needs"]}. Where: {entry["place"]}.

```python no-run
{entry["code"]}
```

The lines ran in [{entry["file"]}]({link}) (sha256 `{entry["sha256"][:16]}`). Verified: {entry["compared"]}.
{entry["limits"]}

"""
