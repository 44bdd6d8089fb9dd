"""Log-probs without logits on CUDA tensors: no value is read and none of the host is sent, unless tokens are dropped.

There is no GPU here: the tensors are fake (`tests/fake_cuda.py`), and the tests count the calls to torch.
"""

from __future__ import annotations

import pytest
import torch
from counting import Counts
from fake_cuda import fake_cuda
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.core.sampling import KeptSets
from rollcorr.correction.scoring import linear_actor_log_prob
from rollcorr.kernels.linear_logprob import linear_log_prob

N, D, V, K = 6, 8, 32, 3


@pytest.fixture(autouse=True)
def cuda():
    with fake_cuda():
        yield


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def of_tokens(dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return tensor(2, N // 2, dtype=dtype)


def kept_sets() -> KeptSets:
    return KeptSets(tensor(N * K, dtype=torch.int32), tensor(N + 1, dtype=torch.int64))


FORMS = {
    "plain": dict,
    "mask, bias, entropy": lambda: {"mask": of_tokens(), "bias": tensor(V).requires_grad_(), "entropy": True},
    "entropy of some, temperatures": lambda: {"entropy": of_tokens(), "temperature": of_tokens(torch.float32)},
    "kept": lambda: {"kept": kept_sets(), "bias": tensor(V).requires_grad_()},
    "kept, mask, mass": lambda: {
        "kept": kept_sets(), "mask": of_tokens(), "log_kept_mass": of_tokens(), "entropy": True,
        "temperature": of_tokens(torch.float32),
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:linear_log_prob multiplies bfloat16")  # torch before 2.8 is slow there, and warns
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_log_probs_and_their_gradients_wait_for_nothing(form, dtype, accumulate):
    hidden, head = tensor(2, N // 2, D, dtype=dtype).requires_grad_(), tensor(V, D, dtype=dtype).requires_grad_()
    options = FORMS[form]() | {"accumulate_into": tensor(V, D) if accumulate else None}
    with Counts() as counts:
        result = linear_log_prob(hidden, head, of_tokens(torch.int64), chunk=8, **options)
        total = result.log_prob.sum()
        if result.entropy is not None:
            total = total + result.entropy.sum()
        total.backward()
    assert counts.operations > 0
    assert counts.culprits == []
    assert (counts.waits, counts.transfers, counts.uploads) == (0, 0, 0)
    assert hidden.grad.is_cuda
    assert (head.grad is None) == accumulate


def test_a_sampling_spec_waits_no_more():
    hidden, head, ids = tensor(N, D).requires_grad_(), tensor(V, D).requires_grad_(), tensor(N, dtype=torch.int64)
    spec = SamplingSpec(temperature=0.7, top_k=8, logprobs="processed", engine="vllm", support="replayed")
    with Counts() as counts:
        linear_actor_log_prob(hidden, head, ids, spec, kept=kept_sets()).log_prob.sum().backward()
    assert counts.culprits == []


@pytest.mark.parametrize("form", ["mask, bias, entropy", "kept"])
def test_dropping_tokens_waits_and_must_be_asked_for(form):
    ids = of_tokens(torch.int64)
    with Counts() as counts, pytest.raises(DynamicOutputShapeException):
        linear_log_prob(tensor(2, N // 2, D), tensor(V, D), ids, compact=True, **FORMS[form]())
    assert counts.waits == 1
