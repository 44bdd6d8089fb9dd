"""Padded and packed batches give the same per-sequence numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core import layout
from rollcorr.layouts import pad_packed

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(lengths=lengths, seed=st.integers(0, 2**16))
def test_packed_equals_padded(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    padded = torch.randn(len(lengths), 5, generator=generator, dtype=torch.float64)
    rows = torch.arange(5) < torch.tensor(lengths)[:, None]
    mask = rows & (torch.rand(padded.shape, generator=generator) < 0.7)
    values, cu_seqlens = layout.pack(padded, rows)
    packed_mask, _ = layout.pack(mask, rows)
    for function in (layout.sequence_sum, layout.sequence_mean, layout.sequence_max):
        torch.testing.assert_close(function(values, packed_mask, cu_seqlens=cu_seqlens), function(padded, mask))
    assert torch.equal(layout.token_count(packed_mask, cu_seqlens=cu_seqlens), layout.token_count(mask))
    expanded = layout.expand(torch.arange(len(lengths)), values, cu_seqlens=cu_seqlens)
    assert torch.equal(expanded, layout.expand(torch.arange(len(lengths)), padded)[rows])
    assert torch.equal(pad_packed(values, rows)[rows], padded[rows])


def test_per_sequence_operations_by_hand():
    values = torch.tensor([[1.0, float("nan"), 3.0], [float("nan")] * 3])
    mask = torch.tensor([[True, False, True], [False] * 3])
    assert layout.sequence_sum(values, mask).tolist() == [4.0, 0.0]
    assert layout.sequence_mean(values, mask).tolist() == [2.0, 0.0]
    assert layout.sequence_max(values, mask).tolist() == [3.0, -torch.inf]


def test_shapes_that_do_not_fit_raise_and_name_both():
    with pytest.raises(ValueError, match=r"a \(2, 3\) and b \(2, 1\) differ"):
        layout.check_layout(a=torch.zeros(2, 3), b=torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"expected \(B, T\).*a \(6,\)"):
        layout.check_layout(a=torch.zeros(6))
    with pytest.raises(ValueError, match=r"expected packed \(N,\).*a \(2, 3\)"):
        layout.check_layout(a=torch.zeros(2, 3), cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"\(B \+ 1,\).*\(1, 2\)"):
        layout.check_layout(a=torch.zeros(3), cu_seqlens=torch.tensor([[0, 3]]))
    with pytest.raises(ValueError, match=r"integers, got torch\.float32"):
        layout.check_layout(a=torch.zeros(3), cu_seqlens=torch.tensor([0.0, 3.0]))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([1, 3], "start at 0, got 1"), ([0, 4, 3], "entry 2 is 3 after 4"), ([0, 2], "end at .* 3, got 2")],
)
def test_offsets_are_checked_on_request(offsets, message):
    layout.check_cu_seqlens(torch.tensor([0, 1, 3]), 3)
    with pytest.raises(ValueError, match=message):
        layout.check_cu_seqlens(torch.tensor(offsets), 3)
