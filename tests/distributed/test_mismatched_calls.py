"""Ranks that make different calls raise at once where possible; other errors name the likely reason."""

import mismatched_ranks
import pytest
import torch
from processes import start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Errors of each rank by scenario, from one start."""
    path = tmp_path_factory.mktemp("mismatched")
    start_ranks(mismatched_ranks.run, path, mismatched_ranks.SIZE)
    return [torch.load(path / f"{rank}.pt") for rank in range(mismatched_ranks.SIZE)]


@pytest.mark.parametrize("scenario", ["fewer_calls", "fewer_calls_later"])
def test_fewer_calls_on_one_rank_are_named_on_both(errors, scenario):
    first, second = (error[scenario] for error in errors)
    assert "this rank is in that of statistics, and rank 1 of the group in that of Monitor.step" in first
    assert "this rank is in that of Monitor.step, and rank 0 of the group in that of correct" in second
    assert all("one of the two has made fewer calls of `correct` in this step" in text for text in (first, second))


def test_other_configurations_are_named_on_both(errors):
    for rank, error in enumerate(errors):
        assert f"rank {1 - rank} of the group in that of other statistics" in error["other_configurations"]
        assert "its rows are those of another configuration or another detail" in error["other_configurations"]


def test_every_slice_rejects_the_correction_of_other_rows(errors):
    assert [error["other_policy"].partition(":")[0] for error in errors] == 2 * ["the correction is of other rows"]


def test_a_call_that_one_rank_never_makes_ends_with_the_timeout_and_the_likely_reason(errors):
    assert "one with fewer calls makes the others wait, until the timeout of the group ends it" in errors[0]["no_call"]
    assert "`mini_batch` and `Monitor.step` equally often" in errors[0]["no_call"]
    assert "torch.distributed said:" in errors[0]["no_call"]
    assert "no_call" not in errors[1]
