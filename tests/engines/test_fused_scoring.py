"""Scores without logits equal scores with them, values and gradients, for heads of several families."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rollcorr.core.logprobs import kept_log_prob
from rollcorr.core.sampling import KeptSets
from rollcorr.engines.base import TokenBatch
from rollcorr.engines.fused_scoring import score_responses_fused
from rollcorr.engines.response_scoring import response_logits, score_responses
from rollcorr.train.grpo.policy import load_policy

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
FAMILIES = {
    "qwen3, tied": {"model_type": "qwen3"},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "granite, logits divided": {"model_type": "granite", "logits_scaling": 5.0},
    "cohere, logits multiplied": {"model_type": "cohere", "logit_scale": 0.25},
    "phi, bias": {"model_type": "phi"},
}


def make_model(**config):
    fields = SHAPE | config
    if fields["model_type"] == "phi":
        fields["num_key_value_heads"] = 2
        del fields["head_dim"]
    model = load_policy(None, config=fields).model.eval()
    for parameter in model.parameters():  # logits that are far from uniform
        parameter.data.mul_(3.0)
    if model.get_output_embeddings().bias is not None:
        nn.init.normal_(model.get_output_embeddings().bias)
    return model


def make_tokens():
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (torch.randint(256, (3, n), generator=generator) for n in (4, 6))
    lengths = torch.tensor([6, 2, 4])
    prompt_mask = torch.arange(4) >= torch.tensor([0, 2, 3])[:, None]
    return TokenBatch(prompts, prompt_mask, responses, torch.arange(6) < lengths[:, None])


def scored(model, scores, mask):
    """Log-probs, and the gradient of every parameter."""
    model.zero_grad()
    log_prob = scores(model).log_prob.masked_fill(~mask, 0.0)
    weights = torch.arange(log_prob.numel()).view(log_prob.shape).cos()
    (log_prob * weights).sum().backward()
    return log_prob.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_from_logits(family):
    model, tokens = make_model(**FAMILIES[family]), make_tokens()
    head = model.get_output_embeddings()
    expected, gradients = scored(model, lambda m: score_responses(m, tokens, temperature=0.7), tokens.response_mask)
    actual, others = scored(model, lambda m: score_responses_fused(m, tokens, temperature=0.7), tokens.response_mask)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    assert model.get_output_embeddings() is head, "the head is back in place"


def test_entropies_equal_those_from_logits(micro_policy):
    tokens = make_tokens()
    expected = score_responses(micro_policy.model, tokens).entropy
    actual = score_responses_fused(micro_policy.model, tokens, entropy=True).entropy
    torch.testing.assert_close(actual[tokens.response_mask], expected[tokens.response_mask], atol=2e-6, rtol=0)
    assert actual[~tokens.response_mask].isnan().all()


def test_kept_sets_are_replayed(micro_policy):
    model, tokens = micro_policy.model, make_tokens()
    packed = KeptSets.of([[t, 3 * t + 1, 200] for t in range(int(tokens.response_mask.sum()))])
    kept = packed.padded(tokens.response_mask)
    logits = response_logits(model, tokens)
    expected = kept_log_prob(logits, tokens.response_ids, kept, temperature=0.5)
    actual = score_responses_fused(model, tokens, kept=kept, temperature=0.5)
    mask = tokens.response_mask
    torch.testing.assert_close(actual.log_prob[mask], expected.log_prob[mask], atol=2e-6, rtol=0)
    assert torch.equal(actual.outside[mask], expected.outside[mask])


@pytest.mark.parametrize("replayed", [False, True])
def test_a_tied_head_s_gradient_is_added_where_it_belongs(micro_policy, replayed):
    model, tokens = micro_policy.model, make_tokens()
    mask, weight = tokens.response_mask, model.get_output_embeddings().weight
    kept = KeptSets.of([[t, 99] for t in range(int(mask.sum()))]).padded(mask) if replayed else None
    _, expected = scored(model, lambda m: score_responses_fused(m, tokens, kept=kept), mask)
    other = copy.deepcopy(model)
    other.zero_grad()
    tied = other.get_output_embeddings().weight
    tied.grad = torch.zeros_like(tied)

    def accumulating(m):
        tied.grad = torch.zeros_like(tied)
        return score_responses_fused(m, tokens, kept=kept, accumulate_into=tied.grad)

    _, actual = scored(other, accumulating, mask)
    assert weight is model.get_input_embeddings().weight
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_capped_logits_are_refused():
    model = make_model(model_type="gemma2")
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM bends its logits \(final_logit_softcapping=30.0\)"):
        score_responses_fused(model, make_tokens())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_change_of_logits_that_no_configuration_tells_is_refused(micro_policy, in_place):
    model = micro_policy.model
    model.forward, original = lambda **inputs: bent(original(**inputs), in_place), model.forward
    with pytest.raises(ValueError, match="changes its logits in a way that is not known here"):
        score_responses_fused(model, make_tokens())
    assert type(model.get_output_embeddings()) is nn.Linear


def bent(output, in_place):
    output.logits = output.logits.detach().tanh_() if in_place else output.logits.tanh()
    return output


def test_a_head_that_is_not_linear_is_refused(micro_policy):
    model = micro_policy.model
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(TypeError, match=r"output head of Qwen3ForCausalLM is Sequential, .* or use score_responses"):
        score_responses_fused(model, make_tokens())
    with pytest.raises(TypeError, match="output head of Linear is NoneType"):
        score_responses_fused(nn.Linear(2, 2), make_tokens())
