"""Truncated sampling in TRL's own trainers: replayed kept sets, or the kept mass. Run by `make test-trl`."""

import math

import pytest
import torch

from rollcorr import Monitor, RolloutSample, SamplingSpec, read_rollout_log
from rollcorr.core.logprobs import kept_log_prob
from rollcorr.engines import GenerationSettings, TransformersEngine
from rollcorr.integrations.trl import attach

pytest.importorskip("trl", reason="TRL is not installed; `make test-trl` runs these tests in an environment of its own")
pytestmark = pytest.mark.filterwarnings("ignore")

from trl_cases import EOS, LENGTH, PAD, grpo_trainer, prompts, rloo_trainer  # noqa: E402

TRAINERS = pytest.mark.parametrize("make", [grpo_trainer, rloo_trainer])
ACTORS = pytest.mark.parametrize("actor", ["replay", "kept_mass"])


class Recorded(TransformersEngine):
    """An engine that keeps its last rollout."""

    def generate(self, *args, **kwargs):
        self.last = super().generate(*args, **kwargs)
        return self.last


def truncating(make, folder, **options):
    """A trainer whose policy is far from uniform, and a float32 engine with top-p 0.9 at the same temperature."""
    trainer = make(folder, temperature=0.8, **options)
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight.mul_(20)
    sampling = SamplingSpec(temperature=0.8, top_p=0.9, logprobs="processed")
    settings = GenerationSettings(sampling=sampling, max_new_tokens=LENGTH, eos_token_id=EOS, pad_token_id=PAD)
    return trainer, Recorded(trainer.model, settings, dtype=torch.float32)


def whole_rows(batch):
    """Ids and mask of prompts and completions."""
    return [torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask")]


def full_log_prob(trainer, batch):
    """TRL's own log-probs of a batch, over the full vocabulary."""
    ids, mask = whole_rows(batch)
    plain = next(base for base in type(trainer).__mro__ if base.__module__.startswith("trl."))
    width = batch["completion_ids"].shape[1]
    return plain._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, width)[0].detach()


@ACTORS
@TRAINERS
def test_ratio_is_one_at_equal_weights(make, actor, tmp_path):
    trainer, engine = truncating(make, tmp_path / "trl")
    with Monitor(tmp_path / "run", rollouts=RolloutSample()) as monitor:
        attach(trainer, "measure", engine=engine, actor=actor, monitor=monitor)
        trainer.model.train()
        batch = trainer._generate_and_score_completions(prompts())
        monitor.step()
    mask, rollout = batch["completion_mask"].bool(), engine.last

    # Without either, the log-ratio is biased by the log of the kept mass.
    bias = (full_log_prob(trainer, batch) - rollout.rollout_log_prob)[mask]
    torch.testing.assert_close(bias, rollout.log_kept_mass[mask], atol=1e-4, rtol=0)
    assert bias.mean() < -0.02

    # The log contains the engine's processed log-probs, and the trainer's of the same distribution.
    rows = [row for part in read_rollout_log(tmp_path / "run") for row in part.to_rows()]
    assert len(rows) == len(mask)
    for row, log_prob, valid in zip(rows, rollout.rollout_log_prob, mask, strict=True):
        logged = torch.tensor([row["old_log_prob"], row["rollout_log_prob"]])
        torch.testing.assert_close(logged, log_prob[valid].expand(2, -1), atol=1e-4, rtol=0)
    if make is grpo_trainer:
        assert (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].abs().max() <= 1e-4


def test_replay_follows_rows_that_trl_shuffles(tmp_path):
    trainer, engine = truncating(grpo_trainer, tmp_path, steps_per_generation=2, num_iterations=2)
    attach(trainer, engine=engine, actor="replay")
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.loss_type = "bnpo"
    inputs = trainer._prepare_inputs(prompts(16))
    assert len(inputs["completion_ids"]) == 8
    mask, model = inputs["completion_mask"].bool(), trainer.model
    trainer._batch_in_loss = inputs
    ids, attention = whole_rows(inputs)
    width = mask.shape[1]
    found = trainer._get_per_token_logps_and_entropies(model, ids, attention, width, compute_entropy=True)
    torch.testing.assert_close(found[0][mask], inputs["old_per_token_logps"][mask], atol=1e-5, rtol=0)
    assert (found[1][mask] >= 0).all()
    assert found[1].requires_grad  # for the entropy bonus

    # The loss is TRL's with these log-probs: at equal weights its gradient is that of −A · log π.
    loss = trainer.compute_loss(model, inputs)
    (gradient,) = torch.autograd.grad(loss, model.get_output_embeddings().weight)
    expected = 0
    for row, sets in enumerate(inputs["rollcorr_kept_sets"]):
        valid = attention[row].bool()
        logits = model(input_ids=ids[row, valid][None]).logits[0, -len(sets) - 1 : -1]
        scored = kept_log_prob(logits, inputs["completion_ids"][row][mask[row]], sets, temperature=0.8).log_prob
        expected = expected - (inputs["advantages"][row] * scored).sum()
    (reference,) = torch.autograd.grad(expected / mask.sum(), model.get_output_embeddings().weight)
    torch.testing.assert_close(gradient, reference, atol=1e-6, rtol=1e-4)


@ACTORS
@TRAINERS
def test_twenty_steps_train_with_truncation(make, actor, tmp_path):
    trainer, engine = truncating(make, tmp_path, max_steps=20, learning_rate=1e-3)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    attach(trainer, {"rollout_is": "sequence"}, engine=engine, actor=actor).train()
    logs = [entry for entry in trainer.state.log_history if "rollout_corr/kl" in entry]
    assert trainer.state.global_step == len(logs) == 20
    assert all(abs(entry["rollout_corr/k3_kl"]) < 1e-8 for entry in logs)
    assert all(math.isfinite(entry["loss"]) for entry in logs)
    assert any((weight != before[name]).any() for name, weight in trainer.model.named_parameters())
    trainer.evaluate(trainer.train_dataset.select(range(8)))
    assert "eval_rollout_corr/kl" in trainer.state.log_history[-1]


def test_replay_refuses_completions_of_several_calls(tmp_path):
    trainer, engine = truncating(grpo_trainer, tmp_path)
    attach(trainer, engine=engine, actor="replay")
    batch = trainer._generate_and_score_completions(prompts())
    batch["rollcorr_kept_sets"][0] = batch["rollcorr_kept_sets"][0].select(torch.arange(1))
    with pytest.raises(ValueError, match="tokens and 1 kept sets: a replay needs completions of one sampling call"):
        trainer.compute_loss(trainer.model, batch)


def test_replay_refuses_a_full_kl_penalty(tmp_path):
    trainer, engine = truncating(grpo_trainer, tmp_path)
    trainer.beta = 0.1
    with pytest.raises(ValueError, match=r"does not support beta=0.1: .* Set beta=0.0, or actor='kept_mass'"):
        attach(trainer, engine=engine, actor="replay")
    attach(trainer, engine=engine, actor="kept_mass")
