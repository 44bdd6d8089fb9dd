"""Log-probs against float64 formulas: values, gradients, layouts, and masked values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core.logprobs import (
    kept_entropy,
    kept_log_mass,
    kept_log_prob,
    kept_mass_log_ratio,
    supported_log_prob,
    token_entropy,
    token_log_prob,
)
from rollcorr.core.sampling import KeptSets, kept_sets_of_support, top_k_support

V = 12


def case(seed, tokens=6, dtype=torch.float64, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, V, generator=generator) * spread).to(dtype)
    ids = torch.randint(V, (tokens,), generator=generator)
    support = torch.rand(tokens, V, generator=generator) < 0.4
    return logits, ids, support


def dense_kept(logits, ids, support, temperature):
    """Compute the formula with a dense mask in the given dtype, as reference of the sparse form."""
    support = support.clone()
    support[torch.arange(len(ids)), ids] = True
    log_p = (logits / temperature).masked_fill(~support, -math.inf).log_softmax(-1)
    return log_p, log_p.gather(-1, ids[:, None]).squeeze(-1)


def test_log_probs_by_hand():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]])
    ids = torch.tensor([1])
    assert token_log_prob(logits, ids).item() == pytest.approx(math.log(2 / 8))
    assert token_log_prob(logits, ids, temperature=0.5).item() == pytest.approx(math.log(4 / 30))
    replayed = kept_log_prob(logits, ids, KeptSets.of([[0, 1]]))
    assert replayed.log_prob.item() == pytest.approx(math.log(2 / 3))
    assert kept_log_mass(logits, ids, KeptSets.of([[0, 1]])).item() == pytest.approx(math.log(3 / 8))
    assert kept_entropy(logits, ids, KeptSets.of([[0, 1]])).item() == pytest.approx(
        -(math.log(1 / 3) / 3 + math.log(2 / 3) * 2 / 3)
    )


def test_a_sampled_token_outside_its_set_is_inserted_and_counted():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]]).expand(3, 3)
    sets = KeptSets.of([[0, 2], [2, 1], []])
    log_prob, outside = kept_log_prob(logits, torch.tensor([1, 1, 1]), sets)
    torch.testing.assert_close(log_prob, torch.tensor([2 / 8, 2 / 7, 1.0]).log())
    assert outside.tolist() == [True, False, True]
    recomputed = supported_log_prob(logits[:1], torch.tensor([0]), top_k_support(logits[:1], 2))
    assert recomputed.log_prob.isfinite().all(), "never −inf"
    assert recomputed.outside.tolist() == [True]


@given(seed=st.integers(0, 2**16), temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]))
def test_kept_sets_equal_the_dense_formula(seed, temperature):
    logits, ids, support = case(seed)
    sets = kept_sets_of_support(support)
    log_p, expected = dense_kept(logits, ids, support, temperature)
    replayed = kept_log_prob(logits, ids, sets, temperature=temperature)
    torch.testing.assert_close(replayed.log_prob, expected)
    assert torch.equal(replayed.outside, ~support[torch.arange(len(ids)), ids])
    dense = supported_log_prob(logits, ids, support, temperature=temperature)
    torch.testing.assert_close(dense.log_prob, expected)
    assert torch.equal(dense.outside, replayed.outside)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0)).sum(-1)
    torch.testing.assert_close(kept_entropy(logits, ids, sets, temperature=temperature), entropy)
    whole = token_log_prob(logits, ids, temperature=temperature)
    mass = kept_log_mass(logits, ids, sets, temperature=temperature)
    assert (mass <= 1e-12).all()
    torch.testing.assert_close(whole - mass, expected)


@pytest.mark.parametrize("name", ["whole", "supported", "kept", "mass", "entropy", "kept_entropy"])
def test_gradients_are_those_of_the_formula(name):
    logits, ids, support = case(3, tokens=4)
    support[0] = False  # an empty set: only the token
    sets = kept_sets_of_support(support)
    functions = {
        "whole": lambda z: token_log_prob(z, ids, temperature=0.7),
        "supported": lambda z: supported_log_prob(z, ids, support, temperature=0.7).log_prob,
        "kept": lambda z: kept_log_prob(z, ids, sets, temperature=0.7).log_prob,
        "mass": lambda z: kept_log_mass(z, ids, sets, temperature=0.7),
        "entropy": lambda z: token_entropy(z, temperature=0.7),
        "kept_entropy": lambda z: kept_entropy(z, ids, sets, temperature=0.7),
    }
    assert torch.autograd.gradcheck(functions[name], (logits.requires_grad_(),))


def test_gradients_of_replay_equal_those_of_a_dense_mask_and_stay_inside_the_set():
    logits, ids, support = case(11, tokens=40)
    sets, upstream = kept_sets_of_support(support), torch.linspace(-1, 1, 40, dtype=torch.float64)
    gradients = []
    for form in (kept_log_prob(logits.requires_grad_(), ids, sets, temperature=0.6).log_prob, None):
        value = dense_kept(logits, ids, support, 0.6)[1] if form is None else form
        gradients.append(torch.autograd.grad((value * upstream).sum(), logits)[0])
    torch.testing.assert_close(*gradients)
    support[torch.arange(40), ids] = True
    assert (gradients[0][~support] == 0).all()


@given(seed=st.integers(0, 2**16), scale=st.sampled_from([1.0, 30.0, 1000.0]))
def test_float32_agrees_with_float64(seed, scale):
    logits, ids, support = case(seed, dtype=torch.float32, spread=scale)
    sets = kept_sets_of_support(support)
    limit = 1e-6 * logits.abs().amax(-1).clamp(min=1)
    for function in (token_log_prob, lambda *a: kept_log_prob(*a, sets).log_prob):
        error = (function(logits, ids).double() - function(logits.double(), ids)).abs()
        assert (error <= limit).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened(dtype):
    logits, ids, support = case(5, dtype=dtype)
    sets = kept_sets_of_support(support)
    for value in (token_log_prob(logits, ids), kept_log_prob(logits, ids, sets).log_prob, token_entropy(logits)):
        assert value.dtype == torch.float32
    torch.testing.assert_close(token_log_prob(logits, ids), token_log_prob(logits.float(), ids))


def test_huge_logits_neither_overflow_nor_lose_the_gradient():
    logits = torch.tensor([[1e4, 1e4 - 1.0, -1e4]], requires_grad=True)
    value = kept_log_prob(logits, torch.tensor([1]), KeptSets.of([[0, 1]])).log_prob
    assert value.item() == pytest.approx(-1.0 - math.log1p(math.exp(-1.0)), rel=1e-4)
    value.backward()
    assert logits.grad.isfinite().all()


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_packed_equals_padded(lengths, seed):
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    logits, ids, support = case(seed, tokens=4 * len(lengths))
    rows = mask.flatten()
    sets = kept_sets_of_support(support[rows])
    packed = kept_log_prob(logits[rows], ids[rows], sets, temperature=0.7)
    shape = (len(lengths), 4)
    padded = kept_log_prob(logits.view(*shape, V), ids.view(shape), sets.padded(mask), temperature=0.7)
    torch.testing.assert_close(padded.log_prob[mask], packed.log_prob)
    assert torch.equal(padded.outside[mask], packed.outside)
    assert (padded.log_prob[~mask] == 0).all()
    for part in (token_log_prob, lambda z, a: token_entropy(z)):
        torch.testing.assert_close(
            part(logits.view(*shape, V), ids.view(shape))[mask], part(logits, ids)[rows], rtol=0, atol=0
        )


def test_an_empty_batch_has_empty_log_probs():
    logits, ids = torch.zeros(0, V, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    value = kept_log_prob(logits, ids, KeptSets.of([])).log_prob
    assert value.shape == (0,)
    value.sum().backward()
    assert logits.grad.shape == (0, V)


def test_the_reference_policy_is_scored_over_the_whole_vocabulary():
    """A filtered reference returns −inf, and an infinite KL, for a token that only the actor kept."""
    actor, reference = torch.tensor([[3.0, 1.0, -4.0]]), torch.tensor([[3.0, -4.0, 1.0]])
    token, sets = torch.tensor([1]), KeptSets.of([[0, 1]])
    filtered = reference.masked_fill(~top_k_support(reference, 2), -math.inf).log_softmax(-1)[0, 1]
    assert filtered == -math.inf
    log_prob = token_log_prob(reference, token)
    assert log_prob.item() == pytest.approx((reference[0, 1] - reference[0].logsumexp(0)).item())
    assert (kept_log_prob(actor, token, sets).log_prob - log_prob).isfinite().all()


def test_the_kept_mass_takes_a_full_log_prob_to_the_kept_set():
    logits, ids, support = case(7)
    sets = kept_sets_of_support(support)
    rollout = kept_log_prob(logits, ids, sets).log_prob
    full = token_log_prob(logits, ids) - rollout
    mass = kept_log_mass(logits, ids, sets)
    torch.testing.assert_close(full, mass, msg="the bias of full against truncated is log S")
    torch.testing.assert_close(kept_mass_log_ratio(full, mass), torch.zeros(6, dtype=torch.float64))


def test_no_function_reads_a_value():
    with torch.device("meta"):
        logits, ids = torch.zeros(2, 3, 5, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64)
        sets = KeptSets(torch.zeros(9, dtype=torch.int32), torch.zeros(7, dtype=torch.int64))
        support = torch.ones(2, 3, 5, dtype=torch.bool)
    assert token_log_prob(logits, ids).shape == (2, 3)
    assert token_entropy(logits).shape == (2, 3)
    assert supported_log_prob(logits, ids, support).outside.shape == (2, 3)
    for function in (kept_log_mass, kept_entropy):
        assert function(logits, ids, sets).shape == (2, 3)
    assert kept_log_prob(logits, ids, sets).log_prob.shape == (2, 3)


def test_wrong_shapes_and_temperatures_are_named():
    logits, ids, _ = case(0)
    with pytest.raises(ValueError, match=r"logits \(6, 12\) must be token_ids \(5,\) with V added"):
        token_log_prob(logits, ids[:5])
    with pytest.raises(ValueError, match=r"kept sets are of 1 tokens, token_ids has 6; .*KeptSets.padded"):
        kept_log_prob(logits, ids, KeptSets.of([[1]]))
    with pytest.raises(ValueError, match=r"support \(6, 11\) and logits \(6, 12\) differ"):
        supported_log_prob(logits, ids, torch.ones(6, 11).bool())
    with pytest.raises(ValueError, match=r"log_ratio \(2,\) and log_kept_mass \(3,\) differ"):
        kept_mass_log_ratio(torch.zeros(2), torch.zeros(3))
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="greedy decoding has no log-probs"):
            token_log_prob(logits, ids, temperature=temperature)
        with pytest.raises(ValueError, match="greedy decoding has no log-probs"):
            token_entropy(logits, temperature=temperature)
