"""The documents that this library answers, item by item: where the item stands, the call, and the expected result.

    000   Li, "Rollout Importance Sampling", October 2025
    001   Li, "Mathematical Formulations of Rollout Correction Methods", 3 November 2025
    002   Li, "Rollout Correction Math": https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html
    003   Fang & Khazi, "Mismatch Praxis", December 2025: https://www.llmdata.com/blog/mismatch-praxis/
    004   verl-omni, "Rollout Correction for Diffusion Training", May 2026: https://github.com/verl-project/verl-omni

docs/references.md has the sources. A place is document:line. An item that is partial, or cannot run here, has a
reason. A review counted 304 items without a list of them; this table counts rows, and one item may take several: a
metric has a row for its value and one for its explanation.
"""

import pytest
import torch
from guide_losses import LOSSES, STAGES
from guide_numbers import FORMULAS, METRICS
from guide_options import ELSEWHERE, OPEN, OPTIONS, PARTIAL
from guide_tables import PICTURES, PRAXIS, TABLES
from guide_trainers import TRAINERS

ITEMS = [*OPTIONS, *METRICS, *FORMULAS, *LOSSES, *STAGES, *TABLES, *PRAXIS, *PICTURES, *ELSEWHERE, *TRAINERS]


@pytest.mark.parametrize("item", [item for item in ITEMS if item.call], ids=lambda item: f"{item.place} {item.name}")
def test_item_of_guide_works(item):
    result = item.call()
    if isinstance(item.expected, float | list):
        expected = torch.tensor(item.expected, dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(result, dtype=torch.float64), expected, rtol=1e-5, atol=1e-6)
    else:
        assert result == item.expected


def test_item_without_call_has_reason():
    without = [item for item in ITEMS if item.call is None]
    assert len([item for item in ITEMS if not item.reason]) >= 300
    assert len(without) <= 5
    assert all(len(item.reason.split()) >= 5 for item in without)


def test_items_that_were_open_are_full():
    """Of the 24 items that the review left open, all but PARTIAL."""
    rows = {item.name: item for item in ITEMS}
    assert len(OPEN) == 26  # one item of the review was three examples
    assert rows.keys() >= set(OPEN) >= PARTIAL
    assert all(rows[name].reason for name in PARTIAL)
    assert all(rows[name].call for name in set(OPEN) - PARTIAL - {"verl-omni as host"})
    assert len(PARTIAL) == 2
