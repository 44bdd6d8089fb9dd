"""Write the pages of docs/ that are made from tables in the code.

    python tools/generate_docs.py            write every page
    python tools/generate_docs.py --check    write nothing; exit 1 and name the pages that are out of date

A page is a function that returns Markdown; add it to PAGES.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rollcorr.config import RolloutCorrectionConfig  # noqa: E402
from rollcorr.presets import PRESETS, VERL  # noqa: E402

GENERATED = "<!-- Written by tools/generate_docs.py. Edit the table in the code, then run it again. -->"


def presets_page() -> str:
    """docs/presets.md: every preset with its exact values."""
    current = [name for name, preset in PRESETS.items() if preset.source == VERL]
    older = [name for name in PRESETS if name not in current]
    return f"""# Presets

{GENERATED}

A preset is a `RolloutCorrectionConfig` with a name. The three spellings below mean the same; a fourth is the name
alone, wherever a configuration is taken: `rollcorr.correct(..., "decoupled_token_is")`.

```python
from rollcorr.config import RolloutCorrectionConfig

RolloutCorrectionConfig.decoupled_token_is(threshold=2.0)
RolloutCorrectionConfig.preset("decoupled_token_is", threshold=2.0)
RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
```

Fields that a table leaves out have their defaults; a dash is null, or a threshold that nothing uses. Thresholds of k1
criteria are bands on the ratio ρ = train / rollout: `0.5_2.0` keeps 0.5 ≤ ρ ≤ 2.0, a single number x means [1/x, x],
`0_2.0` and `0.5_inf` leave a side open. Thresholds of k2 and k3 are the largest divergence kept, in nats. A
`rollout_is` threshold is a ceiling on weights, or a band outside which they are 0. Bands around 1 depend on the length
of responses: look at the rejected share first.

## Values

{_value_table(current)}

## Arguments

{_argument_table(current)}

## Older names

The names of November and December 2025. Their thresholds may be given as the two ends of the band.

{_value_table(older)}

{_argument_table(older)}
"""


def _value_table(names: Sequence[str]) -> str:
    """One row a preset: the fields that any preset sets."""
    rows = []
    for name in names:
        config = RolloutCorrectionConfig.preset(name)
        other = {"apply_is": config.apply_is, "rollout_token_veto_threshold": config.rollout_token_veto_threshold}
        defaults = RolloutCorrectionConfig()
        changed = [f"`{key}={value}`" for key, value in other.items() if value != getattr(defaults, key)]
        rows.append(
            (
                f"`{name}`",
                config.rollout_is,
                config.rollout_is_threshold if config.rollout_is else None,
                config.rollout_rs,
                config.rollout_rs_threshold,
                "yes" if config.bypass_mode else "no",
                config.loss_type,
                ", ".join(changed) or None,
            )
        )
    header = ("preset", "rollout_is", "threshold", "rollout_rs", "threshold", "bypass", "loss", "other")
    return _table(header, rows)


def _argument_table(names: Sequence[str]) -> str:
    """One row a preset: its arguments with their defaults, and what it does."""
    rows = []
    for name in names:
        parameters = inspect.signature(getattr(RolloutCorrectionConfig, name)).parameters.values()
        arguments = ", ".join(f"{parameter.name}={parameter.default!r}" for parameter in parameters)
        rows.append((f"`{name}({arguments})`", PRESETS[name].description))
    return _table(("call", "what it does"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *([("–" if cell is None else str(cell)) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGES: dict[str, Callable[[], str]] = {
    "docs/presets.md": presets_page,
}


def outdated() -> list[str]:
    """Pages whose file differs from what the code says now."""
    return [
        path
        for path, page in PAGES.items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != page()
    ]


def main() -> int:
    """Write or check every page."""
    parser = argparse.ArgumentParser(description="Write the pages of docs/ that are made from tables in the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = outdated()
    for path in stale:
        if not check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(PAGES[path](), encoding="utf-8")
        print(f"{path}: {'out of date; run python tools/generate_docs.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
