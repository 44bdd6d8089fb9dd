"""Two ranks of a trainer correct their sequences as one process would correct them all."""

import pytest
import torch
import torch.multiprocessing as mp
import trl_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


def test_two_ranks_of_uneven_size_share_counts_normalization_and_metrics(tmp_path):
    mp.start_processes(trl_ranks.run, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    whole = trl_ranks.corrected(0, 8)

    for name in ("importance_sampling_ratio", "tool_mask"):
        torch.testing.assert_close(torch.cat([rank[name] for rank in ranks]), whole[name])
    for rank in ranks:
        assert rank["num_items_in_batch"] == whole["num_items_in_batch"]
        assert rank["log"] == pytest.approx(whole["log"])
    assert trl_ranks.corrected(0, 3)["num_items_in_batch"] < whole["num_items_in_batch"]
