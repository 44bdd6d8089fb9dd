"""Every layout of a trainer converts in and out, and the correction of each is the same."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr import correct
from rollcorr.layouts import (
    cu_seqlens_of_lengths,
    cu_seqlens_of_positions,
    from_row,
    local_lists,
    pack_lists,
    pack_padded,
    pad_packed,
    positions_of_cu_seqlens,
    responses_of_rows,
    rows_of_responses,
    to_row,
    unpack_list,
    whole_tokens,
)
from rollcorr.layouts.conversions import response_tokens_of_rank

lengths_of = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def values(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) for length in lengths]


# --- Lists, rows and position ids ------------------------------------------------------------------------------------


@given(lengths=lengths_of, seed=st.integers(0, 99))
def test_lists_come_back_from_a_packed_batch(lengths, seed):
    first, second = values(lengths, seed), values(lengths, seed + 1)
    (packed, beside), cu_seqlens = pack_lists(first, second)
    assert cu_seqlens.tolist() == cu_seqlens_of_lengths(lengths).tolist()
    for one, other in ((packed, first), (beside, second)):
        back = unpack_list(one, cu_seqlens)
        assert all(torch.equal(a, b) for a, b in zip(back, other, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(unpack_list(one, cu_seqlens.tolist()), back, strict=True))


@given(lengths=lengths_of)
def test_a_row_is_a_packed_batch_with_a_dimension_more(lengths):
    (packed,), cu_seqlens = pack_lists(values(lengths))
    (back,), offsets = from_row(to_row(packed), cu_seqlens=cu_seqlens.tolist())
    assert torch.equal(back, packed)
    assert torch.equal(offsets, cu_seqlens)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_position_ids_and_offsets_say_the_same(lengths):
    cu_seqlens = cu_seqlens_of_lengths(lengths)
    positions = positions_of_cu_seqlens(cu_seqlens, sum(lengths))
    assert positions.tolist() == [place for length in lengths for place in range(length)]
    for given_positions in (positions, positions.unsqueeze(0), positions + 5):
        assert torch.equal(cu_seqlens_of_positions(given_positions), cu_seqlens)
    row = to_row(torch.randn(sum(lengths)))
    assert torch.equal(from_row(row, position_ids=positions).cu_seqlens, cu_seqlens)


@given(lengths=lengths_of)
def test_positions_of_empty_sequences_are_no_tokens(lengths):
    cu_seqlens = cu_seqlens_of_lengths(lengths)
    positions = positions_of_cu_seqlens(cu_seqlens, sum(lengths))
    assert positions.tolist() == [place for length in lengths for place in range(length)]


def test_padding_behind_the_last_sequence_is_sequences_without_a_response_token():
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 0, 0])
    assert cu_seqlens_of_positions(positions).tolist() == [0, 3, 5, 6, 7, 8]
    assert cu_seqlens_of_positions(torch.zeros(0, dtype=torch.int64)).tolist() == [0]


@given(lengths=lengths_of, fill=st.sampled_from([0.0, 1.0, -1.0]))
def test_padding_is_taken_out_and_put_back(lengths, fill):
    inside = torch.arange(6) < torch.tensor(lengths)[:, None]
    padded = torch.randn(len(lengths), 6).masked_fill(~inside, fill)
    (packed,), cu_seqlens = pack_padded(padded, inside=inside)
    assert cu_seqlens.tolist() == cu_seqlens_of_lengths(lengths).tolist()
    assert torch.equal(pad_packed(packed, inside, fill=fill), padded)


# --- Rows of prompt and response -------------------------------------------------------------------------------------


@given(
    prompts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    width=st.integers(1, 6),
    one_for_all=st.booleans(),
    fill=st.sampled_from([0.0, 1.0]),
)
def test_responses_come_back_from_rows_that_are_shifted_by_one(prompts, width, one_for_all, fill):
    lengths = prompts[0] if one_for_all else torch.tensor(prompts)
    responses = torch.randn(len(prompts), width)
    length = max(prompts) + width
    rows = rows_of_responses(responses, lengths, length, fill=fill)
    assert rows.shape == (len(prompts), length - 1)
    assert torch.equal(responses_of_rows(rows, lengths, width, fill=fill), responses)


def test_the_column_before_a_token_scores_it():
    """Two prompt tokens and two response tokens: three scores, of tokens 1, 2 and 3; the response is 2 and 3."""
    shifted = torch.tensor([[-1.0, -2.0, -3.0]])
    assert responses_of_rows(shifted, 2, 2).tolist() == [[-2.0, -3.0]]
    assert responses_of_rows(shifted, 2, 3, fill=7.0).tolist() == [[-2.0, -3.0, 7.0]]
    assert rows_of_responses(torch.tensor([[-2.0, -3.0]]), 2, 4).tolist() == [[0.0, -2.0, -3.0]]


def test_what_does_not_fit_into_a_row_is_left_out():
    responses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert rows_of_responses(responses, torch.tensor([2, 3]), 5).tolist() == [[0, 1, 2, 3], [0, 0, 4, 5]]


@pytest.mark.parametrize(
    ("prompt_lengths", "message"),
    [
        (0, "at least 1, got 0: nothing scores the first token"),
        (np.int64(-2), "at least 1, got -2"),
        (torch.tensor([1, 0]), "prompt_lengths contains 0 at index 1, and must be from 1"),
        (torch.tensor([1.5, 2.0]), "prompt_lengths must hold integers"),
    ],
)
def test_a_response_without_a_prompt_has_no_first_score(prompt_lengths, message):
    for call in (responses_of_rows, rows_of_responses):
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(2, 3), prompt_lengths, 2)


def test_prompt_lengths_may_be_numbers_of_numpy():
    rows = torch.tensor([[-1.0, -2.0, -3.0]])
    assert responses_of_rows(rows, np.int64(2), 2).tolist() == responses_of_rows(rows, 2, 2).tolist()
    assert rows_of_responses(rows, np.int32(2), 4).tolist() == rows_of_responses(rows, 2, 4).tolist()
    with pytest.raises(TypeError, match="integer"):
        responses_of_rows(rows, 2.0, 2)


# --- Context-parallel slices -----------------------------------------------------------------------------------------


@given(total=st.integers(1, 40), response=st.integers(0, 39), ranks=st.integers(1, 5))
def test_the_slices_of_all_ranks_are_the_response_once(total, response, ranks):
    response = min(response, total - 1)
    held = torch.cat([response_tokens_of_rank(total, response, ranks, rank) for rank in range(ranks)])
    assert sorted(held.tolist()) == list(range(response))
    whole = torch.randn(response)
    parts = [local_lists([whole], total_lengths=[total], ranks=ranks, rank=rank)[0][0] for rank in range(ranks)]
    assert torch.equal(whole_tokens(parts, total, response), whole)


def test_zig_zag_by_hand():
    """Eight tokens, of which five are the response, on two ranks: chunks of two. Place t scores token t + 1."""
    assert response_tokens_of_rank(8, 5, 2, 0).tolist() == [4]  # places 0 1 and 6 7: only token 7 is of the response
    assert response_tokens_of_rank(8, 5, 2, 1).tolist() == [0, 1, 2, 3]  # places 2 3 and 4 5


@given(totals=st.lists(st.integers(2, 20), min_size=1, max_size=5), ranks=st.integers(1, 4))
def test_whole_masks_are_cut_to_the_log_probs_of_a_rank(totals, ranks):
    responses = [torch.arange(total // 2) for total in totals]
    for rank in range(ranks):
        masks, other = local_lists(responses, responses, total_lengths=totals, ranks=ranks, rank=rank)
        (packed, _), cu_seqlens = pack_lists(masks, other)
        assert packed.shape[0] == cu_seqlens[-1]
        for part, whole, total in zip(masks, responses, totals, strict=True):
            assert torch.equal(part, whole[response_tokens_of_rank(total, len(whole), ranks, rank)])


# --- One correction --------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_every_layout_is_corrected_alike(lengths, seed):
    train = [x - 9 for x in values(lengths, seed)]
    rollout = [x + 0.1 * noise for x, noise in zip(train, values(lengths, seed + 1), strict=True)]
    mask = [torch.ones(length, dtype=torch.bool) for length in lengths]
    packed, cu_seqlens = pack_lists(train, rollout, mask)
    expected = correct(*packed, "seq_tis", cu_seqlens=cu_seqlens)

    rows = [to_row(tensor) for tensor in packed]
    from_rows, offsets = from_row(*rows, position_ids=positions_of_cu_seqlens(cu_seqlens, sum(lengths)))
    assert torch.equal(correct(*from_rows, "seq_tis", cu_seqlens=offsets).weights, expected.weights)

    inside = torch.arange(6) < torch.tensor(lengths)[:, None]
    padded = [pad_packed(tensor, inside) for tensor in packed]
    weights = correct(*padded, "seq_tis").weights
    torch.testing.assert_close(pack_padded(weights, inside=inside).tensors[0], expected.weights)


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_lists(), "there is no sequence to pack"),
        (lambda: pack_lists([]), "there is no sequence to pack"),
        (lambda: pack_lists([torch.zeros(2)], [torch.zeros(3)]), r"sequence 0 of list 1 is \(3,\).*of list 0 \(2,\)"),
        (lambda: pack_lists([torch.zeros(2)], []), "list 1 has 0 sequences and list 0 has 1"),
        (lambda: pack_lists([torch.zeros(1, 2)]), "must be 1-D"),
        (lambda: unpack_list(torch.zeros(3), [0, 2]), "cu_seqlens must end at the number of tokens, 3, got 2"),
        (lambda: unpack_list(torch.zeros(3), [0, 2, 1, 3]), "must not fall, but entry 2 is 1 after 2"),
        (lambda: unpack_list(torch.zeros(3), []), "at least one entry"),
        (lambda: from_row(torch.zeros(1, 3), cu_seqlens=[0, 2, 1, 3]), "must not fall, but entry 2 is 1 after 2"),
        (lambda: positions_of_cu_seqlens(torch.tensor([0, 2, 1, 3]), 3), "must not fall, but entry 2 is 1 after 2"),
        (lambda: from_row(torch.zeros(1, 3)), "one of them"),
        (lambda: from_row(torch.zeros(2, 3), cu_seqlens=[0, 3]), r"expected one row \(1, 3\), got \(2, 3\)"),
        (lambda: cu_seqlens_of_lengths([1, -2]), "at least 0, got -2"),
        (lambda: cu_seqlens_of_positions(torch.zeros(2, 3, dtype=torch.int64)), r"\(N,\) or \(1, N\), got \(2, 3\)"),
        (lambda: cu_seqlens_of_positions(torch.zeros(3)), "must hold integers"),
        (lambda: pack_padded(torch.zeros(2, 3), inside=torch.ones(2, 2).bool()), r"\(2, 3\) must be as inside"),
        (
            lambda: responses_of_rows(torch.zeros(2, 3), torch.tensor([1]), 2),
            r"\(1,\) must be one for each row, \(2,\)",
        ),
        (lambda: responses_of_rows(torch.zeros(3), 1, 2), r"expected rows \(B, …\), got \(3,\)"),
        (lambda: response_tokens_of_rank(4, 4, 1, 0), "from 0 to total_length - 1 = 3, got 4"),
        (lambda: response_tokens_of_rank(4, 2, 2, 2), "rank must be from 0 to 1, got 2"),
        (lambda: whole_tokens([torch.zeros(3)], 3, 2), "rank 0 holds 2 of the 2 tokens, got 3"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- Waiting ---------------------------------------------------------------------------------------------------------


def test_what_says_that_it_waits_for_nothing_reads_nothing():
    """On meta tensors, which have no values, every read raises."""
    with torch.device("meta"):
        first, second, rows = torch.zeros(3), torch.zeros(2), torch.zeros(2, 5)
        prompts = torch.ones(2, dtype=torch.int64)
        cu_seqlens = torch.zeros(3, dtype=torch.int64)
    assert pack_lists([first, second]).cu_seqlens.is_meta
    assert positions_of_cu_seqlens(cu_seqlens, 5).is_meta
    assert responses_of_rows(rows, prompts, 3).is_meta
    assert rows_of_responses(rows, prompts, 9).is_meta
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        unpack_list(torch.zeros(5, device="meta"), cu_seqlens)
