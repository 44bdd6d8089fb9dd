"""Two ranks of a trainer correct their sequences as one process would correct them all."""

import pytest
import torch
import trl_ranks
from processes import start_ranks

from rollcorr.run_directory import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    start_ranks(trl_ranks.run, path, 2)
    return path


def results_of(folder, name):
    return [torch.load(folder / f"{rank}.pt", weights_only=True)[name] for rank in range(2)]


def test_two_ranks_of_uneven_size_share_counts_normalization_and_metrics(folder):
    ranks = results_of(folder, "shards")
    whole = trl_ranks.corrected(0, 8)

    for name in ("importance_sampling_ratio", "tool_mask"):
        torch.testing.assert_close(torch.cat([rank[name] for rank in ranks]), whole[name])
    for rank in ranks:
        assert rank["num_items_in_batch"] == whole["num_items_in_batch"]
        assert rank["log"] == pytest.approx(whole["log"])
    assert trl_ranks.corrected(0, 3)["num_items_in_batch"] < whole["num_items_in_batch"]


def test_a_rank_without_log_probs_does_not_hang(folder):
    for rank in results_of(folder, "missing"):
        assert rank["unchanged"]
        assert rank["corrected"]
        assert rank["tokens"] == 2 * trl_ranks.recorded_batch()["completion_mask"].sum()
        assert sum("rank 1 reported no log-probs" in alarm for alarm in rank["alarms"]) == 1
    steps = read_metrics(folder / "run" / "metrics.jsonl")
    assert ["rollout_corr/token_count" in metrics for metrics in steps] == [False, True]


def test_ranks_end_with_the_failure_of_one(folder):
    """The second rank's loss fails on a batch with a correction."""
    first, second = (rank["error"] for rank in results_of(folder, "refused"))
    assert first == second
    assert "fails on a batch with a correction in 'importance_sampling_ratio': of the second rank" in first


def test_ranks_go_on_where_one_cannot_check(folder):
    first, second = results_of(folder, "unknown")
    assert first["checked"]
    assert second["checked"]
    assert first["error"] == second["error"] == ""
    [record] = first["records"]
    assert "could not check that the loss of ExchangingTrainer" in record
    assert "of the second rank" in record
    assert second["records"] == []
