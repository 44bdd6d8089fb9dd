"""CTranslate2: behavior of this engine only, beyond the contract."""

import copy
import gc
import sys
from pathlib import Path
from types import MethodType
from typing import ClassVar

import pytest
import torch
from engine_contract import PROMPTS, policy_log_prob
from stories import StoriesTokenizer, load_stories
from torch import nn

from rollcorr import check_compatible, correct
from rollcorr.config import SamplingSpec
from rollcorr.config.sampling_spec import IncompatibleSamplingError
from rollcorr.engines.base import EngineUnavailableError, GenerationSettings, WeightSyncError
from rollcorr.engines.ctranslate2 import CTranslate2Engine, rounded_to_bits
from rollcorr.engines.response_scoring import score_responses
from rollcorr.train.grpo.policy import Policy, load_policy


def make_engine(policy, *, cls=CTranslate2Engine, tokens=12, compute_type="float32", sampling=None, **options):
    return cls(
        policy.model,
        GenerationSettings(
            sampling=SamplingSpec(**(sampling or {})),
            max_new_tokens=tokens,
            eos_token_id=policy.eos_token_id,
            pad_token_id=policy.pad_token_id,
        ),
        compute_type=compute_type,
        threads=1,
        **options,
    )


def mismatch(policy, prompts, *, tokens=64):
    """k3 and the largest |log ratio| of a float32 trainer and an int8 engine with the same weights."""
    rollout = make_engine(policy, compute_type="int8", tokens=tokens).generate(prompts, seed=0)
    train, mask = policy_log_prob(policy, rollout.tokens), rollout.tokens.response_mask
    largest = (train - rollout.rollout_log_prob)[mask].abs().max()
    return correct(train, rollout.rollout_log_prob, mask, "disabled").metrics(prefix="")["k3_kl"], float(largest)


def test_int8_rollouts_of_the_demo_policy_differ_from_its_float32_trainer_as_int8_does():
    policy = load_policy("demo")
    prompts = [policy.encode(f"{a}+{b}=?\n") for a in range(11, 27) for b in (5, 38)]
    k3, largest = mismatch(policy, prompts)
    assert 1e-5 < k3 < 1e-3  # float32 differs by 1e-12, other weights by far more
    assert 0.02 < largest < 0.6


def test_int8_rollouts_of_a_pretrained_llama_have_the_published_mismatch():
    k3, largest = mismatch(Policy(load_stories(), StoriesTokenizer), [[1]] * 32, tokens=128)
    assert k3 == pytest.approx(1.6e-3, rel=0.25)
    assert largest == pytest.approx(0.50, rel=0.25)


def test_weights_come_back_to_a_policy_whose_forward_a_trainer_replaced(micro_policy):
    """The engine keeps a copy of the policy to verify weights on; it must not ask the original."""
    original = micro_policy.model.forward
    micro_policy.model.forward = MethodType(lambda _, *args, **inputs: original(*args, **inputs), micro_policy.model)
    engine = make_engine(micro_policy, compute_type="float32")
    weights = {name: 1.5 * weight for name, weight in engine.export_weights().items()}
    engine.import_weights(weights, version=3)
    assert engine.weight_version == 3


def test_a_llama_with_a_head_of_its_own_is_converted_too():
    from transformers import LlamaConfig, LlamaForCausalLM

    class Tokenizer:
        eos_token_id, pad_token_id = 2, 0

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    policy = Policy(LlamaForCausalLM(config).eval(), Tokenizer)
    rollout = make_engine(policy).generate(PROMPTS, seed=0)
    mask = rollout.tokens.response_mask
    difference = (rollout.rollout_log_prob - policy_log_prob(policy, rollout.tokens))[mask].abs()
    assert difference.max() < 1e-4


@pytest.mark.parametrize("prompts", [PROMPTS, [[5], [6, 7, 8, 9]], [[5, 6], [7, 8, 9], [5, 6], [1]]])
def test_prompts_of_any_lengths_are_continued_from_their_last_token(micro_policy, prompts):
    """In one mixed batch with a prompt of one token, CTranslate2 4.8.5 returns prompt tokens as drawn ones."""
    rollout = make_engine(micro_policy).generate(prompts, seed=0)
    mask = rollout.tokens.response_mask
    difference = (rollout.rollout_log_prob - policy_log_prob(micro_policy, rollout.tokens))[mask].abs()
    assert difference.max() < 1e-4
    assert (mask.sum(1) == 12).all()


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_sampling_in_chunks_answers_every_prompt_and_scores_alike(micro_policy, batch_size):
    prompts = [[row, row + 1] for row in range(1, 8)]
    engine = make_engine(micro_policy, batch_size=batch_size)
    rollout = engine.generate(prompts, seed=0)
    assert rollout.tokens.prompt_ids.tolist() == prompts
    mask = rollout.tokens.response_mask
    torch.testing.assert_close(engine.score(rollout.tokens)[mask], rollout.rollout_log_prob[mask], atol=1e-4, rtol=0)


def test_log_probs_stay_raw_whatever_the_temperature_and_truncation(micro_policy):
    with torch.no_grad():  # a distribution that a temperature changes
        micro_policy.model.model.norm.weight.mul_(6)
    engine = make_engine(micro_policy, sampling={"temperature": 0.5, "top_k": 5, "top_p": 0.9})
    rollout = engine.generate(PROMPTS, seed=0)
    mask = rollout.tokens.response_mask
    raw = policy_log_prob(micro_policy, rollout.tokens)
    torch.testing.assert_close(rollout.rollout_log_prob[mask], raw[mask], atol=1e-4, rtol=0)
    assert torch.equal(rollout.rollout_log_prob, rollout.raw_log_prob)
    with torch.no_grad():
        tempered = score_responses(micro_policy.model, rollout.tokens, temperature=0.5).log_prob
    torch.testing.assert_close(engine.score(rollout.tokens)[mask], tempered[mask], atol=2e-4, rtol=0)
    with pytest.raises(IncompatibleSamplingError, match="sample at temperature 1 without truncation"):
        check_compatible(rollout.sampling, rollout.sampling.for_actor("full"))


def test_top_k_1_takes_the_likeliest_token(micro_policy):
    tokens = make_engine(micro_policy, sampling={"top_k": 1}).generate(PROMPTS, seed=0).tokens
    for prompt, response in zip(PROMPTS, tokens.response_ids.tolist(), strict=True):
        with torch.no_grad():
            logits = micro_policy.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == response


@pytest.mark.parametrize(
    "setting",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"min_new_tokens": 4},
    ],
)
def test_what_the_engine_lacks_or_mixes_into_its_log_probs_is_refused(micro_policy, setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* is not supported by the ctranslate2 engine"):
        make_engine(micro_policy, sampling=setting)


@pytest.mark.parametrize("kind", ["tempered", "processed"])
def test_other_kinds_of_log_probs_are_refused(micro_policy, kind):
    with pytest.raises(ValueError, match="returns raw log-probs only; set logprobs='raw'"):
        make_engine(micro_policy, sampling={"logprobs": kind})


def test_bad_settings_are_refused(micro_policy):
    with pytest.raises(ValueError, match="max_new_tokens must be"):
        make_engine(micro_policy, tokens=0)
    with pytest.raises(ValueError, match="batch_size"):
        make_engine(micro_policy, batch_size=0)
    with pytest.raises(ValueError, match="compute_type must be one of 'int8', 'int16', 'float32'"):
        make_engine(micro_policy, compute_type="int4")
    with pytest.raises(ValueError, match="temperature must be > 0"):
        make_engine(micro_policy, sampling={"temperature": 0.0})


@pytest.mark.parametrize("token", [258, -1])
def test_a_prompt_token_that_the_engine_would_read_as_unknown_is_refused(micro_policy, token):
    with pytest.raises(ValueError, match=f"prompt 1 has token id {token}, outside the vocabulary 0 … 257"):
        make_engine(micro_policy).generate([[1], [2, token]], seed=0)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**63 - 1])
def test_seeds_beyond_the_engines_own_repeat_themselves_too(micro_policy, seed):
    """2³² − 1 asks CTranslate2 for a random seed."""
    engine = make_engine(micro_policy)
    first, again = (engine.generate(PROMPTS, seed=seed).tokens.response_ids for _ in range(2))
    assert torch.equal(first, again)


def test_a_failed_update_leaves_the_previous_weights_in_place(micro_policy):
    class Halved(CTranslate2Engine):
        broken = False

        def _copy_to_cpu(self, model):
            twin = super()._copy_to_cpu(model)
            if self.broken:
                with torch.no_grad():
                    twin.model.norm.weight.mul_(0.5)
            return twin

    engine = make_engine(micro_policy, cls=Halved)
    tokens = engine.generate(PROMPTS, seed=0).tokens
    before = engine.score(tokens)
    engine.broken = True
    with pytest.raises(WeightSyncError):
        engine.update_weights(micro_policy.model, version=1)
    assert engine.weight_version == 0
    assert torch.equal(engine.score(tokens), before)
    assert torch.equal(engine.generate(PROMPTS, seed=0).tokens.response_ids, tokens.response_ids)
    assert all(torch.equal(w, micro_policy.model.state_dict()[name]) for name, w in engine.export_weights().items())


def test_fewer_bits_are_a_larger_mismatch(micro_policy):
    """Each bit less doubles the error of a weight, and k3 grows with its square."""
    divergence = {}
    for bits in (None, 8, 4, 2):
        engine = make_engine(micro_policy, tokens=32, weight_bits=bits)
        rollout = engine.generate(PROMPTS * 4, seed=0)
        train, mask = policy_log_prob(micro_policy, rollout.tokens), rollout.tokens.response_mask
        divergence[bits] = correct(train, rollout.rollout_log_prob, mask, "disabled").metrics(prefix="")["k3_kl"]
    assert 10 * divergence[None] < divergence[8] < divergence[4] / 10 < divergence[2] / 100


def test_a_grid_of_three_bits_by_hand(micro_policy):
    for weight in micro_policy.model.state_dict().values():
        rounded = rounded_to_bits(weight, 3)
        if weight.dim() < 2:
            assert torch.equal(rounded, weight)
            continue
        steps = (rounded / (weight.abs().amax(1, keepdim=True) / 3)).nan_to_num(0.0)  # the padding's row is 0
        torch.testing.assert_close(steps, steps.round(), atol=1e-5, rtol=0)
        assert steps.round().unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]
        assert ((rounded - weight).abs() <= weight.abs().amax(1, keepdim=True) / 6 * 1.00001).all()
    assert rounded_to_bits(torch.zeros(2, 3, device="cpu"), 4).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("bits", [1, 9])
def test_a_grid_has_two_to_eight_bits(micro_policy, bits):
    with pytest.raises(ValueError, match=rf"weight_bits .*got {bits}"):
        make_engine(micro_policy, weight_bits=bits)


def test_a_lost_parameter_is_noticed_under_any_rounding(micro_policy):
    class Frozen(CTranslate2Engine):
        lost: ClassVar[dict[str, torch.Tensor]] = {}

        def _copy_to_cpu(self, model):
            twin = super()._copy_to_cpu(model)
            for name, parameter in twin.named_parameters():
                parameter.data = self.lost.get(name, parameter.data)
            return twin

    engine = make_engine(micro_policy, cls=Frozen, weight_bits=4)
    name = "model.layers.0.mlp.up_proj.weight"
    engine.lost = {name: micro_policy.model.state_dict()[name].clone()}
    with torch.no_grad():
        micro_policy.model.get_parameter(name).mul_(1.5)
    with pytest.raises(WeightSyncError):
        engine.update_weights(micro_policy.model, version=1)


def test_a_bfloat16_policy_is_sampled_at_its_own_weights(micro_policy):
    exact = copy.deepcopy(micro_policy.model)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    for parameter in micro_policy.model.parameters():
        parameter.data = parameter.data.bfloat16()
    rollout = make_engine(micro_policy).generate(PROMPTS, seed=0)
    mask = rollout.tokens.response_mask
    expected = policy_log_prob(Policy(exact, micro_policy.tokenizer), rollout.tokens)
    torch.testing.assert_close(rollout.rollout_log_prob[mask], expected[mask], atol=1e-4, rtol=0)


def test_what_the_runtime_throws_is_an_engine_that_is_not_available(micro_policy, monkeypatch):
    class Dead:
        def generate_batch(self, *_, **__):
            raise RuntimeError("mkl: out of memory")

    engine = make_engine(micro_policy)
    monkeypatch.setattr(engine, "_load", lambda *_: Dead())
    with pytest.raises(EngineUnavailableError, match="CTranslate2 failed: mkl: out of memory"):
        engine.generate(PROMPTS, seed=0)


def test_a_model_that_cannot_be_converted_is_refused_by_name(micro_policy):
    class Config:
        def save_pretrained(self, directory):
            (Path(directory) / "config.json").write_text('{"model_type": "mamba"}')

    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = micro_policy.model
            self.config = Config()

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, **inputs):
            return self.inner(**inputs)

    with pytest.raises(ValueError, match="MambaConfig"):
        make_engine(Policy(Unknown(), micro_policy.tokenizer))


def test_the_garbage_collector_is_left_as_it_was(micro_policy):
    make_engine(micro_policy)
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        make_engine(micro_policy)
        assert gc.get_freeze_count() > frozen // 2  # somebody's frozen objects stay frozen
    finally:
        gc.unfreeze()


def test_without_the_package_the_error_names_the_extra(micro_policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ImportError, match=r"pip install 'rollcorr\[ctranslate2\]'"):
        make_engine(micro_policy)
