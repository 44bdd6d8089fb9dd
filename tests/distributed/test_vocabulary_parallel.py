"""Two and four processes, each with a slice of the head, give the log-probs and gradients of one with all of it."""

from __future__ import annotations

import itertools

import pytest
import torch
import vocabulary_ranks as ranks
from processes import start_ranks
from vocabulary_ranks import FORMS, SIZE, SLICES

from rollcorr.kernels.linear_logprob import linear_log_prob

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    start_ranks(ranks.run, path, SIZE)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_a_head_give_what_the_head_gives(results, size, name, accumulate):
    values, (of_hidden, _, of_weight, of_bias) = ranks.computed(name)
    for rank in range(SIZE):
        actual, (hidden, added, weight, bias) = results[rank][size, name, accumulate]
        for one, other in zip(actual, values, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=1e-10, atol=1e-12, equal_nan=True)
        rows = slice(*SLICES[size][rank % size : rank % size + 2])
        torch.testing.assert_close(hidden, of_hidden)
        torch.testing.assert_close(bias, of_bias[rows])
        torch.testing.assert_close(added - 1 if accumulate else weight, of_weight[rows])
        assert (weight is None) == accumulate


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_get_the_same_bits(results, size, name):
    first = results[0][size, name, False][0]
    for rank in range(1, size):
        for one, other in zip(results[rank][size, name, False][0], first, strict=True):
            assert one is None or torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("bad", [-100, ranks.V])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_refuses_ids_in_no_slice(results, size, bad):
    slices = ", ".join(str(pair) for pair in itertools.pairwise(SLICES[size]))
    for rank in range(SIZE):
        assert f"token_ids contains {bad} at index 4" in results[rank][size, bad]
        assert f"in a rank's slice: {slices}" in results[rank][size, bad]


def test_the_reference_needs_the_whole_head():
    with pytest.raises(ValueError, match="impl='reference' needs the whole head: gather it first"):
        linear_log_prob(
            torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1).long(), vocab_group=object(), impl="reference"
        )
