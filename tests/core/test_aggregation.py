"""Aggregation by hand, then: a split equals the batch, packed equals padded, padding has no effect."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.core.aggregation import (
    Denominators,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from rollcorr.correction.denominators import count_denominators

NAN = math.nan
LOSS = torch.tensor([[1.0, 2.0, NAN], [3.0, NAN, NAN], [NAN, NAN, NAN], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])


def norm_by_four(loss, mask, denominators=None, *, cu_seqlens=None):
    return seq_mean_token_sum_norm(loss, mask, denominators, scale=4.0, cu_seqlens=cu_seqlens)


def without_denominators(loss, mask, denominators=None, *, cu_seqlens=None):
    return token_sum(loss, mask, cu_seqlens=cu_seqlens)


BY_HAND = {
    token_mean: (1 + 2 + 3 + 4 + 5 + 6) / 6,
    without_denominators: 21.0,
    seq_mean_token_sum: (3 + 3 + 15) / 3,
    seq_mean_token_mean: (1.5 + 3 + 5) / 3,
    norm_by_four: (3 + 3 + 15) / 3 / 4,
}
every_mode = pytest.mark.parametrize("aggregate", BY_HAND)
lengths_and_seed = given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7), seed=st.integers(0, 2**16), cut=st.integers(0, 7)
)


def random_batch(lengths, seed, width=6):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(len(lengths), width, generator=generator, dtype=torch.float64)
    holes = torch.rand(len(lengths), width, generator=generator) < 0.8
    return loss, (torch.arange(width) < torch.tensor(lengths)[:, None]) & holes


@every_mode
def test_each_mode_by_hand(aggregate):
    assert aggregate(LOSS, MASK).item() == pytest.approx(BY_HAND[aggregate])


def test_explicit_denominators_replace_the_counts_of_the_call():
    whole_step = Denominators(tokens=12.0, sequences=torch.tensor(6.0))
    assert token_mean(LOSS, MASK, whole_step).item() == pytest.approx(21 / 12)
    assert seq_mean_token_sum(LOSS, MASK, whole_step).item() == pytest.approx(21 / 6)
    assert seq_mean_token_mean(LOSS, MASK, whole_step).item() == pytest.approx(9.5 / 6)


def test_original_lengths_divide_rows_that_lost_tokens():
    lengths = torch.tensor([4, 2, 3, 3])
    expected = (3 / 4 + 3 / 2 + 0 + 15 / 3) / 4
    assert seq_mean_token_mean(LOSS, MASK, Denominators(12, 4), lengths=lengths).item() == pytest.approx(expected)


def test_denominators_by_hand():
    counted = count_denominators(MASK)
    assert (counted.tokens.item(), counted.sequences.item()) == (6.0, 3.0)
    weights = torch.tensor([[0.5, 1.5, NAN], [2.0, NAN, NAN], [NAN, NAN, NAN], [0.0, 0.0, 3.0]])
    weighted = count_denominators(MASK, weights=weights)
    assert (weighted.tokens.item(), weighted.sequences.item()) == (2.0 + 2.0 + 3.0, 1.0 + 2.0 + 1.0)
    both = counted + weighted
    assert (both.tokens.item(), both.sequences.item()) == (13.0, 7.0)


@pytest.mark.parametrize("aggregate", [token_mean, seq_mean_token_mean])
def test_weighted_denominators_leave_a_constant_loss_constant(aggregate):
    """Self-normalized importance sampling: Σ w · 7 / Σ w = 7, at token and at sequence level."""
    for weights in (torch.rand(4, 3) + 0.1, (torch.rand(4, 1) + 0.1).expand(4, 3)):
        value = aggregate(weights * 7.0, MASK, count_denominators(MASK, weights=weights))
        assert value.item() == pytest.approx(7.0, rel=1e-5)


@every_mode
@settings(deadline=None, max_examples=20)
@lengths_and_seed
def test_losses_and_gradients_of_any_split_add_up_to_the_whole(aggregate, lengths, seed, cut):
    loss, mask = random_batch(lengths, seed)
    loss.requires_grad_()
    whole = aggregate(loss, mask)
    (gradient,) = torch.autograd.grad(whole, loss)
    step = count_denominators(mask)
    parts = [slice(0, cut), slice(cut, cut + 1), slice(cut + 1, None)]  # the middle or an outer part may be empty
    total = sum(aggregate(loss[part], mask[part], step) for part in parts)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, loss)[0], gradient, rtol=1e-12, atol=1e-12)


@every_mode
@settings(deadline=None, max_examples=20)
@lengths_and_seed
def test_packed_equals_padded_and_padding_or_order_changes_nothing(aggregate, lengths, seed, cut):
    loss, mask = random_batch(lengths, seed)
    expected = aggregate(loss, mask)
    inside = torch.arange(6) < torch.tensor(lengths)[:, None]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    packed = aggregate(loss[inside], mask[inside], cu_seqlens=cu_seqlens)
    wider = torch.nn.functional.pad(loss, (2, 3), value=NAN), torch.nn.functional.pad(mask, (2, 3))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(cut))
    for other in (packed, aggregate(*wider), aggregate(loss[order], mask[order])):
        torch.testing.assert_close(other, expected, rtol=1e-12, atol=1e-12)


@every_mode
@pytest.mark.parametrize("mask", [torch.zeros(4, 3), torch.zeros(4, 3).bool()])
def test_an_empty_mask_gives_zero_connected_to_the_graph(aggregate, mask):
    loss = LOSS.clone().requires_grad_()
    value = aggregate(loss, mask)
    value.backward()
    assert value.item() == 0
    assert (loss.grad == 0).all()
    assert aggregate(torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0


@pytest.mark.parametrize("aggregate", [mode for mode in BY_HAND if mode is not without_denominators])
def test_zero_denominators_give_zero_and_not_infinity(aggregate):
    assert aggregate(LOSS, MASK, Denominators(0.0, 0.0)).item() == 0
    assert aggregate(LOSS, MASK, Denominators(torch.tensor(0.0), torch.tensor(0))).item() == 0


@every_mode
def test_masked_nan_never_reaches_the_gradient(aggregate):
    loss = LOSS.clone().requires_grad_()
    aggregate(loss, MASK).backward()
    assert loss.grad.isfinite().all()
    assert (loss.grad[MASK == 0] == 0).all()
    assert (loss.grad[MASK != 0] > 0).all()


@every_mode
def test_no_mode_reads_tensor_values(aggregate):
    with torch.device("meta"):
        loss, mask, cu_seqlens = torch.zeros(6), torch.ones(6), torch.arange(3)
        assert aggregate(loss, mask, cu_seqlens=cu_seqlens).shape == ()
        assert aggregate(loss.view(2, 3), mask.view(2, 3)).shape == ()
        assert count_denominators(mask, weights=loss, cu_seqlens=cu_seqlens).tokens.shape == ()


@every_mode
def test_the_loss_keeps_its_dtype_beside_float64_denominators(aggregate):
    assert aggregate(LOSS, MASK, count_denominators(MASK)).dtype == torch.float32


@every_mode
def test_wrong_shapes_raise_and_name_both(aggregate):
    with pytest.raises(ValueError, match=r"loss \(4, 3\) and mask \(4, 1\) differ"):
        aggregate(LOSS, MASK[:, :1])
    with pytest.raises(ValueError, match="with cu_seqlens"):
        aggregate(LOSS[0], MASK[0])


def test_lengths_and_scale_are_checked():
    with pytest.raises(ValueError, match=r"lengths \(4, 1\) must be one per sequence, \(4,\)"):
        seq_mean_token_mean(LOSS, MASK, lengths=torch.ones(4, 1))
    for scale in (0.0, -1.0, math.inf, NAN):
        with pytest.raises(ValueError, match="scale must be finite and > 0"):
            seq_mean_token_sum_norm(LOSS, MASK, scale=scale)
