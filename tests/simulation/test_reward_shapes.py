"""The page of rewards and batch sizes: its pairs, its crossings and rank correlations, and that it is current."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

LABORATORY = Path(__file__).parents[2] / "experiments" / "laboratory"
sys.path.insert(0, str(LABORATORY))

import reward_shapes  # noqa: E402

from rollcorr.simulation.markov_policies import expected_reward  # noqa: E402


def test_the_committed_page_is_that_of_the_table():
    rows = reward_shapes.read_rows()
    assert reward_shapes.PAGE.read_text(encoding="utf-8") == reward_shapes.page_text(rows)
    cases = len(reward_shapes.REWARDS) * len(reward_shapes.T_TIMES_KL) * len(reward_shapes.KINDS)
    settings = len(reward_shapes.SEEDS) * len(reward_shapes.NAMES) * len(reward_shapes.BATCH_SIZES)
    assert len(rows) == cases * settings


def test_half_of_the_sequences_have_no_mistake():
    pair = reward_shapes.equal_pair("mistake", 0)
    assert float(expected_reward(pair.trainer, pair.rule, pair.length)) == pytest.approx(0.5)
    assert reward_shapes.pair_with("mistake", "noise", 10.0, 0).sequence_kl == pytest.approx(10.0, rel=1e-6)


def test_rank_correlation_by_hand():
    """Ranks 1 2 3 and 1 3 2: 1 − 6 · 2 / 24; a tie shares its rank."""
    assert reward_shapes.spearman([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert reward_shapes.spearman([1, 2, 3], [3, 2, 1]) == -1.0
    assert reward_shapes.spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
    assert reward_shapes.spearman([1, 1, 1], [1, 2, 3]) == 0.0


@pytest.mark.parametrize(("error", "expected"), [(0.001, "64"), (0.2, "not resolved up to 1,048,576")])
def test_a_crossing_needs_two_standard_errors(error, expected):
    """Sequence weights fall by 0.1 per doubling and meet token weights at B = 64."""
    rows = [
        {
            "reward": "mean",
            "regime": 1.0,
            "estimator": name,
            "batch_size": batch_size,
            "direction": 0.5 + (name == "seq_tis") * max(0.2 - 0.1 * place, -0.2),
            "direction_error": error,
        }
        for name in ("token_tis", "seq_tis")
        for place, batch_size in enumerate(reward_shapes.BATCH_SIZES)
    ]
    assert reward_shapes.crossing(rows, "mean", 1.0) == expected
