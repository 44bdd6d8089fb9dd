"""The embedded engine: what it samples, what it says about it, and that a weight update arrives whole."""

import dataclasses

import pytest
import torch

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import WeightSyncError, check_weight_sync
from rollcorr.engines.scoring import score_responses
from rollcorr.engines.transformers import TransformersEngine

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def make_engine(policy, *, cls=TransformersEngine, dtype=torch.bfloat16, tokens=12, batch_size=None, **sampling):
    return cls(
        policy.model,
        sampling=SamplingSpec(**sampling),
        max_new_tokens=tokens,
        eos_token_id=policy.eos_token_id,
        pad_token_id=policy.pad_token_id,
        dtype=dtype,
        batch_size=batch_size,
    )


def test_equal_seeds_give_equal_tokens_and_leave_the_global_generator_alone(micro_policy):
    engine = make_engine(micro_policy)
    before = torch.get_rng_state()
    first, again, other = (engine.generate(PROMPTS, seed=seed).tokens.response_ids for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


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


def test_a_response_ends_with_its_end_token(micro_policy):
    with torch.no_grad():  # make the end token likely: its embedding is also its output row
        micro_policy.model.get_input_embeddings().weight[micro_policy.eos_token_id] *= 40
    tokens = make_engine(micro_policy, tokens=20).generate(PROMPTS * 8, seed=0).tokens
    ended = (tokens.response_ids == micro_policy.eos_token_id).any(1)
    assert ended.any()
    for ids, mask in zip(tokens.response_ids[ended], tokens.response_mask[ended], strict=True):
        length = int(mask.sum())
        assert mask[:length].all()
        assert ids[length - 1] == micro_policy.eos_token_id
        assert (ids[: length - 1] != micro_policy.eos_token_id).all()


def test_a_truncated_distribution_is_renormalised_over_what_it_keeps(micro_policy):
    rollout = make_engine(micro_policy, dtype=torch.float32, top_k=1, logprobs="processed").generate(PROMPTS, seed=0)
    mask = rollout.tokens.response_mask
    assert (rollout.rollout_log_prob[mask] == 0).all()  # the only token kept has probability 1
    assert (rollout.raw_log_prob[mask] < -1).all()


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


def test_a_rollout_names_its_engine_and_policy_version(micro_policy):
    engine = make_engine(micro_policy)
    engine.update_weights(micro_policy.model, version=7)
    sampling = engine.generate(PROMPTS, seed=0).sampling
    assert (sampling.engine, sampling.policy_version, engine.weight_version) == ("transformers", 7, 7)


def test_an_update_brings_the_new_weights(micro_policy):
    engine = make_engine(micro_policy)
    tokens = engine.generate(PROMPTS, seed=0).tokens
    before = engine.score(tokens)
    with torch.no_grad():
        for parameter in micro_policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(engine.score(tokens), before)
    engine.update_weights(micro_policy.model, version=1)
    assert not torch.allclose(engine.score(tokens), before, atol=0.01)


class ForgetsOneParameter(TransformersEngine):
    """An engine whose copy leaves one parameter behind, as reloads that miss a tied head do."""

    forgotten = "model.layers.1.mlp.up_proj.weight"

    def _copy_weights(self, model):
        kept = dict(self.model.named_parameters())[self.forgotten].clone()
        super()._copy_weights(model)
        dict(self.model.named_parameters())[self.forgotten].copy_(kept)


@pytest.mark.parametrize(
    "forgotten", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_a_forgotten_parameter_is_an_incomplete_sync_even_after_a_small_step(micro_policy, forgotten):
    engine = make_engine(micro_policy, cls=type("Forgets", (ForgetsOneParameter,), {"forgotten": forgotten}))
    with torch.no_grad():
        for parameter in micro_policy.model.parameters():
            parameter.mul_(1.02)
    with pytest.raises(WeightSyncError, match="weight sync incomplete"):
        engine.update_weights(micro_policy.model, version=1)


def test_a_probe_that_is_not_a_number_is_an_incomplete_sync():
    with pytest.raises(WeightSyncError, match="nan nats"):
        check_weight_sync(torch.tensor([[torch.nan]]), torch.zeros(1, 1), tolerance=1.0)


def test_exported_weights_restore_an_older_policy(micro_policy):
    engine = make_engine(micro_policy)
    tokens = engine.generate(PROMPTS, seed=0).tokens
    before, weights = engine.score(tokens), {name: w.clone() for name, w in engine.export_weights().items()}
    with torch.no_grad():
        for parameter in micro_policy.model.parameters():
            parameter.mul_(1.5)
    engine.update_weights(micro_policy.model, version=3)
    engine.import_weights(weights, version=0)
    assert torch.equal(engine.score(tokens), before)
    assert engine.weight_version == 0


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
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
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
