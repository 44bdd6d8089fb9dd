"""Tests that every engine must pass: subclass `EngineContract` in a test file and define how to make yours.

A subclass defines `make` and `forgetful`, and sets its noise. Tests change the policy and pass it to
`update_weights`, so an engine that starts slowly may override the fixture `engine` with one that is made once and
gets the fresh policy's weights each time.
"""

import copy

import pytest
import torch

from rollcorr import check_compatible
from rollcorr.config import SamplingSpec
from rollcorr.core.sampling import check_kept_sets
from rollcorr.correction.scoring import actor_log_prob
from rollcorr.engines.base import WeightSyncError
from rollcorr.engines.response_scoring import score_responses, vocabulary_size

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
NEW_TOKENS = 12
TRUNCATED = SamplingSpec(temperature=0.7, top_p=0.8, top_k=8, logprobs="processed")


def policy_log_prob(policy, tokens):
    with torch.no_grad():
        return score_responses(policy.model, tokens).log_prob


def change(policy, *, by=0.05, seed=1):
    """Return a different policy in the same module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def favor_the_end(policy):
    """Make the end token likely: its embedding is also its output row."""
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[policy.eos_token_id] *= 40


def sharpen(policy):
    """Make some tokens likely and most unlikely, so that a temperature or a truncation shows."""
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(6)


class EngineContract:
    """Tests of an engine that samples at temperature 1, untruncated, at most `NEW_TOKENS` tokens.

    Attributes:
        name: the engine's name in its `SamplingSpec`.
        noise: nats by which a log-prob may differ from the float32 policy's.
        rescoring_noise: nats by which `score` may differ from the log-probs of `generate`.
    """

    name: str
    noise: float
    rescoring_noise: float

    def make(self, policy):
        """An engine with the weights of `policy`."""
        raise NotImplementedError

    def forgetful(self, policy, parameter):
        """The same, but its updates leave the named parameter behind."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self, micro_policy):
        return micro_policy

    @pytest.fixture
    def engine(self, policy):
        return self.make(policy)

    def test_equal_seeds_give_equal_rollouts_and_leave_the_global_generator_alone(self, engine):
        before = torch.get_rng_state()
        first, again, other = (engine.generate(PROMPTS, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first.tokens.response_ids, again.tokens.response_ids)
        assert torch.equal(first.rollout_log_prob, again.rollout_log_prob)
        assert first.tokens.response_ids.tolist() != other.tokens.response_ids.tolist()
        assert torch.equal(torch.get_rng_state(), before)

    def test_every_prompt_is_answered_in_its_place(self, engine, policy):
        tokens = engine.generate(PROMPTS, seed=0).tokens
        given = zip(tokens.prompt_ids, tokens.prompt_mask, strict=True)
        assert [ids[mask].tolist() for ids, mask in given] == PROMPTS
        lengths = tokens.response_mask.sum(1)
        assert ((lengths >= 1) & (lengths <= NEW_TOKENS)).all()
        assert torch.equal(
            tokens.response_mask, torch.arange(tokens.response_mask.shape[1]) < lengths[:, None].to("cpu")
        )
        assert (tokens.response_ids[~tokens.response_mask] == policy.pad_token_id).all()
        assert ((tokens.response_ids >= 0) & (tokens.response_ids < vocabulary_size(policy.model))).all()

    def test_log_probs_are_those_of_the_policy_within_the_noise(self, engine, policy):
        rollout = engine.generate(PROMPTS * 4, seed=0)
        mask = rollout.tokens.response_mask
        assert rollout.rollout_log_prob.dtype == torch.float32
        assert (rollout.rollout_log_prob[~mask] == 0).all()
        difference = (rollout.rollout_log_prob - policy_log_prob(policy, rollout.tokens))[mask].abs()
        assert difference.max() <= self.noise

    def test_scoring_gives_what_sampling_said(self, engine):
        rollout = engine.generate(PROMPTS * 4, seed=0)
        mask = rollout.tokens.response_mask
        difference = (engine.score(rollout.tokens) - rollout.rollout_log_prob)[mask].abs()
        assert difference.max() <= self.rescoring_noise

    def test_tokens_are_drawn_as_often_as_their_log_probs_say(self, engine, policy):
        """The mean log-prob of a draw is minus the entropy; a different temperature or a truncation moves it."""
        sharpen(policy)
        engine.update_weights(policy.model, version=1)
        draws = 400
        tokens = engine.generate([[1, 2, 3]] * draws, seed=0).tokens
        with torch.no_grad():
            logits = policy.model(torch.tensor([[1, 2, 3]])).logits[0, -1].double()
        log_prob = logits.log_softmax(-1)
        mean = (log_prob.exp() * log_prob).sum()
        deviation = ((log_prob.exp() * log_prob**2).sum() - mean**2).sqrt()
        assert deviation > 0.5
        drawn = log_prob[tokens.response_ids[:, 0].cpu()]
        assert abs(drawn.mean() - mean) < 4 * deviation / draws**0.5

    def test_a_response_ends_with_its_end_token_and_its_log_prob(self, engine, policy):
        favor_the_end(policy)
        engine.update_weights(policy.model, version=1)
        rollout = engine.generate(PROMPTS * 8, seed=0)
        tokens, expected = rollout.tokens, policy_log_prob(policy, rollout.tokens)
        ended = (tokens.response_ids == policy.eos_token_id).any(1)
        assert ended.any()
        for row in torch.where(ended)[0].tolist():
            last = int(tokens.response_mask[row].sum()) - 1
            assert tokens.response_ids[row, last] == policy.eos_token_id
            assert (tokens.response_ids[row, :last] != policy.eos_token_id).all()
            # the favored row is forty times as large, and so is its rounding
            assert abs(rollout.rollout_log_prob[row, last] - expected[row, last]) <= 40 * self.noise

    def test_a_rollout_says_who_drew_it_and_can_be_subtracted_from(self, engine, policy):
        engine.update_weights(policy.model, version=7)
        sampling = engine.generate(PROMPTS, seed=0).sampling
        assert (sampling.engine, sampling.policy_version, engine.weight_version) == (self.name, 7, 7)
        assert sampling.engine_version
        assert check_compatible(sampling, sampling.for_actor("full")).verdict == "same"

    def test_an_update_brings_the_new_weights(self, engine, policy):
        tokens = engine.generate(PROMPTS, seed=0).tokens
        mask, before = tokens.response_mask, engine.score(tokens)
        change(policy)
        assert torch.equal(engine.score(tokens), before)  # it has a copy
        engine.update_weights(policy.model, version=1)
        after = engine.score(tokens)
        assert (after - policy_log_prob(policy, tokens))[mask].abs().max() <= 2 * self.noise
        assert (after - before)[mask].abs().max() > 4 * self.noise

    def test_the_policy_is_left_as_it_was(self, engine, policy):
        before = copy.deepcopy(policy.model.state_dict())
        flags = [(p.requires_grad, p.dtype) for p in policy.model.parameters()]
        modules = [name for name, _ in policy.model.named_modules()]
        engine.update_weights(policy.model, version=1)
        engine.generate(PROMPTS, seed=0)
        assert all(torch.equal(value, policy.model.state_dict()[name]) for name, value in before.items())
        assert flags == [(p.requires_grad, p.dtype) for p in policy.model.parameters()]
        assert modules == [name for name, _ in policy.model.named_modules()]

    def test_what_comes_out_can_be_changed_without_changing_the_engine(self, engine, policy):
        prompts = copy.deepcopy(PROMPTS)
        rollout = engine.generate(prompts, seed=0)
        kept = copy.deepcopy(rollout)
        prompts[0][0] = 99
        rollout.tokens.response_ids.fill_(0)
        rollout.rollout_log_prob.fill_(0)
        engine.update_weights(policy.model, version=3)
        again = engine.generate(PROMPTS, seed=0)
        assert torch.equal(again.tokens.response_ids, kept.tokens.response_ids)
        assert torch.equal(again.rollout_log_prob, kept.rollout_log_prob)
        assert rollout.sampling == kept.sampling  # an update renames no rollout that is out already
        assert again.sampling.policy_version == 3

    def test_exported_weights_restore_an_older_policy(self, engine, policy):
        tokens = engine.generate(PROMPTS, seed=0).tokens
        before, weights = engine.score(tokens), {name: w.clone() for name, w in engine.export_weights().items()}
        change(policy)
        engine.update_weights(policy.model, version=3)
        assert not torch.equal(engine.score(tokens), before)
        engine.import_weights(weights, version=0)
        assert torch.equal(engine.score(tokens), before)
        assert engine.weight_version == 0

    @pytest.mark.parametrize(
        "forgotten", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
    )
    def test_a_forgotten_parameter_is_an_incomplete_sync_even_after_a_small_step(self, policy, forgotten):
        engine = self.forgetful(policy, forgotten)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.02)
        with pytest.raises(WeightSyncError, match="weight sync incomplete"):
            engine.update_weights(policy.model, version=1)
        assert engine.weight_version == 0

    @pytest.mark.parametrize("prompts", [[], [[1], []]])
    def test_an_empty_prompt_is_refused(self, engine, prompts):
        with pytest.raises(ValueError, match="every prompt needs at least one token"):
            engine.generate(prompts, seed=0)


class KeptSetContract:
    """In addition to `EngineContract`, of an engine that reports which ids it could draw.

    A subclass defines `make_truncated`: an engine with the policy's weights that samples with `TRUNCATED`.
    """

    noise: float

    def make_truncated(self, policy):
        raise NotImplementedError

    def test_replaying_the_kept_sets_gives_the_log_probs_of_the_engine(self, policy):
        sharpen(policy)
        rollout = self.make_truncated(policy).generate(PROMPTS * 4, seed=0)
        mask = rollout.tokens.response_mask
        check_kept_sets(rollout.kept, tokens=int(mask.sum()), vocabulary=vocabulary_size(policy.model))
        sizes = rollout.kept.offsets.diff()
        assert sizes.min() >= 1
        assert 1 < sizes.max() <= TRUNCATED.top_k
        spec = rollout.sampling.for_actor("replay")
        assert check_compatible(rollout.sampling, spec).verdict == "same"
        ids, width = rollout.tokens.response_ids, mask.shape[1]
        given = torch.cat([rollout.tokens.prompt_mask, mask], dim=1).long()
        with torch.no_grad():
            logits = policy.model(
                torch.cat([rollout.tokens.prompt_ids, ids], dim=1),
                attention_mask=given,
                position_ids=(given.cumsum(1) - 1).clamp(min=0),
            ).logits[:, -width - 1 : -1]
        replayed, outside = actor_log_prob(logits, ids, spec, kept=rollout.kept.padded(mask))
        assert not outside[mask].any()
        assert (replayed - rollout.rollout_log_prob)[mask].abs().max() <= 10 * self.noise  # sharp: six times, over 0.7
        assert rollout.rollout_log_prob[mask].min() < -0.5
        if rollout.log_kept_mass is not None:
            whole = (logits / TRUNCATED.temperature).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
            mass = whole - replayed
            assert (mass - rollout.log_kept_mass)[mask].abs().max() <= 10 * self.noise
            assert mass[mask].min() < -0.05
