"""Four processes, two data-parallel by two context-parallel, give the metrics of one, key by key."""

from __future__ import annotations

import grid_ranks
import pytest
import torch
from processes import start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

RANKS = grid_ranks.DATA_RANKS * grid_ranks.CONTEXT_RANKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where four processes have run every scenario, in one start."""
    path = tmp_path_factory.mktemp("grid")
    start_ranks(grid_ranks.run, path, RANKS)
    return path


@pytest.fixture(scope="module")
def results(folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("scenario", grid_ranks.SCENARIOS)
def test_every_key_equals_one_process(folder, results, scenario):
    """Slices use a different kernel than full sequences: its sums agree to float32."""
    alone = grid_ranks.whole_run(folder / f"{scenario} alone", scenario)
    for rank in range(RANKS):
        for step, expected in enumerate(alone):
            found = results[rank][scenario]["metrics"][step]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                # The first loss of a step covers a rank's first micro-batch: more than that of one process.
                if scenario == "micro-batches" and name.startswith("actor/first/"):
                    continue
                exact = not name.startswith("rollout_corr/")
                tolerance = 1e-12 if exact else 1e-6
                assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name
    assert alone[0]["rollout_corr/nonfinite_count"] == 1
    assert scenario == "correction alone" or alone[0]["reward/nonfinite_count"] == 1
    assert scenario == "correction alone" or {"actor/policy_kl", "actor/entropy", "actor/kl_ref"} <= alone[0].keys()


@pytest.mark.parametrize("scenario", ["over ranks", "micro-batches", "empty slice", "bypass"])
def test_all_ranks_have_the_same_bits(results, scenario):
    for result in results[1:]:
        assert str(result[scenario]["metrics"]) == str(results[0][scenario]["metrics"])


@pytest.mark.parametrize("scenario", grid_ranks.SCENARIOS)
def test_two_groups_take_no_further_transfer(results, scenario):
    """One for each step, and one where layouts need more room than a block."""
    assert {result[scenario]["transfers"] for result in results} <= {2, 3}


def test_a_pickled_correction_counts_once(results):
    tokens = sum(int(one["mask"].sum()) for one in grid_ranks.sequences())
    assert [result["pickled"] for result in results] == [tokens] * RANKS


def test_overlapping_groups_are_rejected(results):
    for result in results:
        assert "would count twice" in result["overlapping"]
