"""Two processes that divide the update give the parameters and metrics of one."""

import flow_ranks
import pytest
import torch
from processes import start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, micro_model):
    path = tmp_path_factory.mktemp("flow_ranks")
    start_ranks(flow_ranks.run, path, flow_ranks.SIZE, str(micro_model))
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(flow_ranks.SIZE)]


@pytest.fixture(scope="module")
def alone(micro_model):
    return flow_ranks.results(micro_model)


@pytest.mark.parametrize("mode", flow_ranks.MODES)
def test_ranks_divide_the_update_and_agree_with_one_process(ranks, alone, mode):
    expected = alone[mode]
    for found in ranks:
        torch.testing.assert_close(found[mode]["parameters"], expected["parameters"], rtol=1e-4, atol=1e-6)
        for mine, theirs in zip(found[mode]["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6, nan_ok=True)
    assert torch.equal(ranks[0][mode]["parameters"], ranks[1][mode]["parameters"])
    assert max(found[mode]["passes"] for found in ranks) < expected["passes"]


def test_nothing_kept_on_any_rank_is_skipped_by_all(ranks):
    for found in ranks:
        assert found["nothing kept"]["metrics"][-1]["actor/skipped_steps"] == 4
    assert ranks[0]["nothing kept"]["metrics"][0]["actor/kept_fraction"] == 0


def test_a_mini_batch_that_some_rank_would_not_see_is_refused(ranks, alone):
    assert "a mini-batch of 1 pictures cannot be divided among 2 ranks" in ranks[0]["error"]
    assert "error" not in alone
