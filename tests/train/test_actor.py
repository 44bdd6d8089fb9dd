"""The trainer's log-probs of truncated rollouts: the softmax of each mode, and the remaining mismatch."""

import copy
import dataclasses
import math

import pytest
import torch
from stories import load_stories

from rollcorr.config import SamplingSpec
from rollcorr.config.sampling_spec import IncompatibleSamplingError
from rollcorr.core.divergence import k3 as k3_of
from rollcorr.core.sampling import KeptSets
from rollcorr.engines import GenerationSettings
from rollcorr.engines.base import EngineAnswerError
from rollcorr.engines.response_scoring import score_responses
from rollcorr.engines.transformers import TransformersEngine
from rollcorr.train.grpo import actor as actor_module
from rollcorr.train.grpo.actor import Actor, whole_scores
from rollcorr.train.grpo.grpo_config import ActorConfig
from rollcorr.train.grpo.policy import load_policy, make_tiny_policy
from rollcorr.train.grpo.tasks import ArithmeticTask

TRUNCATED = SamplingSpec(temperature=0.7, top_p=0.9, top_k=20, logprobs="processed")
TRUNCATED_RUN = tuple(
    f"rollout.sampling.{x}" for x in ("temperature=0.7", "top_p=0.9", "top_k=20", "logprobs=processed")
)
ACTORS = ("replay", "recompute", "kept_mass", "full")


def sample(model, prompts, *, eos=256, pad=257, dtype=torch.bfloat16, tokens=36, seed=0, sampling=TRUNCATED):
    settings = GenerationSettings(sampling=sampling, max_new_tokens=tokens, eos_token_id=eos, pad_token_id=pad)
    engine = TransformersEngine(model, settings, dtype=dtype)
    return engine.generate(prompts, seed=seed)


def arithmetic(policy, rows=256, seed=0):
    problems = ArithmeticTask(max_operand=99).problems(rows, seed=seed, step=1)
    return [policy.encode(problem.prompt) for problem in problems]


@torch.no_grad()
def log_ratio(model, rollout, spec):
    """(log π − log μ of the valid tokens in float64, tokens outside the support)."""
    scores = Actor.of(rollout, spec).score(model, rollout, torch.arange(len(rollout.tokens)))
    mask = rollout.tokens.response_mask
    outside = 0 if scores.outside is None else int(scores.outside[mask].sum())
    return (scores.log_prob - rollout.rollout_log_prob)[mask].double(), outside


@pytest.fixture
def truncated(micro_policy):
    return sample(micro_policy.model, [[1, 2, 3], [4], [5, 6]], dtype=torch.float32, tokens=8)


@pytest.mark.parametrize("actor", ["replay", "recompute", "kept_mass"])
def test_an_engine_in_the_trainers_precision_leaves_a_ratio_of_one(micro_policy, truncated, actor):
    difference, outside = log_ratio(micro_policy.model, truncated, truncated.sampling.for_actor(actor))
    assert difference.abs().max() < 1e-5
    assert outside == 0


def test_the_full_vocabulary_is_off_by_the_kept_mass(micro_policy, truncated):
    difference, _ = log_ratio(micro_policy.model, truncated, truncated.sampling.for_actor("full"))
    expected = truncated.log_kept_mass[truncated.tokens.response_mask].double()
    torch.testing.assert_close(difference, expected, atol=1e-5, rtol=0)
    assert expected.mean() < -1


def test_scores_of_some_rows_are_those_of_the_whole_batch(micro_policy, truncated):
    actor = Actor.of(truncated, truncated.sampling.for_actor("replay"))
    whole = actor.score(micro_policy.model, truncated, torch.arange(3))
    part = actor.score(micro_policy.model, truncated, torch.tensor([2, 0]))
    mask = truncated.tokens.response_mask[[2, 0]]
    for ours, theirs in zip(part, whole, strict=True):
        torch.testing.assert_close(ours[mask], theirs[[2, 0]][mask], atol=1e-6, rtol=0)


def test_the_entropy_is_that_of_the_kept_set(micro_policy, truncated):
    """By hand for the first token: its kept logits over the temperature, softmax, −Σ p log p."""
    scores = Actor.of(truncated, truncated.sampling.for_actor("replay")).score(
        micro_policy.model, truncated, torch.arange(3)
    )
    logits = micro_policy.model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    kept = truncated.kept.ids[: truncated.kept.offsets[1]].long()
    p = (logits[kept] / 0.7).softmax(-1)
    assert scores.entropy[0, 0].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)
    assert scores.entropy[0, 0] < math.log(20)
    recomputed = Actor(truncated.sampling.for_actor("recompute")).score(micro_policy.model, truncated, torch.arange(3))
    mask = truncated.tokens.response_mask
    torch.testing.assert_close(recomputed.entropy[mask], scores.entropy[mask], atol=1e-5, rtol=0)


@torch.no_grad()
def test_without_truncation_the_actor_is_plain_scoring(micro_policy):
    rollout = sample(micro_policy.model, [[1, 2]], sampling=SamplingSpec(temperature=0.7, logprobs="processed"))
    plain = score_responses(micro_policy.model, rollout.tokens, temperature=0.7)
    for actor in ACTORS:
        scores = Actor.of(rollout, rollout.sampling.for_actor(actor)).score(
            micro_policy.model, rollout, torch.arange(1)
        )
        mask = rollout.tokens.response_mask
        torch.testing.assert_close(scores.log_prob[mask], plain.log_prob[mask], atol=1e-6, rtol=0)
        torch.testing.assert_close(scores.entropy[mask], plain.entropy[mask], atol=1e-5, rtol=0)
        assert (scores.full_log_prob, scores.outside) == (None, None)


@pytest.mark.parametrize("reason", ["linear", "capped", "half precision"])
def test_a_linear_head_is_scored_without_logits(micro_policy, monkeypatch, reason):
    rollout = sample(micro_policy.model, [[1, 2]], sampling=SamplingSpec())
    if reason == "capped":
        monkeypatch.setattr(micro_policy.model.config, "final_logit_softcapping", 30.0, raising=False)
    elif reason == "half precision":
        micro_policy.model.bfloat16()
    made = []
    monkeypatch.setattr(actor_module, "score_responses", lambda *a, **o: made.append(a) or score_responses(*a, **o))
    for entropy_gradient in (False, True):
        scores = whole_scores(micro_policy.model, rollout.tokens, entropy_gradient=entropy_gradient)
        assert scores.log_prob.requires_grad
        assert scores.entropy.requires_grad == entropy_gradient
    assert bool(made) == (reason != "linear")


def test_an_error_of_the_fused_scoring_is_raised(micro_policy):
    tokens = sample(micro_policy.model, [[1, 2]], sampling=SamplingSpec()).tokens
    with pytest.raises(ValueError, match="temperature"):
        whole_scores(micro_policy.model, tokens, temperature=-1.0)


@pytest.mark.parametrize(
    ("actor", "field", "what"), [("replay", "kept", "sets"), ("kept_mass", "log_kept_mass", "mass")]
)
def test_an_engine_without_what_the_actor_needs_is_refused(truncated, actor, field, what):
    bare = dataclasses.replace(truncated, **{field: None})
    with pytest.raises(EngineAnswerError, match=f"actor.sampling={actor} needs the kept {what} of each token"):
        Actor.of(bare, bare.sampling.for_actor(actor))


@pytest.mark.parametrize(
    ("rollout", "actor", "fix"),
    [
        (TRUNCATED, "full", "set actor.sampling=replay"),
        (SamplingSpec(temperature=0.7, engine="vllm"), "replay", "set rollout.sampling.logprobs=processed"),
        (SamplingSpec(top_p=0.9, engine="transformers"), "replay", "set rollout.sampling.logprobs=processed"),
        (SamplingSpec(temperature=0.7, engine="ctranslate2"), "replay", "sample at temperature 1 without truncation"),
        (SamplingSpec(repetition_penalty=1.2, logprobs="processed"), "full", "or sample without them"),
    ],
)
def test_log_probs_that_are_not_comparable_are_refused_with_the_fix(rollout, actor, fix):
    with pytest.raises(IncompatibleSamplingError, match="are not comparable") as caught:
        ActorConfig(sampling=actor).spec(rollout)
    assert fix in str(caught.value)
    assert "actor.allow_incompatible=true" in str(caught.value)
    assert ActorConfig(sampling=actor, allow_incompatible=True).spec(rollout) == rollout.for_actor(actor)


# ── a training step ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("preset", ["decoupled_token_is", "bypass_ppo_clip"])
@pytest.mark.parametrize("actor", ACTORS)
def test_a_step_on_truncated_rollouts_reports_what_is_left(micro_trainer, preset, actor):
    options = (f"algorithm.rollout_correction={preset}", f"actor.sampling={actor}", "actor.allow_incompatible=true")
    metrics = micro_trainer(*TRUNCATED_RUN, *options).step(1).metrics
    assert (metrics["rollout_corr/k3_kl"] < 1e-2) == (actor != "full")
    assert metrics["actor/entropy"] < math.log(20) or actor in ("full", "kept_mass")
    assert ("sampling/kept_mass" in metrics) == (actor != "full")
    if actor != "full":
        assert 0 < metrics["sampling/kept_mass"] < 0.5
        assert (metrics["sampling/outside_fraction"] > 0) == (actor == "recompute")


def test_the_step_refuses_before_anything_is_subtracted(micro_trainer):
    trainer = micro_trainer(*TRUNCATED_RUN)
    trainer.engine.sampling = dataclasses.replace(trainer.engine.sampling, logprobs="raw")
    with pytest.raises(IncompatibleSamplingError, match="raw log-probs leave out"):
        trainer.step(1)


def test_a_token_that_the_reference_would_not_keep_has_a_finite_kl(micro_trainer, micro_policy):
    """If a reference assigns every sampled token less than e^−30, none is in its nucleus."""
    reference = copy.deepcopy(micro_policy.model)
    trainer = micro_trainer(*TRUNCATED_RUN, "algorithm.loss.kl_coef=0.1", reference=reference)
    sampled = trainer._sample(1).rollout.tokens
    drawn = sampled.response_ids[sampled.response_mask].unique()
    reference.set_output_embeddings(torch.nn.Linear(32, len(reference.get_input_embeddings().weight), bias=True))
    with torch.no_grad():
        reference.lm_head.weight.zero_()
        reference.lm_head.bias.zero_()[drawn] = -30.0
    result = trainer.step(1)
    assert result.batch.ref_log_prob[sampled.response_mask].max() < -30
    assert 30 < result.metrics["actor/kl_ref"] < math.inf
    assert trainer.skipped_steps == 0


def test_the_kl_to_an_equal_reference_is_zero_although_the_actor_is_truncated(micro_trainer, micro_policy):
    """π over its kept set against a full reference would show −log S instead: about 2 nats here."""
    reference = copy.deepcopy(micro_policy.model)
    trainer = micro_trainer(*TRUNCATED_RUN, "algorithm.loss.kl_coef=0.1", reference=reference)
    assert trainer.step(1).metrics["actor/kl_ref"] == pytest.approx(0, abs=1e-6)


def test_the_kl_penalty_pulls_on_logits_outside_the_kept_sets(micro_policy, truncated):
    actor = Actor.of(truncated, truncated.sampling.for_actor("replay"))
    bare = actor.score(micro_policy.model, truncated, torch.arange(3))
    assert not bare.full_log_prob.requires_grad
    assert actor.score(micro_policy.model, truncated, torch.arange(3), full_gradient=True).full_log_prob.requires_grad


# ── acceptance: the mismatch that remains after replay ───────────────────────────────────────────────────────────────


def judge(model, rollout, *, before, floor):
    """Replay and kept mass end at the floor; the uncorrected ratio and the recomputed one do not."""
    raw, _ = log_ratio(model, rollout, SamplingSpec())
    replayed, strangers = log_ratio(model, rollout, rollout.sampling.for_actor("replay"))
    by_mass, _ = log_ratio(model, rollout, rollout.sampling.for_actor("kept_mass"))
    full, _ = log_ratio(model, rollout, rollout.sampling.for_actor("full"))
    assert k3_of(raw).mean() > before
    assert k3_of(replayed).mean() <= floor
    assert replayed.exp().mean().item() == pytest.approx(1, abs=1e-3)
    assert strangers == 0
    # The kept-mass fallback removes the bias, which is the kept mass.
    mass = rollout.log_kept_mass[rollout.tokens.response_mask].exp().mean().item()
    assert full.exp().mean().item() == pytest.approx(mass, abs=1e-3)
    assert by_mass.exp().mean().item() == pytest.approx(1, abs=1e-3)
    assert k3_of(by_mass).mean() <= 1.2 * floor


def test_replay_brings_an_untrained_qwen3_to_the_noise_floor_of_bfloat16():
    policy = make_tiny_policy(seed=0)
    rollout = sample(policy.model, arithmetic(policy, 32))
    judge(policy.model, rollout, before=1e-2, floor=5e-5)
    recomputed, outside = log_ratio(policy.model, rollout, rollout.sampling.for_actor("recompute"))
    assert outside > 0
    assert k3_of(recomputed).mean() > 10 * 5e-6


def test_replay_brings_the_demo_policy_to_the_noise_floor_of_bfloat16():
    """It is all but certain of most tokens, so that less is lost to begin with."""
    policy = load_policy("demo")
    judge(policy.model, sample(policy.model, arithmetic(policy)), before=1e-3, floor=5e-5)


def test_replay_brings_stories260k_to_the_noise_floor_of_bfloat16():
    model = load_stories()
    rollout = sample(model, [[1]] * 32, eos=2, pad=0, tokens=128)
    judge(model, rollout, before=1e-2, floor=5e-4)
    assert log_ratio(model, rollout, rollout.sampling.for_actor("recompute"))[1] > 0


def test_an_empty_kept_set_is_padding_only(truncated):
    """Sets laid over the padded batch: one a valid token, none elsewhere."""
    actor = Actor.of(truncated, truncated.sampling.for_actor("replay"))
    assert isinstance(actor.kept, KeptSets)
    assert torch.equal(actor.kept.offsets.diff() > 0, truncated.tokens.response_mask.flatten())
