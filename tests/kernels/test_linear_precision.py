"""Precision of the products of `linear_log_prob`, and the order of its sums, on a GPU.

There is no GPU here: fake CUDA tensors show which operations would run there, and the CPU runs those same operations.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rollcorr import linear_log_prob
from rollcorr.core import layout
from rollcorr.kernels.linear_logprob import products
from rollcorr.kernels.linear_logprob.products import float32_products, operand_type


def on_cuda(dtype):
    """A tensor that claims to be on a GPU; it computes no value."""
    with FakeTensorMode():
        return torch.empty(2, 2, dtype=dtype, device="cuda")


@pytest.fixture(autouse=True)
def never_warned():
    products._warn_of_slow_products.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands_of_one_type_are_multiplied_as_they_are(monkeypatch, dtype):
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert operand_type(on_cuda(dtype), on_cuda(dtype), torch.float32) == dtype


def test_operands_that_differ_are_widened_and_one_warning_states_the_factor():
    hidden, head = on_cuda(torch.bfloat16), on_cuda(torch.float32)
    said = (
        r"bfloat16 hidden states and a float32 head in float32, because the two differ: about 14 × .*both in bfloat16"
    )
    with pytest.warns(UserWarning, match=said):
        assert operand_type(hidden, head, torch.float32) == torch.float32
    assert operand_type(hidden, head, torch.float32) == torch.float32  # a second warning would be an error here


def test_an_older_torch_widens_and_says_so(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    operand = on_cuda(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"because torch 2\.7\.1 .* new in 2\.8: about 14 ×.*update torch"):
        assert operand_type(operand, operand, torch.float32) == torch.float32


def test_with_tf32_nothing_is_slow_and_nothing_is_said(monkeypatch):
    hidden, head = on_cuda(torch.bfloat16), on_cuda(torch.float32)
    assert operand_type(hidden, head, torch.float32, "tf32") == torch.float32
    assert operand_type(on_cuda(torch.float32), head, torch.float32) == torch.float32


@pytest.mark.parametrize(("precision", "inside"), [("float32", "highest"), ("tf32", "high")])
def test_the_precision_holds_for_the_products_and_no_longer(precision, inside):
    before = torch.get_float32_matmul_precision()
    with float32_products(precision, torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == inside
    assert torch.get_float32_matmul_precision() == before
    with float32_products(precision, torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has one switch for all backends before 2.9"
)
@pytest.mark.parametrize("value", ["tf32", "ieee", "none"])
def test_a_choice_made_by_the_switches_of_newer_torch_is_taken_and_left_as_it_was(value):
    switch, other = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before, other_before = switch.fp32_precision, other.fp32_precision
    switch.fp32_precision = value
    try:
        for precision, inside in (("float32", "ieee"), ("tf32", "tf32")):
            with float32_products(precision, torch.device("cuda")):
                assert switch.fp32_precision == inside
            assert (switch.fp32_precision, other.fp32_precision) == (value, other_before)
    finally:
        switch.fp32_precision = before


def test_on_the_cpu_the_precision_changes_nothing_and_a_wrong_one_is_named():
    hidden, head, ids = torch.randn(4, 8).bfloat16(), torch.randn(16, 8), torch.arange(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [linear_log_prob(hidden, head, ids, precision=name).log_prob for name in ("float32", "tf32")]
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="precision must be 'float32' or 'tf32', got 'half'"):
        linear_log_prob(hidden, head, ids, precision="half")


def ragged(dtype=torch.float64):
    """Seven segments, two of them empty."""
    offsets = torch.tensor([0, 3, 3, 10, 11, 40, 40, 64])
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, generator=generator, dtype=dtype), offsets


def test_what_a_gpu_runs_for_sums_gives_the_same_sums_and_gradients(monkeypatch):
    values, offsets = ragged()
    index = layout.sequence_ids(values, cu_seqlens=offsets)
    upstream = torch.arange(1.0, 8.0, dtype=torch.float64)
    for sums in (
        lambda x: layout.ragged_sum(x, offsets),
        lambda x: layout.add_at(torch.ones(7, dtype=torch.float64), index, x),
    ):
        found = []
        for atomics in (False, True):
            monkeypatch.setattr(layout, "_adds_by_atomics", lambda _, atomics=atomics: atomics)
            leaf = values.clone().requires_grad_()
            total = sums(leaf)
            total.backward(upstream)
            found.append((total.detach(), leaf.grad))
        torch.testing.assert_close(found[0], found[1], rtol=1e-14, atol=1e-14)


class Asked(TorchDispatchMode):
    """Return the names of the operations, with the dtype of the first operand."""

    def __init__(self):
        super().__init__()
        self.floating = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            self.floating.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


ATOMICS = {"index_add", "index_add_", "scatter_add", "scatter_add_"}


def test_packed_sums_on_a_gpu_ask_for_no_atomic_addition(monkeypatch):
    assert layout._adds_by_atomics(on_cuda(torch.float32))
    assert not layout._adds_by_atomics(on_cuda(torch.int64))  # integers add to the same in any order
    assert not layout._adds_by_atomics(torch.empty(2))

    monkeypatch.setattr(layout, "_adds_by_atomics", lambda _: True)
    values, offsets = ragged()
    with Asked() as asked:
        layout.sequence_sum(values, torch.ones_like(values, dtype=torch.bool), cu_seqlens=offsets)
    assert "segment_reduce" in asked.floating
    assert not asked.floating & ATOMICS
