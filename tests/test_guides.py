"""The documents that this library answers, item by item: where the item stands, the call, and the expected result.

    000   Li, "Rollout Importance Sampling", October 2025
    001   Li, "Mathematical Formulations of Rollout Correction Methods", 3 November 2025
    002   Li, "Rollout Correction Math": https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html
    003   Fang & Khazi, "Mismatch Praxis", December 2025: https://www.llmdata.com/blog/mismatch-praxis/
    004   verl-omni, "Rollout Correction for Diffusion Training", May 2026: https://github.com/verl-project/verl-omni

docs/references.md has the sources. A place is document:line. An item that is partial, or cannot run here, has a
reason.
"""

import pytest
import torch
from guide_numbers import FORMULAS, METRICS
from guide_options import ELSEWHERE, OPTIONS

ITEMS = [*OPTIONS, *METRICS, *FORMULAS, *ELSEWHERE]


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
    assert len(ITEMS) - len(without) >= 150
    assert all(len(item.reason.split()) >= 5 for item in without)
