"""The gallery quotes the committed results of log-probs without logits."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
PATHS = (ROOT / "benchmarks" / "results").glob("linear_logprob_cpu_float32_*.json")
RESULTS = sorted((json.loads(path.read_text(encoding="utf-8")) for path in PATHS), key=lambda of: of["vocabulary"])


def cells(result, name):
    """Return a contender's seconds and peak memory."""
    megabytes = result["peak_bytes"][name] / 1e6
    size = f"{megabytes:,.0f}" if megabytes >= 10 else f"{megabytes:.1f}"
    return f"{result['seconds'][name]['cpu']:.3g} | {size}"


def test_the_page_names_the_vocabularies_that_were_measured():
    columns = " | ".join(f"CPU s, V = {result['vocabulary']:,} | MB" for result in RESULTS)
    assert f"| | {columns} |" in PAGE


def test_the_page_has_every_figure():
    assert len(RESULTS) == 2
    for name in RESULTS[0]["seconds"]:
        row = f"| {name} | {' | '.join(cells(result, name) for result in RESULTS)} |"
        assert row in PAGE, row
    assert set(RESULTS[0]["seconds"]) == set(RESULTS[1]["seconds"])
