"""An optimizer step of denoising steps is the same on one, two, three and four processes."""

from __future__ import annotations

import diffusion_ranks
import pytest
import torch
from diffusion_ranks import CASES, MODES, SHARDS, SIZE, cases
from processes import start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank, from one start of four processes."""
    path = tmp_path_factory.mktemp("diffusion")
    start_ranks(diffusion_ranks.run, path, SIZE)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


@pytest.mark.parametrize(("mode", "denominator"), CASES)
def test_gradients_counts_and_metrics_do_not_depend_on_ranks_or_micro_batches(results, mode, denominator):
    whole = diffusion_ranks.optimizer_step(mode, denominator, 1, 0, 9)
    kept, total, skipped = whole["outcome"][1:]
    assert 0 < kept < total == 18
    if "exact" in mode:
        assert 0 < whole["metrics"]["rollout_corr/rollout_rs_step_kl_alone_fraction"] < 1
    assert not skipped
    assert whole["gradient"].norm() > 0.1
    for size in (size for size in (2, 3, 4) if (mode, denominator) in cases(size)):
        for rank in range(size):
            step = results[rank][size, mode, denominator]
            torch.testing.assert_close(step["gradient"], whole["gradient"], rtol=1e-12, atol=1e-12)
            assert step["outcome"] == pytest.approx(whole["outcome"], rel=1e-12)
            assert step["metrics"] == pytest.approx(whole["metrics"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_ddp_gives_the_same_bits_on_every_rank_and_the_gradient_of_one_process(results, mode):
    """A KL term has a second backward pass; the reducer would exchange only the first one."""
    whole = diffusion_ranks.optimizer_step(mode, "kept", 1, 0, 9)
    for size in (2, 3, 4):
        for rank in range(size):
            gradient = results[rank][size, mode, "DDP"]["gradient"]
            torch.testing.assert_close(gradient, whole["gradient"], rtol=1e-12, atol=1e-12)
            assert torch.equal(gradient, results[0][size, mode, "DDP"]["gradient"])


def test_every_rank_skips_a_step_of_which_nothing_is_kept(results):
    for size in (2, 3, 4):
        assert len(SHARDS[size]) == size + 1
        for rank in range(size):
            loss, kept, total, skipped, cleared = results[rank][size, "nothing"]
            assert (loss, kept, total) == (0.0, 0.0, 18.0)
            assert skipped
            assert cleared
