"""`out=`: the caller's buffers are written, whatever the kernel, and a buffer that does not fit is an error."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from implementations import IMPLEMENTATIONS
from torch.utils._python_dispatch import TorchDispatchMode

from rollcorr import RolloutCorrectionConfig, correct

CONFIG = RolloutCorrectionConfig(
    rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.05, rollout_is_batch_normalize=True
)
BOOL = torch.zeros(5, 33, dtype=torch.bool)
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def batch(B: int = 5, T: int = 33) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(B, T, generator=generator)
    train = rollout + 0.3 * torch.randn(B, T, generator=generator)
    train[0, 3] = math.nan
    return train, rollout, torch.rand(B, T, generator=generator) < 0.8


@pytest.mark.parametrize("impl", ["auto", *IMPLEMENTATIONS])
def test_the_buffers_are_written_and_returned(impl):
    expected = correct(*batch(), CONFIG, impl=impl)
    weights, loss_mask = torch.full((5, 33), 9.0), torch.ones(5, 33, dtype=torch.bool)
    correction = correct(*batch(), CONFIG, out=(weights, loss_mask), impl=impl)
    assert correction.weights is weights
    assert correction.loss_mask is loss_mask
    assert torch.equal(weights, expected.weights)
    assert torch.equal(loss_mask, expected.loss_mask)


@pytest.mark.parametrize("impl", ["auto", *IMPLEMENTATIONS])
def test_packed_batches_write_to_packed_buffers(impl):
    packed, cu_seqlens = [x.flatten() for x in batch()], torch.arange(6) * 33
    expected = correct(*packed, CONFIG, cu_seqlens=cu_seqlens, impl=impl)
    out = torch.empty(165), torch.empty(165, dtype=torch.bool)
    correct(*packed, CONFIG, cu_seqlens=cu_seqlens, out=out, impl=impl)
    assert torch.equal(out[0], expected.weights)
    assert torch.equal(out[1], expected.loss_mask)


def test_no_correction_copies_the_mask():
    train, rollout, mask = batch()
    loss_mask = torch.zeros_like(mask)
    correction = correct(
        train, rollout, mask.long(), {"rollout_is": True, "rollout_is_threshold": None}, out=(None, loss_mask)
    )
    assert correction.config is None
    assert correction.loss_mask is loss_mask
    assert torch.equal(loss_mask, mask)


class _Allocations(TorchDispatchMode):
    """Return the size of the largest tensor that torch allocates."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            self.largest = max(self.largest, result.nbytes)
        return result


@pytest.mark.skipif("cpu" not in IMPLEMENTATIONS, reason="the compiled kernel was not built")
def test_reused_buffers_leave_only_small_change_to_allocate():
    """Besides the outputs, one row of 273 numbers per 32,768 tokens: 1.3 % of the outputs."""
    train = torch.zeros(64, 4096)
    mask, out = train == 0, (torch.empty(64, 4096), torch.empty(64, 4096, dtype=torch.bool))
    correct(train, train, mask, CONFIG)
    with _Allocations() as allocations:
        correct(train, train, mask, CONFIG, out=out)
    assert allocations.largest <= 0.05 * (out[0].nbytes + out[1].nbytes)


def memory_flags(address: int) -> list[str]:
    """Return Linux's flags of the mapping that contains an address."""
    is_inside, flags = False, []
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        field, *values = line.split()
        if "-" in field:
            start, end = (int(bound, 16) for bound in field.split("-"))
            is_inside = start <= address < end
        elif is_inside and field == "VmFlags:":
            flags = values
    return flags


@pytest.mark.skipif("cpu" not in IMPLEMENTATIONS, reason="the compiled kernel was not built")
@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this kernel has no transparent large pages")
def test_large_new_outputs_ask_for_large_pages():
    train = torch.zeros(1, 1 << 21)
    weights = correct(train, train, train == 0, CONFIG, impl="cpu").weights
    assert "hg" in memory_flags(weights.data_ptr() + weights.nbytes // 2)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ((None, BOOL), r"out needs a weights buffer: out=\(weights, loss_mask\)"),
        ((torch.zeros(5, 33), None), "out needs a loss_mask buffer"),
        ((torch.zeros(5, 33).double(), BOOL), "out weights must have dtype torch.float32, got torch.float64"),
        ((torch.zeros(5, 33), torch.zeros(5, 33)), "out loss_mask must have dtype torch.bool, got torch.float32"),
        ((torch.zeros(5, 32), BOOL), r"the shape of train_log_prob, \(5, 33\), got \(5, 32\)"),
        ((torch.zeros(5, 33, device="meta"), BOOL), "train_log_prob is on cpu and out weights is on meta; move them"),
        ((torch.zeros(33, 5).T, BOOL), r"out weights must be contiguous, got strides \(1, 5\)"),
    ],
)
def test_a_buffer_that_does_not_fit_is_an_error_that_names_both(out, said):
    with pytest.raises(ValueError, match=said):
        correct(*batch(), CONFIG, out=out)


def test_a_buffer_of_no_use_is_an_error():
    with pytest.raises(ValueError, match=r"rollout_is=None computes no weights; give out=\(None, loss_mask\)"):
        correct(*batch(), "disabled", out=(torch.zeros(5, 33), torch.zeros(5, 33, dtype=torch.bool)))


def test_buffers_and_inputs_may_be_parts_of_one_arena():
    train, rollout, mask = batch()
    arena = torch.zeros(3, 5, 33)
    arena[0], arena[1] = train, rollout
    expected = correct(train, rollout, mask, CONFIG)
    correct(arena[0], arena[1], mask, CONFIG, out=(arena[2], BOOL.clone()))
    assert torch.equal(arena[2], expected.weights)


def test_a_buffer_that_is_an_input_is_an_error():
    train, rollout, mask = batch()
    with pytest.raises(ValueError, match="out weights and train_log_prob share memory"):
        correct(train, rollout, mask, CONFIG, out=(train, torch.zeros_like(mask)))
    with pytest.raises(ValueError, match="out loss_mask and response_mask share memory"):
        correct(train, rollout, mask, CONFIG, out=(torch.zeros(5, 33), mask))


def test_a_buffer_that_is_the_other_one_is_an_error():
    memory = torch.zeros(5, 33)
    as_mask = memory.view(torch.bool).flatten()[: 5 * 33].view(5, 33)
    with pytest.raises(ValueError, match="out loss_mask and out weights share memory"):
        correct(*batch(), CONFIG, out=(memory, as_mask))


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_a_buffer_whose_memory_holds_other_numbers_is_an_error(impl):
    negative, zeros = torch._neg_view(torch.zeros(5, 33)), torch._efficientzerotensor(5, 33)
    for weights, said in (
        (negative, "is a view of the negative of its memory"),
        (zeros, "has no memory"),
    ):
        with pytest.raises(ValueError, match=f"out weights {said}"):
            correct(*batch(), CONFIG, out=(weights, BOOL.clone()), impl=impl)


def test_buffers_that_fitted_one_batch_are_checked_again_for_the_next():
    out = torch.zeros(5, 33), torch.zeros(5, 33, dtype=torch.bool)
    train, rollout, mask = batch()
    correct(train, rollout, mask, CONFIG, out=out)
    with pytest.raises(ValueError, match=r"the shape of train_log_prob, \(4, 33\), got \(5, 33\)"):
        correct(train[:4], rollout[:4], mask[:4], CONFIG, out=out)
    with pytest.raises(ValueError, match="out weights and rollout_log_prob share memory"):
        correct(train, out[0], mask, CONFIG, out=out)
    with pytest.raises(ValueError, match="out loss_mask and response_mask share memory"):
        correct(train, rollout, out[1], CONFIG, out=out)

    out[0].resize_(5, 32)
    with pytest.raises(ValueError, match=r"the shape of train_log_prob, \(5, 33\), got \(5, 32\)"):
        correct(train, rollout, mask, CONFIG, out=out)


@pytest.mark.parametrize("impl", ["auto", *IMPLEMENTATIONS])
@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([1, 99, 165], "start at 0"),
        ([-1, 0, 165], "start at 0"),
        ([0, 99, 50, 165], "entry 2 is 50 after 99"),
        ([0, -1, 165], "entry 1 is -1 after 0"),
        ([0, 99, 166], "165, got 166"),
    ],
)
def test_offsets_that_leave_the_data_are_refused_before_anything_is_written(impl, offsets, said):
    packed, weights = [x.flatten() for x in batch()], torch.full((165,), 9.0)
    out = weights, torch.zeros(165, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"cu_seqlens must .*{said}"):
        correct(*packed, CONFIG, cu_seqlens=torch.tensor(offsets), out=out, impl=impl)
    assert (weights == 9.0).all()
    assert not out[1].any()


def test_meta_buffers_give_meta_results():
    train, rollout, mask = (x.to("meta") for x in batch())
    out = (torch.empty(5, 33, device="meta"), torch.empty(5, 33, dtype=torch.bool, device="meta"))
    assert correct(train, rollout, mask, CONFIG, out=out).loss_mask is out[1]
