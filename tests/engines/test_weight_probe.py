"""Probes of an engine's weights: they separate stale weights, dropout and noise, and the run stays as it was."""

import random

import numpy as np
import pytest
import torch
from micro_policy import make_micro_policy
from torch import nn

from rollcorr.config import SamplingSpec
from rollcorr.correction.weight_probe import WeightProbe
from rollcorr.engines import GenerationSettings, TransformersEngine, score_responses
from rollcorr.engines.weight_probes import untouched

PROMPTS = [[1, 10 + row, 40 + row] for row in range(40)]


@pytest.fixture
def policy():
    return make_micro_policy().model.eval()


def engine_of(policy, **sampling):
    spec = SamplingSpec(**sampling)
    settings = GenerationSettings(sampling=spec, max_new_tokens=6, eos_token_id=2, pad_token_id=0)
    return TransformersEngine(policy, settings, dtype=torch.bfloat16)


def perturb(policy, size):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))


def probed(policy, engine, scorer=None):
    scorer = scorer or policy

    def score(rollout):
        return score_responses(scorer, rollout.tokens).log_prob

    return engine.probe(engine.generate(PROMPTS, seed=0), policy, score)


def test_causes_by_hand():
    one = torch.zeros(1, 2, dtype=torch.float64)
    names = ("sampled", "synced", "trained_again")

    def cause(*offsets):
        tensors = {name: one + offset for name, offset in zip(names, offsets, strict=True)}
        return WeightProbe.of(trained=one, response_mask=one + 1, **tensors).cause

    assert cause(0.1, 0.01, 0.0) == "stale weights"
    assert cause(0.1, 0.1, 0.1) == "dropout"
    assert cause(0.1, 0.1, 0.001) == "noise"
    assert cause(0.0, 0.0, 0.0) == "noise"
    with pytest.raises(ValueError, match="no sampled token"):
        WeightProbe.of(sampled=one, synced=one, trained=one, trained_again=one, response_mask=one)


def test_equal_weights_show_noise(policy):
    probe = probed(policy, engine_of(policy))
    assert probe.cause == "noise"
    assert 0 < probe.tokens <= 32 * 6
    assert probe.repeated_k3 == 0


def test_stale_weights_go_with_a_sync(policy):
    engine = engine_of(policy)
    perturb(policy, 0.05)
    before = {name: weight.clone() for name, weight in engine.export_weights().items()}
    probe = probed(policy, engine)
    assert probe.cause == "stale weights"
    assert probe.sampled_k3 > 10 * probe.synced_k3

    # The engine has its own weights back.
    assert engine.weight_version == 0
    assert all(torch.equal(weight, before[name]) for name, weight in engine.export_weights().items())


def test_dropout_differs_between_two_passes(policy):
    dropped = nn.Dropout(0.2)

    class Trainer(nn.Module):
        config = policy.config

        def forward(self, *args, **kwargs):
            output = policy(*args, **kwargs)
            output.logits = dropped(output.logits)
            return output

    assert probed(policy, engine_of(policy), Trainer()).cause == "dropout"


def test_a_truncated_engine_is_probed_over_its_kept_sets(policy):
    engine = engine_of(policy, top_k=5, temperature=0.7, logprobs="processed")
    rollout = engine.generate(PROMPTS, seed=0)
    seen = []

    def score(part):
        seen.append(part)
        return part.rollout_log_prob

    engine.probe(rollout, policy, score, rows=7)
    assert [len(part.tokens) for part in seen] == [7, 7]
    assert len(seen[0].kept) == int(seen[0].tokens.response_mask.sum())


def test_a_block_leaves_random_states_modes_and_buffers():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1))
    model[1].eval()
    states = (torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    buffers = [buffer.clone() for buffer in model.buffers()]
    with untouched(model):
        assert not model(torch.randn(8, 3)).requires_grad
        random.random()
        np.random.rand()  # noqa: NPY002
        model.eval()
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(*pair) for pair in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # noqa: NPY002
