"""docs/guides/health.md and docs/guides/troubleshooting.md stay true to the registry, the rules and the commands."""

import contextlib
import io
import re
from pathlib import Path

from rollcorr.core.health_ranges import RANGES
from rollcorr.core.metric_registry import METRICS
from rollcorr.diagnostics.faults import FAULTS

DIFFUSION_CODES = ("step_divergence", "schedule_differs", "one_sided_gradients", "growth_by_timestep")

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
HEALTH = (GUIDES / "health.md").read_text(encoding="utf-8")


def rows(heading):
    """The cells of the table under a heading."""
    section = HEALTH.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_ranges_stand_on_the_page_of_metrics_and_the_health_page_leads_there():
    assert "../reference/metrics.md#healthy-ranges" in HEALTH
    metrics = (GUIDES.parent / "reference" / "metrics.md").read_text(encoding="utf-8").split("## Healthy ranges")[1]
    ideals = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", metrics, re.MULTILINE))
    assert ideals.pop("rollout_rs_CRITERION_masked_fraction")
    assert ideals == {name: one.ideal for name, one in RANGES.items()}


def test_the_page_lists_every_rule():
    named = {name for cell, *_ in rows("Rules") for name in re.findall(r"`(\w+)`", cell)}
    of_steps = set(DIFFUSION_CODES)
    declared = {row.code for row in FAULTS.values() if row.needs in ("steps", "metrics")}
    assert named - of_steps == declared - {"out_of_range", "recovered"} - of_steps | {
        "above_null",
        "contradicted_zeros",
    }
    assert of_steps <= named


def test_the_code_of_the_page_prints_what_it_shows():
    code, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", HEALTH, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output


def test_troubleshooting_names_only_metrics_that_exist():
    text = (GUIDES / "troubleshooting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:rollout_is_|rollout_rs_|log_ppl_|log_ratio_|saturated_)\w+|\w+_count)`", text))
    assert len(named) > 10
    assert named <= set(METRICS)
