"""The embedded engine: behavior of this engine only, beyond the contract."""

import dataclasses
from types import MethodType, SimpleNamespace

import pytest
import torch
import transformers

from rollcorr.config import SamplingSpec
from rollcorr.core.logprobs import kept_log_prob
from rollcorr.core.sampling import check_kept_sets
from rollcorr.correction.scoring import actor_log_prob
from rollcorr.engines.base import (
    EngineAnswerError,
    EngineUnavailableError,
    GenerationSettings,
    WeightSyncError,
    check_weight_sync,
)
from rollcorr.engines.response_scoring import response_logits, score_responses
from rollcorr.engines.transformers import TransformersEngine, generate_continuously

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def make_engine(policy, *, cls=TransformersEngine, dtype=torch.bfloat16, tokens=12, **sampling):
    own = {name: sampling.pop(name) for name in ("batch_size", "continuous_batching") if name in sampling}
    return cls(
        policy.model,
        GenerationSettings(
            sampling=SamplingSpec(**sampling),
            max_new_tokens=tokens,
            eos_token_id=policy.eos_token_id,
            pad_token_id=policy.pad_token_id,
        ),
        dtype=dtype,
        **own,
    )


def test_log_probs_of_a_float32_engine_are_those_of_the_policy(micro_policy):
    rollout = make_engine(micro_policy, dtype=torch.float32, temperature=0.7, logprobs="processed").generate(
        PROMPTS, seed=0
    )
    mask = rollout.tokens.response_mask
    with torch.no_grad():
        raw, processed = (
            score_responses(micro_policy.model, rollout.tokens, temperature=t).log_prob for t in (1.0, 0.7)
        )
    torch.testing.assert_close(rollout.raw_log_prob[mask], raw[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.rollout_log_prob[mask], processed[mask], atol=1e-5, rtol=0)


def test_a_bfloat16_engine_differs_from_the_policy_a_little(micro_policy):
    rollout = make_engine(micro_policy).generate(PROMPTS, seed=0)
    with torch.no_grad():
        policy = score_responses(micro_policy.model, rollout.tokens).log_prob
    difference = (rollout.rollout_log_prob - policy)[rollout.tokens.response_mask].abs()
    assert 1e-6 < difference.max() < 0.05
    assert rollout.rollout_log_prob.dtype == torch.float32


def test_only_parameters_are_rounded(micro_policy):
    model = make_engine(micro_policy).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert {p.dtype for p in micro_policy.model.parameters()} == {torch.float32}


def test_a_model_whose_forward_a_trainer_replaced_is_copied_whole(micro_policy):
    """TRL's fused head keeps the bound `forward` of the original, which a copy of that function would call."""
    original = micro_policy.model.forward
    micro_policy.model.forward = MethodType(lambda _, *args, **inputs: original(*args, **inputs), micro_policy.model)
    engine = make_engine(micro_policy)
    tokens = engine.generate(PROMPTS, seed=0).tokens
    scores = engine.score(tokens)
    with torch.no_grad():
        for weight in micro_policy.model.parameters():
            weight.mul_(1.5)
    assert torch.equal(engine.score(tokens), scores)


def test_a_truncated_distribution_is_renormalized_over_what_it_keeps(micro_policy):
    rollout = make_engine(micro_policy, dtype=torch.float32, top_k=1, logprobs="processed").generate(PROMPTS, seed=0)
    mask = rollout.tokens.response_mask
    assert (rollout.rollout_log_prob[mask] == 0).all()  # the only token kept has probability 1
    assert (rollout.raw_log_prob[mask] < -1).all()


def test_the_kept_sets_are_what_could_be_sampled(micro_policy):
    """Top-k 3 in float32: the three likeliest tokens of the policy itself at each response token, row after row."""
    settings = {"top_k": 3, "temperature": 0.7, "logprobs": "processed"}
    rollout = make_engine(micro_policy, dtype=torch.float32, **settings).generate(PROMPTS, seed=0)
    tokens, mask = rollout.tokens, rollout.tokens.response_mask
    with torch.no_grad():
        logits = response_logits(micro_policy.model, tokens)[mask]
    check_kept_sets(rollout.kept, tokens=int(mask.sum()), vocabulary=logits.shape[-1])
    assert torch.equal(rollout.kept.ids.view(-1, 3).long(), logits.topk(3).indices.sort().values)
    mass = (logits / 0.7).softmax(-1).gather(-1, rollout.kept.ids.view(-1, 3).long()).sum(-1).log()
    torch.testing.assert_close(rollout.log_kept_mass[mask], mass, atol=1e-5, rtol=0)
    assert (rollout.log_kept_mass[~mask] == 0).all()


def test_kept_sets_follow_the_rows_whatever_the_chunks_and_the_lengths(micro_policy):
    with torch.no_grad():  # some responses end early
        micro_policy.model.get_input_embeddings().weight[micro_policy.eos_token_id] *= 20
    settings = {"top_p": 0.8, "logprobs": "processed", "dtype": torch.float32, "tokens": 9}
    rollout = make_engine(micro_policy, batch_size=3, **settings).generate(PROMPTS * 2, seed=0)
    mask = rollout.tokens.response_mask
    assert len(set(mask.sum(1).tolist())) > 1
    with torch.no_grad():
        logits = response_logits(micro_policy.model, rollout.tokens)[mask]
    log_prob, outside = kept_log_prob(logits, rollout.tokens.response_ids[mask], rollout.kept)
    assert not outside.any()
    torch.testing.assert_close(log_prob, rollout.rollout_log_prob[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"min_new_tokens": 2}, {"repetition_penalty": 1.2}])
def test_nothing_is_kept_where_nothing_truncates(micro_policy, settings):
    rollout = make_engine(micro_policy, logprobs="processed", **settings).generate(PROMPTS, seed=0)
    assert (rollout.kept, rollout.log_kept_mass) == (None, None)


def test_defaults_hidden_in_a_checkpoint_do_not_shape_the_sampling(micro_policy):
    micro_policy.model.generation_config.top_k = 1
    micro_policy.model.generation_config.temperature = 0.1
    rollout = make_engine(micro_policy, logprobs="processed").generate(PROMPTS, seed=0)
    assert torch.equal(rollout.raw_log_prob, rollout.rollout_log_prob)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_sampling_in_chunks_answers_every_prompt(micro_policy, batch_size):
    tokens = make_engine(micro_policy, batch_size=batch_size).generate(PROMPTS, seed=0).tokens
    assert len(tokens) == len(PROMPTS)
    assert [row[mask].tolist() for row, mask in zip(tokens.prompt_ids, tokens.prompt_mask, strict=True)] == PROMPTS
    assert tokens.response_mask.any(1).all()


def test_a_probe_that_is_not_a_number_is_an_incomplete_sync():
    with pytest.raises(WeightSyncError, match="nan nats"):
        check_weight_sync(torch.tensor([[torch.nan]]), torch.zeros(1, 1), tolerance=1.0)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_unsupported_penalties_are_refused(micro_policy, penalty):
    with pytest.raises(ValueError, match=f"{penalty}=0.5 is not supported"):
        make_engine(micro_policy, **{penalty: 0.5})


@pytest.mark.parametrize("setting", [{"logit_bias": {3: 1.0}}, {"logprobs": "tempered"}])
def test_what_the_engine_does_not_do_is_refused(micro_policy, setting):
    with pytest.raises(ValueError, match="biases no logits and returns raw or processed log-probs"):
        make_engine(micro_policy, **setting)


def test_bad_settings_are_refused(micro_policy):
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        make_engine(micro_policy, tokens=0)
    with pytest.raises(ValueError, match=r"batch_size .* must be >= 1; got 0"):
        make_engine(micro_policy, batch_size=0)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        make_engine(micro_policy, temperature=0.0)


def test_min_new_tokens_forbids_an_early_end(micro_policy):
    with torch.no_grad():
        micro_policy.model.get_input_embeddings().weight[micro_policy.eos_token_id] *= 40
    tokens = make_engine(micro_policy, tokens=6, min_new_tokens=4).generate(PROMPTS * 8, seed=0).tokens
    assert (tokens.response_mask.sum(1) >= 5).all()


def test_the_spec_given_is_kept_apart_from_what_the_engine_adds(micro_policy):
    sampling = SamplingSpec(top_p=0.9, logprobs="processed")
    engine = make_engine(micro_policy, top_p=0.9, logprobs="processed")
    assert dataclasses.replace(engine.sampling, engine=None, engine_version=None, policy_version=None) == sampling


CONTINUOUS = {"num_blocks": 8, "page_size": 32, "max_batch_tokens": 64}


def test_continuous_batching_draws_and_reports_what_generate_does(micro_policy):
    """Equal seeds return equal tokens, log-probs are the policy's, processed, and the generator is unchanged."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this release of transformers has no log-probs from continuous batching")
    settings = {"temperature": 0.7, "top_k": 3, "logprobs": "processed", "dtype": torch.float32, "tokens": 5}
    engine = make_engine(micro_policy, continuous_batching=CONTINUOUS, **settings)
    before = torch.get_rng_state()
    first, again = (engine.generate(PROMPTS, seed=3) for _ in range(2))
    assert torch.equal(first.tokens.response_ids, again.tokens.response_ids)
    assert torch.equal(torch.get_rng_state(), before)
    assert (first.kept, first.raw_log_prob) == (None, None)
    mask = first.tokens.response_mask
    with torch.no_grad():
        logits = response_logits(micro_policy.model, first.tokens)[mask]
    expected = actor_log_prob(logits, first.tokens.response_ids[mask], first.sampling.for_actor("recompute"))
    assert not expected.outside.any()
    torch.testing.assert_close(first.rollout_log_prob[mask], expected.log_prob, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logprobs": "raw"}, "returns processed log-probs alone"),
        ({"min_p": 0.1}, "min_p=0.1 is not supported by continuous batching, which would leave it out; set min_p=0"),
        ({"repetition_penalty": 1.2}, "set repetition_penalty=1"),
        ({"min_new_tokens": 2}, "set min_new_tokens=0"),
    ],
)
def test_continuous_batching_refuses_what_it_would_leave_out(micro_policy, settings, message):
    with pytest.raises(ValueError, match=message):
        make_engine(micro_policy, continuous_batching=CONTINUOUS, **{"logprobs": "processed"} | settings)


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({}, EngineUnavailableError, "answered 0 of 1 prompts"),
        ({"req_0": SimpleNamespace(error="out of blocks", prompt_ids=[1])}, EngineAnswerError, "out of blocks"),
        ({"req_0": SimpleNamespace(error=None, prompt_ids=[2])}, EngineAnswerError, "of another prompt"),
    ],
)
def test_what_continuous_batching_leaves_unanswered_is_an_error(answers, error, message):
    model = SimpleNamespace(generate_batch=lambda *_, **__: answers)
    with pytest.raises(error, match=message):
        generate_continuously(model, [[1]], None, options={}, seed=0)
