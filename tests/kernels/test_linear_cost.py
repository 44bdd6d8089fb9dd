"""Cost of log-probs without logits in bytes, products and operations: counted, so the same on every machine."""

from __future__ import annotations

import counting
import pytest
import torch
from linear_cases import make_case
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.linear_logprob import linear_log_prob

N, D, V, CHUNK = 64, 32, 4096, 256
FLOAT = 4


def backward(**options):
    """A function that computes log-probs and gradients; its tensors exist already."""
    case = make_case(0, N=N, d=D, V=V, dtype=torch.float32)
    upstream = options.pop("upstream", torch.ones(N))
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_(options.pop("trained", True))

    def function():
        hidden.grad = weight.grad = None
        out = linear_log_prob(hidden, weight, case.token_ids, **options)
        (out.log_prob * upstream).sum().backward()

    return function


def sets(size=8):
    generator = torch.Generator().manual_seed(1)
    return KeptSets.of([torch.randperm(V, generator=generator)[:size].tolist() for _ in range(N)])


def peak(function):
    """Return the peak of a call's allocations in bytes, its results included."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    live = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def products(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() / (2 * N * D * V)


@pytest.mark.parametrize("chunk", [CHUNK, 4 * CHUNK])
def test_one_chunk_of_logits_is_live(chunk):
    """The rest is the gradients, a copy of the hidden states' and some numbers for each token."""
    numbers_for_each_token = 40 * N * FLOAT
    gradients = (2 * N * D + V * D) * FLOAT
    assert peak(backward(chunk=chunk)) <= chunk * N * FLOAT + gradients + numbers_for_each_token
    assert peak(backward(chunk=chunk, trained=False)) <= (chunk * N + 2 * N * D) * FLOAT + numbers_for_each_token
    whole = peak(backward(impl="reference"))
    assert whole > 2 * N * V * FLOAT, "the count sees what the reference makes"


def test_entropy_of_a_few_tokens_needs_no_second_chunk():
    few = torch.arange(N) < 4
    assert peak(backward(chunk=CHUNK, trained=False, entropy=few)) <= 1.5 * CHUNK * N * FLOAT


@pytest.mark.parametrize("trained", [False, True])
def test_kept_sets_need_no_more_than_the_memory_of_the_kept_rows(trained):
    """512 tokens with 20 ids each at d = 1,024: 42 MB, independent of the vocabulary."""
    N, d, V, K = 512, 1024, 8192, 20
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, d, generator=generator), torch.randn(V, d, generator=generator)
    kept = KeptSets(torch.rand(N, V, generator=generator).topk(K).indices.int().flatten(), torch.arange(N + 1) * K)
    gradient = torch.zeros(V, d) if trained else None
    hidden.requires_grad_()

    def function():
        hidden.grad = None
        out = linear_log_prob(hidden, weight, kept.ids[::K], kept=kept, accumulate_into=gradient)
        out.log_prob.sum().backward()

    assert peak(function) <= N * K * d * FLOAT


def test_kept_sets_make_nothing_of_the_vocabulary_s_size():
    """Not even a byte for each entry."""
    V = 1 << 20
    weight, kept = torch.ones(V, 2), KeptSets.of([[t, V - 2 - t] for t in range(N)])
    hidden = torch.ones(N, 2, requires_grad=True)

    def function():
        hidden.grad = None
        linear_log_prob(hidden, weight, torch.arange(N), kept=kept).log_prob.sum().backward()

    assert peak(function) < V


def test_the_whole_vocabulary_takes_four_products():
    """Logits twice, the gradient of the hidden states, the head's gradient; the logits once without training."""
    assert products(backward()) == pytest.approx(4)
    assert products(backward(trained=False)) == pytest.approx(3)
    case = make_case(0, N=N, d=D, V=V, dtype=torch.float32)
    assert products(lambda: linear_log_prob(case.hidden, case.weight, case.token_ids)) == pytest.approx(1)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_tokens_without_a_gradient_cost_nothing_backward(share):
    upstream = (torch.arange(N) < share * N).float()
    assert products(backward(upstream=upstream)) == pytest.approx(1 + 3 * share)


def test_tokens_beyond_the_mask_cost_nothing():
    assert products(backward(mask=torch.arange(N) < N // 4)) == pytest.approx(1)


def test_kept_sets_take_no_product_with_the_head():
    assert products(backward(kept=sets())) == 0


def test_entropy_and_kept_mass_of_a_few_tokens_cost_a_few_tokens():
    few = torch.arange(N) < N // 8
    assert products(backward(kept=sets(), entropy=few)) == 0
    assert products(backward(kept=sets(), log_kept_mass=few)) == pytest.approx(1 / 8)


def operations(**options):
    function = backward(**options)
    with counting.Counts() as counts:
        function()
    return counts.operations


def test_the_number_of_operations_depends_on_chunks_alone():
    """Not on tokens or on the sizes of sets: there is no loop over either."""
    one, two = operations(chunk=V), operations(chunk=V // 2)
    assert two - one <= 40
    assert one <= 80
    assert operations(kept=sets()) == operations(kept=sets(size=16)) <= 120
