"""The documents that this library answers, item by item: where the item stands, the call, and the expected result.

    000   Li, "Rollout Importance Sampling", October 2025
    001   Li, "Mathematical Formulations of Rollout Correction Methods", 3 November 2025
    002   Li, "Rollout Correction Math": https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html
    003   Fang & Khazi, "Mismatch Praxis", December 2025: https://www.llmdata.com/blog/mismatch-praxis/
    004   verl-omni, "Rollout Correction for Diffusion Training", May 2026: https://github.com/verl-project/verl-omni

docs/references.md has the sources. A row is one item that a reader of a document can type, compute or look up (an
option with each documented value, default and range; a preset; a metric, its formula and its limits; a formula; a row
of a table; a block; a worked number; a function or file), or one claim of an experiment. A repetition in the same
document does not count, nor do derivations and history. A place is document:line; of 004, which is one line, its
section; of experiments in 003, the number that claims.md gives the claim.

An item is full if it has no `reason`; of an experiment, if the study has a verdict from a run, good or bad. Where
documents disagree, or disagree with the specification, the reason names the page with our choice.
"""

from pathlib import Path

import pytest
import torch
from guide_details import DETAILS
from guide_losses import LOSSES, STAGES
from guide_numbers import FORMULAS, METRICS
from guide_options import ELSEWHERE, OPEN, OPTIONS, PARTIAL
from guide_tables import PICTURES, PRAXIS, TABLES
from guide_trainers import BEYOND, LANES, TRAINERS

ROOT = Path(__file__).parents[1]
ITEMS = [*OPTIONS, *METRICS, *FORMULAS, *LOSSES, *STAGES, *TABLES, *PRAXIS, *PICTURES, *ELSEWHERE, *TRAINERS, *DETAILS]


@pytest.mark.parametrize(
    "item", [item for item in [*ITEMS, *BEYOND] if item.call], ids=lambda item: f"{item.place} {item.name}"
)
def test_item_of_guide_works(item):
    result = item.call()
    if isinstance(item.expected, float | list):
        expected = torch.tensor(item.expected, dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(result, dtype=torch.float64), expected, rtol=1e-5, atol=1e-6)
    else:
        assert result == item.expected


def test_inventory_of_guides_is_complete():
    in_lanes = [item for item in ITEMS if item.lane]
    not_here = [item for item in ITEMS if not item.call and not item.lane]
    chosen = [item for item in ITEMS if item.call and "docs/" in item.reason]
    partial = [item for item in ITEMS if item.call and item.reason and "docs/" not in item.reason]
    assert len({(item.place, item.name) for item in ITEMS}) == len(ITEMS)
    assert (len(ITEMS), len(in_lanes), len(chosen), len(partial), len(not_here)) == (472, 3, 6, 18, 3)
    assert {item.lane for item in in_lanes} == set(LANES.values())
    assert all((ROOT / item.reason.rpartition(" ")[2]).is_file() for item in chosen)
    assert all(len(item.reason.split()) >= 5 for item in [*partial, *not_here])


def test_items_that_were_open_are_full():
    """Of the 24 items that the review left open, all but PARTIAL."""
    rows = {item.name: item for item in ITEMS}
    assert len(OPEN) == 26  # one item of the review was three examples
    assert rows.keys() >= set(OPEN) >= PARTIAL
    assert all(rows[name].reason for name in PARTIAL)
    assert all(rows[name].call or rows[name].lane for name in set(OPEN) - PARTIAL)
    assert len(PARTIAL) == 2
