"""Log-probs without logits: by hand, against the reference, gradients by differences, and memory never allocated."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linear_cases import assert_same, make_case, run
from torch import nn

from rollcorr.core.logprobs import kept_log_prob
from rollcorr.core.sampling import KeptSets
from rollcorr.kernels.linear_logprob import dense, kept, linear_log_prob
from rollcorr.kernels.linear_logprob.products import multiply

FORMS = [False, True]
dropped_or_not = pytest.mark.parametrize("compact", [True, False], ids=["dropped", "all computed"])


def test_by_hand():
    """Logits 0, ln 2, ln 5: the softmax is 1/8, 2/8, 5/8; over the first two 1/3, 2/3."""
    head = torch.tensor([[0.0, 1.0], [math.log(2.0), 0.0], [math.log(5.0), 0.0]])
    hidden, ids = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    whole = linear_log_prob(hidden, head, ids, entropy=True)
    assert whole.log_prob.item() == pytest.approx(math.log(2 / 8))
    assert whole.entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)))
    assert linear_log_prob(hidden, head, ids, temperature=0.5).log_prob.item() == pytest.approx(math.log(4 / 30))
    kept = linear_log_prob(hidden, head, ids, kept=KeptSets.of([[0, 1]]), log_kept_mass=True, entropy=True)
    assert kept.log_prob.item() == pytest.approx(math.log(2 / 3))
    assert kept.log_kept_mass.item() == pytest.approx(math.log(3 / 8))
    assert kept.entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 3, 2 / 3)))
    inserted = linear_log_prob(hidden, head, ids, kept=KeptSets.of([[0, 2]]))
    assert inserted.log_prob.item() == pytest.approx(math.log(2 / 8))
    assert inserted.outside.item()


@given(
    seed=st.integers(0, 2**16),
    N=st.integers(0, 9),
    V=st.integers(1, 30),
    chunk=st.sampled_from([None, 1, 4, 7]),
    replayed=st.booleans(),
    temperature=st.sampled_from([1.0, 0.3, 2.5, "each"]),
    masked=st.booleans(),
    entropy=st.sampled_from([False, True, "some"]),
    biased=st.booleans(),
    compact=st.booleans(),
)
def test_twin_equals_the_reference(seed, N, V, chunk, replayed, temperature, masked, entropy, biased, compact):
    case = make_case(seed, N=N, V=V)
    some = torch.arange(N) % 3 == 0
    options = {
        "temperature": case.temperatures if temperature == "each" else temperature,
        "mask": case.mask if masked else None,
        "entropy": some if entropy == "some" else entropy,
        "kept": case.kept if replayed else None,
        "log_kept_mass": replayed and (some if entropy == "some" else True),
        "biased": biased,
    }
    actual = run(case, **options, chunk=chunk, compact=compact, impl="torch")
    assert_same(actual, run(case, **options, impl="reference"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("replayed", FORMS)
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_equal_differences(replayed, entropy):
    case = make_case(5, N=6)
    kept = case.kept if replayed else None

    def function(hidden, weight, bias):
        out = linear_log_prob(
            hidden, weight, case.token_ids, bias=bias, temperature=0.7, kept=kept, entropy=entropy, chunk=4
        )
        return (out.log_prob, out.entropy) if entropy else out.log_prob

    inputs = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("replayed", FORMS)
def test_a_gradient_is_added_to_the_one_that_exists(replayed, impl):
    case = make_case(2)
    kept = case.kept if replayed else None
    _, (of_hidden, of_weight, of_bias) = run(case, kept=kept, impl=impl)
    buffer = torch.randn_like(case.weight)
    before = buffer.clone()
    _, gradients = run(case, kept=kept, accumulate_into=buffer, impl=impl)
    assert gradients[1] is None
    torch.testing.assert_close(buffer, before + of_weight)
    torch.testing.assert_close(gradients[0], of_hidden)
    torch.testing.assert_close(gradients[2], of_bias)


@pytest.mark.parametrize("replayed", FORMS)
@dropped_or_not
def test_half_precision_gradients_are_added_to_a_wider_one(replayed, compact):
    case = make_case(2, dtype=torch.bfloat16)
    kept = case.kept if replayed else None
    buffer = torch.zeros(case.weight.shape)
    run(case, kept=kept, accumulate_into=buffer, compact=compact)
    exact = make_case(2, dtype=torch.bfloat16)
    for name in ("hidden", "weight", "bias", "upstream"):
        setattr(exact, name, getattr(exact, name).double())
    torch.testing.assert_close(buffer.double(), run(exact, kept=kept)[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("replayed", FORMS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_head_tied_to_the_embedding_gets_both_gradients(replayed, accumulate):
    case = make_case(3, dtype=torch.float32)
    kept, gradients = case.kept if replayed else None, []
    prompt = torch.arange(9) % 4
    for impl in ("reference", "torch"):
        embedding = nn.Parameter(case.weight.clone())
        if accumulate and impl == "torch":
            embedding.grad = torch.zeros_like(embedding)
        hidden = nn.functional.embedding(prompt, embedding).tanh()
        into = embedding.grad if impl == "torch" else None
        out = linear_log_prob(hidden, embedding, case.token_ids, kept=kept, accumulate_into=into, impl=impl)
        (out.log_prob * case.upstream).sum().backward()
        assert into is None or embedding.grad is into
        gradients.append(embedding.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("replayed", FORMS)
def test_gradients_of_other_inputs_leave_the_buffer(replayed, compact, trained, impl):
    case = make_case(3)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_(trained)
    into = torch.ones_like(weight)
    states = hidden * 1.0  # no leaf, as in a model
    options = {"kept": case.kept if replayed else None, "compact": compact, "impl": impl}
    loss = linear_log_prob(states, weight, case.token_ids, accumulate_into=into, **options).log_prob.sum()

    (of_hidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    torch.autograd.grad(loss, states, retain_graph=True)
    loss.backward(inputs=[hidden], retain_graph=True)
    assert torch.equal(into, torch.ones_like(into))
    assert torch.equal(hidden.grad, of_hidden)

    # A full backward adds to it, and so does a call for the head's gradient.
    loss.backward(retain_graph=True)
    added = into - 1
    assert added.abs().sum() > 0
    if trained:
        _, of_weight = torch.autograd.grad(loss, (hidden, weight), allow_unused=True)
        assert of_weight is None
        torch.testing.assert_close(into - 1, 2 * added)
    assert weight.grad is None


@pytest.mark.parametrize("replayed", FORMS)
def test_a_temperature_that_requires_a_gradient_raises(replayed):
    case = make_case(4)
    temperature = case.temperatures.double().requires_grad_()
    options = {"temperature": temperature, "kept": case.kept if replayed else None}
    for impl in ("auto", "torch"):
        with pytest.raises(
            ValueError, match=r"temperature requires a gradient.* gives it none; give temperature.detach"
        ):
            run(case, impl=impl, **options)
        with torch.no_grad():
            linear_log_prob(case.hidden, case.weight, case.token_ids, impl=impl, **options)
    run(case, impl="reference", **options)
    assert temperature.grad.abs().sum() > 0


@pytest.mark.parametrize("replayed", FORMS)
def test_a_frozen_head_gets_no_gradient(replayed):
    case = make_case(1)
    hidden = case.hidden.requires_grad_()
    kept = case.kept if replayed else None
    linear_log_prob(hidden, case.weight, case.token_ids, kept=kept).log_prob.sum().backward()
    assert hidden.grad is not None
    assert case.weight.grad is None
    weight = case.weight.requires_grad_()
    linear_log_prob(hidden.detach(), weight, case.token_ids, kept=kept).log_prob.sum().backward()
    assert weight.grad is not None


@dropped_or_not
def test_a_set_of_one_gives_zero_exactly_and_no_gradient(compact):
    case = make_case(0, N=3, dtype=torch.float32)
    kept = KeptSets.of([[int(case.token_ids[0])], [], [int(case.token_ids[2]), 5, 6]])
    case.upstream.fill_(1.0)
    (log_prob, outside, entropy, mass), gradients = run(
        case, kept=kept, entropy=True, log_kept_mass=True, compact=compact
    )
    assert log_prob[:2].tolist() == [0.0, 0.0]
    assert entropy[:2].tolist() == [0.0, 0.0]
    assert log_prob[2] < 0
    assert outside.tolist() == [False, True, False]
    assert not gradients[0][:2].any()
    whole = linear_log_prob(case.hidden, case.weight, case.token_ids, bias=case.bias).log_prob
    torch.testing.assert_close(mass[:2], whole[:2])


def test_logits_outside_the_set_get_no_gradient():
    case = make_case(4, N=3)
    case.upstream.fill_(1.0)
    case.token_ids = torch.tensor([1, 3, 5])
    _, (_, of_weight, of_bias) = run(case, kept=KeptSets.of([[1, 2], [3, 4], [6]]))
    assert of_weight.abs().sum(1).nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert of_bias.nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("replayed", FORMS)
@dropped_or_not
def test_what_the_mask_drops_is_never_seen(replayed, compact):
    case = make_case(6)
    case.hidden[~case.mask] = math.nan
    case.temperatures[~case.mask] = math.nan
    (log_prob, *_), gradients = run(
        case,
        mask=case.mask,
        kept=case.kept if replayed else None,
        temperature=case.temperatures,
        entropy=True,
        compact=compact,
    )
    assert (log_prob[~case.mask] == 0).all()
    assert log_prob.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@dropped_or_not
def test_entries_with_bias_minus_infinity_have_no_probability(compact):
    """Rows beyond the vocabulary that pad a head: also if they fill a chunk, first or last."""
    case = make_case(7)
    case.token_ids = case.token_ids.clamp(8, 15)
    case.bias[:8] = case.bias[16:] = -math.inf
    actual = run(case, chunk=4, entropy=True, compact=compact)
    part = linear_log_prob(case.hidden, case.weight[8:16], case.token_ids - 8, bias=case.bias[8:16], entropy=True)
    torch.testing.assert_close(actual[0].log_prob, part.log_prob)
    torch.testing.assert_close(actual[0].entropy, part.entropy)
    assert all(gradient.isfinite().all() for gradient in actual[1])


@dropped_or_not
def test_a_token_without_a_gradient_takes_no_part_backward(compact):
    """Its hidden state may be anything, as where a model overflowed at a token that rejection took out."""
    case = make_case(6)
    case.hidden[case.upstream == 0] = math.nan
    inputs = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    result = linear_log_prob(
        *inputs[:2], case.token_ids, bias=inputs[2], temperature=case.temperatures, entropy=True, compact=compact
    )
    torch.autograd.backward([result.log_prob, result.entropy], [case.upstream, case.upstream])
    assert result.log_prob.isnan().tolist() == (case.upstream == 0).tolist()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("replayed", FORMS)
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_float32_agrees_with_float64(replayed, scale):
    """Within 1e-6 · max(1, |logit|), where |logit| is the token's largest."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 256, generator=generator)
    weight = torch.randn(2000, 256, generator=generator) * scale / 16
    logits = hidden.double() @ weight.double().t()
    ids = torch.randint(2000, (64,), generator=generator)
    kept = KeptSets.of([[*range(k % 20), 100 + k] for k in range(64)]) if replayed else None
    exact = linear_log_prob(hidden.double(), weight.double(), ids, kept=kept, impl="reference").log_prob
    actual = linear_log_prob(hidden, weight, ids, kept=kept).log_prob
    assert actual.dtype == torch.float32
    assert ((actual - exact).abs() <= 1e-6 * logits.abs().amax(-1).clamp(min=1)).all()


@pytest.mark.parametrize("replayed", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@dropped_or_not
def test_half_precision_errs_no_more_than_twice_torch(replayed, dtype, compact):
    """Log-probs far less: torch rounds the logits. Gradients are rounded once at the end."""
    case = make_case(8, N=64, d=64, V=300, dtype=dtype)
    kept = case.kept if replayed else None
    exact = make_case(8, N=64, d=64, V=300, dtype=dtype)
    for name in ("hidden", "weight", "bias", "upstream"):
        setattr(exact, name, getattr(exact, name).double())
    expected, expected_gradients = run(exact, kept=kept, impl="reference")
    actual, gradients = run(case, kept=kept, compact=compact)
    hidden, weight, bias = (x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias))
    logits = nn.functional.linear(hidden, weight, bias).float()
    if replayed:
        torch_log_prob = kept_log_prob(logits, case.token_ids, kept).log_prob
    else:
        torch_log_prob = logits.log_softmax(-1).gather(-1, case.token_ids[:, None]).squeeze(-1)
    (torch_log_prob * case.upstream).sum().backward()
    error, torch_error = ((x - expected.log_prob).abs().max() for x in (actual.log_prob, torch_log_prob))
    assert error <= torch_error / 10
    for mine, theirs, truth in zip(gradients, (hidden.grad, weight.grad, bias.grad), expected_gradients, strict=True):
        assert mine.dtype == dtype
        assert (mine - truth).abs().max() <= 2 * (theirs - truth).abs().max()


@pytest.mark.parametrize("replayed", FORMS)
def test_a_temperature_may_be_of_another_type(replayed):
    case = make_case(8, dtype=torch.float32)
    kept = case.kept if replayed else None
    for dtype in (torch.float64, torch.float16):
        temperature = case.temperatures.to(dtype)
        actual = run(case, kept=kept, temperature=temperature, entropy=True)
        assert actual[0].log_prob.dtype == torch.float32
        assert_same(actual, run(case, kept=kept, temperature=temperature.float(), entropy=True, impl="reference"))


@pytest.mark.parametrize("replayed", FORMS)
def test_operands_need_not_be_contiguous(replayed):
    case = make_case(8)
    expected = run(case, kept=case.kept if replayed else None)
    case.hidden, case.weight = (x.t().contiguous().t() for x in (case.hidden, case.weight))
    assert_same(run(case, kept=case.kept if replayed else None), expected)


def test_a_wide_copy_of_the_head_is_made_a_few_columns_at_a_time(monkeypatch):
    case = make_case(8, N=40, d=16, V=60, dtype=torch.bfloat16)
    expected = run(case, kept=case.kept, compact=False)
    monkeypatch.setitem(kept.CHUNK_ENTRIES, "cpu", 60 * 5)  # of 16 columns: 5, 5, 5 and 1
    made = []
    slices = kept._column_slices
    monkeypatch.setattr(kept, "_column_slices", lambda *x: made.append(list(slices(*x))) or iter(made[-1]))
    assert_same(run(case, kept=case.kept, compact=False), expected, rtol=1e-2, atol=1e-5)
    assert [len(x) for x in made] == [4, 4, 4], "logits, the hidden states' gradient, the head's"


def test_a_device_that_multiplies_half_precision_into_float32_is_used(monkeypatch):
    """CPUs lack these products, so the test computes them by definition."""
    plain, seen = torch.mm, []

    def mm(left, right, *, out, out_dtype=None):
        seen.append((left.dtype, right.dtype, out_dtype))
        return plain(left, right, out=out) if out_dtype is None else out.copy_(left.float() @ right.float())

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(dense, "operand_type", lambda hidden, weight, wide, precision: hidden.dtype)
    case = make_case(8, N=40, d=16, V=60, dtype=torch.bfloat16)
    actual, gradients = run(case, entropy=True, chunk=32)
    monkeypatch.undo()
    assert set(seen) == {(torch.bfloat16, torch.bfloat16, torch.float32)}
    expected, others = run(case, entropy=True, impl="reference")
    torch.testing.assert_close(actual.log_prob, expected.log_prob)
    for one, other in zip(gradients, others, strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max()


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="torch before 2.8 lacks such products"
)
def test_the_call_of_such_products_exists():
    left, right = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((2, 3), (3, 4)))
    assert multiply(left, right, torch.empty(2, 4, device="meta")).dtype == torch.float32


@pytest.mark.parametrize("replayed", FORMS)
def test_autocast_changes_nothing(replayed):
    case = make_case(9, dtype=torch.float32)
    kept = case.kept if replayed else None
    expected = run(case, kept=kept, impl="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(case, kept=kept, impl="torch"), expected, rtol=0, atol=0)


def test_leading_dimensions_are_kept():
    case = make_case(0, N=6)
    flat = linear_log_prob(case.hidden, case.weight, case.token_ids, kept=case.kept, entropy=True, mask=case.mask)
    shaped = linear_log_prob(
        case.hidden.view(2, 3, -1),
        case.weight,
        case.token_ids.view(2, 3),
        kept=case.kept,
        entropy=True,
        mask=case.mask.view(2, 3),
        temperature=torch.ones(2, 3),
    )
    for one, other in zip(flat, shaped, strict=True):
        assert one is None or torch.equal(one.view(2, 3).nan_to_num(), other.nan_to_num())


def test_the_whole_vocabulary_reads_no_value_forward():
    """Meta tensors have shapes but no values, so any read, which on a GPU is a wait, raises here."""
    with torch.device("meta"):
        hidden, weight, ids = torch.zeros(6, 4), torch.zeros(10, 4), torch.zeros(2, 3, dtype=torch.int64)
    out = linear_log_prob(hidden.view(2, 3, 4), weight, ids, entropy=True, temperature=0.5)
    assert out.log_prob.shape == out.entropy.shape == (2, 3)


ERRORS = {
    "impl must be one of 'auto'": {"impl": "fast"},
    "temperature must be finite and > 0, got 0.0": {"temperature": 0.0},
    r"temperature \(3,\) and token_ids \(9,\) differ": {"temperature": torch.ones(3)},
    "mask must be bool, got torch.int64": {"mask": torch.ones(9, dtype=torch.int64)},
    r"bias \(5,\) must have one entry for each of the weight's 23 rows": {"bias": torch.zeros(5)},
    "kept sets are of 1 tokens, token_ids has 9": {"kept": KeptSets.of([[1]])},
    "log_kept_mass needs kept sets": {"log_kept_mass": True},
    "chunk must be at least 1": {"chunk": 0},
    "first_id is 4 without a vocab_group": {"first_id": 4},
    r"accumulate_into \(2, 2\) and weight \(23, 5\) differ": {"accumulate_into": torch.zeros(2, 2)},
    "accumulate_into would get nothing": {"accumulate_into": torch.zeros(23, 5, dtype=torch.float64)},
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_does_not_fit_is_refused(message):
    case = make_case(0)
    with pytest.raises(ValueError, match=message):
        linear_log_prob(case.hidden, case.weight, case.token_ids, **ERRORS[message])


def test_shapes_that_do_not_fit_are_refused():
    case = make_case(0)
    with pytest.raises(ValueError, match=r"hidden \(9, 5\) must be \(…, d\) and weight \(23, 4\) \(V, d\)"):
        linear_log_prob(case.hidden, case.weight[:, :4], case.token_ids)
    with pytest.raises(ValueError, match=r"hidden \(9, 5\) must be token_ids \(8,\) with d added"):
        linear_log_prob(case.hidden, case.weight, case.token_ids[:8])
    with pytest.raises(ValueError, match=r"weight must be floating-point, got torch\.int64"):
        linear_log_prob(case.hidden, case.weight.long(), case.token_ids)
