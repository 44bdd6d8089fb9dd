"""The front pages say what the library is for, and show what its commands print."""

import json
import re
import statistics
from pathlib import Path

import front_figures
import pytest

ROOT = Path(__file__).parents[1]
FRONT = {page: (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/index.md")}


@pytest.mark.parametrize("page", FRONT)
def test_a_front_page_opens_with_problem_figure_and_doors(page):
    """Headline, curves, install line and three entry points come before the first section."""
    opening = FRONT[page].partition("\n## ")[0]
    assert "**Your sampler and your trainer disagree." in opening
    assert "figures/demo_curves.svg" in opening
    assert "pip install" in opening
    assert opening.count("\n| ") == 4  # the header, then three
    assert "figures/check.svg" in FRONT[page]


def test_the_code_of_the_front_page_fits_a_phone():
    """At 390 pixels a line holds 46 characters."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", FRONT["docs/index.md"], re.DOTALL | re.MULTILINE)
    assert blocks
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 46


def test_the_recording_is_what_check_prints():
    recorded = (front_figures.FIGURES / "check.svg").read_text(encoding="utf-8")
    assert recorded == front_figures.recording(front_figures.printed()), "run tools/front_figures.py"
    assert "http" not in recorded.replace("http://www.w3.org/2000/svg", "")  # loads nothing


def test_the_accuracies_of_the_demo_are_those_of_three_seeds():
    curves = json.loads(front_figures.CURVES.read_text(encoding="utf-8"))
    assert len(curves) == 3
    ends = {name: [100 * seed[name][-1][1] for seed in curves] for name in front_figures.LABELS}
    for name in ends:
        error = statistics.stdev(ends[name]) / len(curves) ** 0.5
        assert f"{statistics.mean(ends[name]):.1f} ± {error:.1f} %" in FRONT["README.md"], name
    assert max(ends["fault"] + ends["uncorrected"]) < 10 < 60 < min(ends["healthy"] + ends["corrected"])
