"""Supports by hand, each engine's order, ties, and kept sets."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core.sampling import (
    KeptSets,
    check_kept_sets,
    concatenate_kept_sets,
    joint_support,
    kept_sets_of_support,
    min_p_support,
    sequential_support,
    top_k_support,
    top_p_support,
    with_sampled,
)

INF = math.inf
P = torch.tensor([0.05, 0.4, 0.2, 0.3, 0.05])
Z = P.log()


def kept(support):
    return torch.where(support)[0].tolist()


def test_each_filter_by_hand():
    assert kept(top_k_support(Z, 2)) == [1, 3]
    assert kept(top_p_support(Z, 0.69)) == [1, 3]
    assert kept(top_p_support(Z, 0.71)) == [1, 2, 3], "the token that crosses p is kept"
    assert kept(top_p_support(Z, 1e-6)) == [1], "the most likely token always is"
    assert kept(min_p_support(Z, 0.5)) == [1, 2, 3]
    assert kept(min_p_support(Z, 1.0)) == [1]
    assert kept(top_k_support(Z, 99)) == [0, 1, 2, 3, 4]


def test_ties_at_the_boundary_are_kept_together():
    assert kept(top_k_support(Z, 4)) == [0, 1, 2, 3, 4]
    assert kept(top_p_support(Z, 0.92)) == [0, 1, 2, 3, 4]
    assert kept(top_k_support(torch.zeros(4), 1)) == [0, 1, 2, 3]


def test_what_was_removed_before_is_never_kept():
    removed = Z.clone()
    removed[1] = -INF
    for keep in (
        partial(top_k_support, top_k=5),
        partial(top_p_support, top_p=1.0),
        partial(min_p_support, min_p=1e-9),
    ):
        assert kept(keep(removed)) == [0, 2, 3, 4]


def test_renormalising_between_filters_keeps_fewer_than_one_joint_softmax():
    filters = [partial(top_k_support, top_k=3), partial(top_p_support, top_p=0.75)]
    assert kept(sequential_support(Z, filters)) == [1, 3], "of 0.9 the two best have 0.78"
    assert kept(joint_support(Z, filters)) == [1, 2, 3], "of 1 the two best have 0.7"


def test_min_p_before_top_p_renormalises_what_top_p_sees():
    top_p, min_p = partial(top_p_support, top_p=0.75), partial(min_p_support, min_p=0.3)
    assert kept(sequential_support(Z, [top_p, min_p])) == [1, 2, 3]
    assert kept(sequential_support(Z, [min_p, top_p])) == [1, 3]


def test_a_temperature_that_comes_last_does_not_move_the_nucleus():
    top_p = [partial(top_p_support, top_p=0.71)]
    assert kept(sequential_support(Z, top_p)) == [1, 2, 3]
    assert kept(sequential_support(Z / 0.5, top_p)) == [1, 3]


def test_the_sampled_token_always_belongs_to_the_support_and_strangers_are_told():
    support = top_k_support(Z.expand(2, 5), 2)
    support, outside = with_sampled(support, torch.tensor([3, 0], dtype=torch.int32))
    assert kept(support[0]) == [1, 3]
    assert kept(support[1]) == [0, 1, 3]
    assert outside.tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@given(seed=st.integers(0, 2**16), top_p=st.floats(0.05, 1.0))
def test_a_nucleus_has_the_mass_and_no_smaller_one_does(dtype, seed, top_p):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)
    support = top_p_support(logits, top_p)
    p = logits.double().softmax(-1)
    assert (p.masked_fill(~support, 0).sum(-1) >= top_p - 1e-9).all()
    least = p.masked_fill(~support, INF).amin(-1, keepdim=True)
    assert (p.masked_fill(~support | (p == least), 0).sum(-1) < top_p + 1e-9).all()


@given(seed=st.integers(0, 2**16), top_k=st.integers(1, 12))
def test_supports_do_not_depend_on_the_order_of_the_vocabulary(seed, top_k):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, generator=generator).mul(3).round()  # many ties
    order = torch.randperm(12, generator=generator)
    filters = [partial(top_k_support, top_k=top_k), partial(top_p_support, top_p=0.8)]
    assert torch.equal(sequential_support(logits, filters)[order], sequential_support(logits[order], filters))


def test_bad_limits_are_refused():
    for call, message in (
        (partial(top_k_support, top_k=0), "top_k must be >= 1, got 0"),
        (partial(top_p_support, top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (partial(min_p_support, min_p=1.5), r"min_p must be in \(0, 1\], got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            call(Z)


def test_kept_sets_from_lists_supports_and_parts_agree():
    sets = KeptSets.of([[1, 3], [], [0, 2, 4]])
    assert sets.ids.dtype == torch.int32
    assert sets.offsets.tolist() == [0, 2, 2, 5]
    dense = torch.zeros(3, 5, dtype=torch.bool)
    dense[0, [1, 3]] = dense[2, [0, 2, 4]] = True
    for other in (
        kept_sets_of_support(dense),
        concatenate_kept_sets([KeptSets.of([[1, 3]]), KeptSets.of([[], [0, 2, 4]])]),
        KeptSets.of([[0, 2, 4], [1, 3], []]).select(torch.tensor([1, 2, 0])),
    ):
        assert torch.equal(other.ids, sets.ids)
        assert torch.equal(other.offsets, sets.offsets)
    check_kept_sets(sets, 3, 5)


def test_packed_sets_are_laid_over_a_padded_batch_with_holes():
    mask = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]).bool()
    padded = KeptSets.of([[1, 3], [2], [0, 4]]).padded(mask)
    assert padded.offsets.tolist() == [0, 0, 2, 2, 3, 5, 5, 5, 5]
    assert padded.ids.tolist() == [1, 3, 2, 0, 4]
    empty = KeptSets.of([]).padded(torch.zeros(2, 2).bool())
    assert empty.offsets.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("ids", "offsets", "tokens", "message"),
    [
        ([1, 2], [0, 2], 2, "kept sets are of 1 tokens, the batch has 2"),
        ([1, 2], [1, 2], 1, "kept offsets must start at 0, got 1"),
        ([1, 2], [0, 3], 1, "kept offsets must end at the number of ids, 2, got 3"),
        ([1, 2, 3], [0, 2, 1, 3], 3, "kept offsets must not fall, but entry 2 is 1 after 2"),
        ([1, 5], [0, 1, 2], 2, "kept.ids contains 5 at index 1, and must be from 0 to 4"),
        ([-1, 2], [0, 1, 2], 2, "kept.ids contains -1 at index 0, and must be from 0 to 4"),
        ([1, 2, 3, 2], [0, 1, 4], 2, "kept id 2 of token 1 is listed twice"),
    ],
)
def test_kept_sets_are_checked_on_request(ids, offsets, tokens, message):
    with pytest.raises(ValueError, match=message):
        check_kept_sets(KeptSets(torch.tensor(ids, dtype=torch.int32), torch.tensor(offsets)), tokens, 5)


def test_kept_sets_have_one_form():
    for ids, offsets, message in (
        (torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), r"kept ids must be a vector of torch.int32"),
        (
            torch.zeros(2, dtype=torch.int32),
            torch.tensor([0, 2]).int(),
            r"kept offsets must be a vector of torch.int64",
        ),
        (torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), "at least one; got none"),
    ):
        with pytest.raises(ValueError, match=message):
            KeptSets(ids, offsets)


def test_no_filter_reads_a_value():
    with torch.device("meta"):
        logits, ids = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
        sets = KeptSets(torch.zeros(7, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
        mask = torch.zeros(2, 3, dtype=torch.bool)
    filters = [partial(top_k_support, top_k=3), partial(top_p_support, top_p=0.9), partial(min_p_support, min_p=0.1)]
    for support in (sequential_support(logits, filters), joint_support(logits, filters)):
        assert with_sampled(support, ids)[0].shape == (2, 5)
    assert sets.padded(mask).offsets.shape == (7,)
