"""The Triton kernels of log-probs without logits equal the reference, without a wait over kept sets.

They run interpreted, on the CPU (`tests/conftest.py` asks for it before Triton is imported). On a machine with a GPU,
`TRITON_INTERPRET=0` runs the same tests compiled, on the device.
"""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import assert_same, make_case, run

from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.correction.triton import status
from rollcorr.kernels.linear_logprob import linear_log_prob
from rollcorr.kernels.linear_logprob.dense import Epilogue, dense_sums
from rollcorr.kernels.linear_logprob.kept import RaggedProducts, kept_sums, membership
from rollcorr.kernels.linear_logprob.problem import Problem

pytest.importorskip("triton", reason="Triton is not installed; `make test-triton` installs it")
if status() is not None:
    pytest.skip(str(status()), allow_module_level=True)

from rollcorr.kernels.linear_logprob.triton import launches

# The interpreter computes with numpy, which reports infinities that a selection afterwards drops.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
FORMS = [False, True]


def on_device(case):
    moved = {f.name: getattr(case, f.name).to(DEVICE) for f in dataclasses.fields(case)}
    return dataclasses.replace(case, **moved)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    N=st.integers(0, 5),
    d=st.sampled_from([3, 130]),
    V=st.integers(1, 30),
    chunk=st.sampled_from([None, 7]),
    replayed=st.booleans(),
    temperature=st.sampled_from([1.0, 0.3, "each"]),
    masked=st.booleans(),
    entropy=st.sampled_from([False, True, "some"]),
    biased=st.booleans(),
)
def test_twin_equals_the_reference(seed, N, d, V, chunk, replayed, temperature, masked, entropy, biased):
    case = on_device(make_case(seed, N=N, d=d, V=V))
    some = torch.arange(N, device=DEVICE) % 3 == 0
    options = {
        "temperature": case.temperatures if temperature == "each" else temperature,
        "mask": case.mask if masked else None,
        "entropy": some if entropy == "some" else entropy,
        "kept": case.kept if replayed else None,
        "log_kept_mass": replayed and (some if entropy == "some" else True),
        "biased": biased,
    }
    actual = run(case, **options, chunk=chunk, impl="triton")
    assert_same(actual, run(case, **options, impl="reference"), rtol=1e-9, atol=1e-9)


def test_sets_longer_than_a_block_and_rows_of_many_tokens():
    """Eighteen ids a token, all tokens with the same: the head's gradient then adds eighteen tokens a row."""
    case = on_device(make_case(3, N=18, d=5, V=20))
    case.upstream.fill_(1.0)
    kept = KeptSets.of([list(range(18))] * 18, device=DEVICE)
    assert_same(run(case, kept=kept, impl="triton", entropy=True), run(case, kept=kept, impl="reference", entropy=True))


def test_chunks_longer_than_a_block_of_columns():
    case = on_device(make_case(3, N=2, d=3, V=2500))
    assert_same(run(case, impl="triton", entropy=True), run(case, impl="reference", entropy=True))


@pytest.mark.parametrize("replayed", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_agree_with_float64(replayed, dtype):
    """Log-probs to 1e-6 · max(1, |logit|) from the same operands; gradients to one rounding in their type."""
    case = on_device(make_case(8, N=6, d=64, V=50, dtype=dtype))
    kept = case.kept if replayed else None
    names = ("hidden", "weight", "bias", "upstream")
    exact = dataclasses.replace(case, **{name: getattr(case, name).double() for name in names})
    expected, gradients = run(exact, kept=kept, impl="reference")
    actual, others = run(case, kept=kept, impl="triton")
    largest = (exact.hidden @ exact.weight.T + exact.bias).abs().amax(-1).clamp(min=1)
    assert actual.log_prob.dtype == torch.float32
    assert ((actual.log_prob - expected.log_prob).abs() <= 1e-6 * largest).all()
    for one, other in zip(others, gradients, strict=True):
        assert one.dtype == dtype
        bound = 4 * max(torch.finfo(dtype).eps, 1e-6)
        assert (one - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize("replayed", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_added_to_the_one_that_exists(replayed, dtype):
    case = on_device(make_case(2, dtype=dtype))
    kept = case.kept if replayed else None
    _, (of_hidden, of_weight, of_bias) = run(case, kept=kept, impl="torch")
    buffer = torch.ones(case.weight.shape, device=DEVICE)
    _, gradients = run(case, kept=kept, accumulate_into=buffer, impl="triton")
    assert gradients[1] is None
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(buffer - 1, of_weight.float(), **tolerance)
    torch.testing.assert_close(gradients[0], of_hidden, **tolerance)
    torch.testing.assert_close(gradients[2], of_bias, **tolerance)


def test_entries_with_bias_minus_infinity_have_no_probability():
    case = on_device(make_case(7))
    case.token_ids = case.token_ids.clamp(8, 15)
    case.bias[:8] = case.bias[16:] = -math.inf
    actual = run(case, chunk=4, entropy=True, impl="triton")
    assert_same(actual, run(case, chunk=4, entropy=True, impl="torch"))


@pytest.mark.parametrize("replayed", FORMS)
def test_what_the_mask_drops_reaches_nothing(replayed):
    case = on_device(make_case(6, N=4))
    case.mask[:2] = torch.tensor([True, False])
    kept = case.kept if replayed else None
    expected = run(case, mask=case.mask, kept=kept, entropy=True, impl="torch")
    case.hidden[~case.mask] = math.nan
    assert_same(run(case, mask=case.mask, kept=kept, entropy=True, impl="triton"), expected)


@pytest.mark.parametrize("first", [0, 8, 16])
def test_a_slice_of_the_head_gives_the_sums_of_its_rows(first):
    """Terms of one rank of a vocabulary-parallel group, including tokens without an id in the slice."""
    case = on_device(make_case(5))
    weight, bias = case.weight[first : first + 7], case.bias[first : first + 7]
    problem = Problem(
        case.hidden, weight, case.token_ids, bias, 0.7, None, case.kept, True, False, None, object(), first, None
    )
    member = membership(case.kept, case.token_ids, None)
    actual, expected = (kept_sums(problem, member, x) for x in (launches.TritonProducts(), RaggedProducts()))
    assert expected.largest.isinf().any()
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one[member.working], other[member.working])
    whole = dataclasses.replace(problem, kept=None, chunk=3)
    parts = (dense_sums(whole, epilogue, entropy=True) for epilogue in (launches.TritonEpilogue(), Epilogue()))
    for one, other in zip(*parts, strict=True):
        torch.testing.assert_close(one, other)


class _Counter:
    """Stands for a kernel and counts its launches."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda **arguments: None


@pytest.mark.parametrize("entropy", [False, True])
def test_kept_sets_take_three_launches_and_no_wait(entropy, monkeypatch):
    """On meta tensors a read of a value would raise."""
    counters = {name: _Counter() for name in ("dots", "add_up", "add_rows")}
    for name, counter in counters.items():
        monkeypatch.setattr(launches.kept_kernel, name, counter)
    with torch.device("meta"):
        hidden, weight, bias = (torch.zeros(s, requires_grad=True) for s in ((6, 256), (50, 256), (50,)))
        ids, kept = torch.zeros(6, dtype=torch.int64), KeptSets(torch.zeros(30, dtype=torch.int32), torch.arange(7))
        mask = torch.ones(6, dtype=torch.bool)
    monkeypatch.setattr("rollcorr.kernels.linear_logprob.triton.interpreted", lambda: True)
    out = linear_log_prob(hidden, weight, ids, bias=bias, kept=kept, mask=mask, entropy=entropy, impl="triton")
    (out.log_prob.sum() if out.entropy is None else out.log_prob.sum() + out.entropy.sum()).backward()
    assert [counter.grids for counter in counters.values()] == [[(3,)], [(6, 2)], [(36, 2)]]
    assert weight.grad.shape == weight.shape


def test_what_the_kernels_cannot_take_is_said(monkeypatch):
    case = make_case(0)
    arguments = case.hidden, case.weight, case.token_ids
    with pytest.raises(ValueError, match=r"hidden is on .* and weight is on meta; move them to one device"):
        linear_log_prob(case.hidden, case.weight.to("meta"), case.token_ids, impl="triton")
    transposed = torch.zeros_like(case.weight.t().contiguous()).t()
    with pytest.raises(ValueError, match=r"cannot take these tensors: accumulate_into is not contiguous; .*'torch'"):
        linear_log_prob(case.hidden.requires_grad_(), *arguments[1:], accumulate_into=transposed, impl="triton")
    monkeypatch.setattr("rollcorr.kernels.linear_logprob.triton.status", lambda: "Triton is not installed")
    with pytest.raises(ImportError, match="impl='triton' cannot run here: Triton is not installed"):
        linear_log_prob(*arguments, impl="triton")
