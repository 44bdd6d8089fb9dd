"""The figures on the page of log-probs without logits are those of the committed results."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guides" / "linear_logprob.md").read_text(encoding="utf-8")
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("linear_logprob_cpu_float32_*.json"))


def rows(result):
    """A contender's seconds, how many times that of the four products, and the memory of what it makes."""
    products = result["seconds"]["four products"]["cpu"]
    for name, of in result["seconds"].items():
        times = f"{of['cpu'] / products:.2f}" if of["cpu"] / products >= 0.1 else f"1 / {products / of['cpu']:.0f}"
        megabytes = result["peak_bytes"][name] / 1e6
        size = f"{megabytes:,.0f}" if megabytes >= 10 else f"{megabytes:.1f}"
        yield f"| {name} | {of['cpu']:.3g} | {times} | {size} |"


def test_there_are_figures():
    assert RESULTS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_page_has_every_figure(path):
    for row in rows(json.loads(path.read_text(encoding="utf-8"))):
        assert row in PAGE, f"{path.name}: {row}"
