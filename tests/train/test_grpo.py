"""One training step: computed metrics, skipped updates, and values that never reach the weights."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.engines.fused_scoring import needs_logits
from rollcorr.train.grpo import grpo_trainer as grpo
from rollcorr.train.grpo.policy import make_tiny_policy
from rollcorr.train.grpo.tasks import Reward

BAND = "rollout_rs: token_k1, rollout_rs_threshold: 0.999_1.001"
MODES = {
    "decoupled": [f"algorithm.rollout_correction={{rollout_is: token, {BAND}}}"],
    "bypass, PPO": [f"algorithm.rollout_correction={{bypass_mode: true, {BAND}}}"],
    "bypass, REINFORCE": [
        f"algorithm.rollout_correction={{bypass_mode: true, loss_type: reinforce, rollout_is: token, {BAND}}}"
    ],
    "no correction": ["algorithm.rollout_correction=null"],
    "KL and entropy": [
        "algorithm.rollout_correction=bypass_ppo_clip",
        "algorithm.loss.kl_coef=0.1",
        "algorithm.loss.entropy_coef=0.01",
    ],
    "replayed truncation": [
        "algorithm.rollout_correction=decoupled_token_is",
        "algorithm.loss.kl_coef=0.1",
        "algorithm.loss.entropy_coef=0.01",
        "rollout.sampling={temperature: 0.7, top_p: 0.9, top_k: 20, logprobs: processed}",
    ],
}
REPORTED = (
    *("reward/mean", "reward/std", "reward/accuracy", "response/length_mean", "engine/staleness"),
    *(f"actor/{name}" for name in ("loss", "grad_norm", "policy_kl", "entropy", "skipped_steps")),
    *(f"actor/clip_fraction_{side}" for side in ("high", "low")),
    *(f"perf/{phase}_seconds" for phase in ("rollout", "old_log_prob", "correction", "update", "step")),
    *("perf/tokens_per_second", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/rollout_is_mean"),
    *("rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_rs_masked_fraction"),
)


def weights(trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.model.parameters()])


def forwards(trainer) -> list[torch.Size]:
    """Shapes of the batches that go through the trainer's model from now on."""
    calls: list[torch.Size] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    return calls


def test_a_step_reports_the_metrics_that_the_report_reads(micro_trainer):
    metrics = micro_trainer("algorithm.rollout_correction=decoupled_k3_rs_token_tis").step(1).metrics
    assert set(REPORTED) <= set(metrics)
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics["perf/step_seconds"] >= metrics["perf/rollout_seconds"] > 0


def test_a_lower_precision_rollout_is_a_real_and_small_mismatch(micro_trainer):
    assert 1e-9 < micro_trainer().step(1).metrics["rollout_corr/k3_kl"] < 1e-3


def test_training_raises_the_reward(micro_trainer):
    trainer = micro_trainer(
        "rollout.prompts_per_step=8", "rollout.group_size=8", "algorithm.rollout_correction=decoupled_token_is"
    )
    rewards = [trainer.step(step).metrics["reward/mean"] for step in range(1, 13)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


@pytest.mark.parametrize("mode", MODES)
def test_the_micro_batch_size_changes_nothing(micro_trainer, mode):
    """12 responses, mini-batches of 7 and 5: at once, in pieces of 3 (uneven at both ends), one by one."""
    results = []
    for size in ("null", "3", "1"):
        policy = make_tiny_policy(
            seed=0, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16,
        )  # fmt: skip
        reference = copy.deepcopy(policy.model) if "kl_coef" in " ".join(MODES[mode]) else None
        # Adam divides by the gradient's size and would blow up rounding errors: compare plain gradients.
        trainer = micro_trainer(
            *MODES[mode],
            "optim.mini_batch_size=7",
            f"optim.micro_batch_size={size}",
            policy=policy,
            reference=reference,
        )
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        metrics = trainer.step(1).metrics
        results.append((weights(trainer), metrics))
    (whole, expected), *pieces = results
    for got, metrics in pieces:
        torch.testing.assert_close(got, whole, atol=2e-5, rtol=0)
        for name, value in expected.items():
            if not name.startswith("perf/"):
                assert metrics[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
    if BAND in MODES[mode][0]:
        assert 0 < expected["rollout_corr/rollout_rs_masked_fraction"] < 1


def test_bypass_really_skips_the_old_log_probs(micro_trainer):
    batches = {}
    for preset in ("decoupled_token_is", "bypass_ppo_clip"):
        trainer = micro_trainer(
            f"algorithm.rollout_correction={preset}", "optim.ppo_epochs=2", "optim.mini_batch_size=6"
        )
        needs_logits(trainer.model)  # its probe is a forward pass, once per model
        calls = forwards(trainer)
        trainer.step(1)
        batches[preset] = [shape[0] for shape in calls]
    updates = [6, 6, 6, 6]  # two epochs of two mini-batches
    assert batches == {"decoupled_token_is": [6, 6, *updates], "bypass_ppo_clip": updates}


def test_bypass_corrects_with_the_policy_being_trained(micro_trainer):
    """After a first update π_θ differs from π_old, so a step of several epochs shows more divergence than one epoch."""
    divergence = []
    for epochs in (1, 4):
        policy = make_tiny_policy(seed=1, hidden_size=32, num_hidden_layers=1)
        options = ("algorithm.rollout_correction=bypass_ppo_clip", f"optim.ppo_epochs={epochs}", "optim.lr=0.003")
        divergence.append(micro_trainer(*options, policy=policy).step(1).metrics["rollout_corr/k3_kl"])
    assert divergence[1] > 10 * divergence[0]


@pytest.mark.parametrize("preset", ["decoupled_token_is", "bypass_ppo_clip"])
def test_a_non_finite_loss_costs_its_step_and_nothing_else(micro_trainer, monkeypatch, preset):
    trainer = micro_trainer(f"algorithm.rollout_correction={preset}", "optim.mini_batch_size=6")
    before = weights(trainer)
    healthy = grpo.hard_gated_reward
    monkeypatch.setattr(grpo, "hard_gated_reward", lambda *_, **__: Reward(math.nan, correct=False))
    assert trainer.step(1).metrics["actor/skipped_steps"] == 2
    assert torch.equal(weights(trainer), before)
    assert not trainer.optimizer.state  # the moments have not seen it either
    monkeypatch.setattr(grpo, "hard_gated_reward", healthy)
    assert trainer.step(2).metrics["actor/skipped_steps"] == 2
    assert not torch.equal(weights(trainer), before)
    assert weights(trainer).isfinite().all()


def test_a_non_finite_gradient_under_a_finite_loss_is_skipped_too(micro_trainer):
    trainer = micro_trainer()
    before = weights(trainer)
    trainer.model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * math.inf)
    assert trainer.step(1).metrics["actor/skipped_steps"] == 1
    assert torch.equal(weights(trainer), before)


NOTHING = "rollout_rs: token_k1, rollout_rs_threshold: 5.0_6.0"


@pytest.mark.parametrize("fields", ["", "bypass_mode: true,", "bypass_mode: true, normalizer: original,"])
def test_a_step_of_which_nothing_is_kept_moves_nothing(micro_trainer, micro_config, fields):
    """Adam's momentum and weight decay would move the weights by a gradient of zero."""
    trainer = micro_trainer("optim.weight_decay=0.1", "optim.mini_batch_size=6")
    trainer.step(1)
    rejecting = micro_trainer(
        f"algorithm.rollout_correction={{{fields} {NOTHING}}}", "optim.weight_decay=0.1", "optim.mini_batch_size=6"
    )
    rejecting.optimizer.load_state_dict(trainer.optimizer.state_dict())
    before, moments = weights(rejecting), copy.deepcopy(rejecting.optimizer.state_dict()["state"])
    metrics = rejecting.step(2).metrics
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert metrics["actor/skipped_steps"] == 2
    assert torch.equal(weights(rejecting), before)
    after = rejecting.optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][name], value) for i, row in moments.items() for name, value in row.items())


def test_a_kl_term_is_learned_from_rejected_tokens_too(micro_trainer, micro_policy):
    options = (f"algorithm.rollout_correction={{bypass_mode: true, {NOTHING}}}", "algorithm.loss.kl_coef=0.1")
    reference = copy.deepcopy(micro_policy.model)
    with torch.no_grad():
        reference.get_input_embeddings().weight.mul_(1.5)
    trainer = micro_trainer(*options, reference=reference)
    before = weights(trainer)
    assert trainer.step(1).metrics["actor/skipped_steps"] == 0
    assert not torch.equal(weights(trainer), before)


def test_rejected_rows_leave_the_baseline_by_default(micro_trainer, micro_config):
    """By default no other advantage depends on the reward of a row that rejection removed."""
    rejecting = "algorithm.rollout_correction=decoupled_seq_is_rs"
    trainer = micro_trainer(rejecting)
    batch = trainer._add_correction(trainer._add_old_log_prob(trainer._sample(1)))
    kept = torch.ones(12, dtype=torch.bool)
    kept[0] = False
    batch = dataclasses.replace(batch, correction=dataclasses.replace(batch.correction, sequence_kept=kept))
    other = dataclasses.replace(batch, rewards=[Reward(50.0, correct=True), *batch.rewards[1:]])
    first, second = (trainer._add_advantages(b).advantages for b in (batch, other))
    assert torch.equal(first, second)
    assert first[0] == 0

    trainer.config = micro_config(rejecting, "algorithm.leave_rejected_out_of_baseline=false")
    first, second = (trainer._add_advantages(b).advantages for b in (batch, other))
    assert not torch.equal(first[1:4], second[1:4])


@pytest.mark.parametrize("correction", ["{}", "decoupled_seq_is_rs", "bypass_ppo_clip_k3_rs"])
def test_advantages_keep_their_bits_without_rejection(micro_trainer, micro_config, correction):
    """Nothing is rejected at equal weights, so the default computes what `false` does; bypass mode accepts it."""
    trainer = micro_trainer(f"algorithm.rollout_correction={correction}")
    batch = trainer._add_correction(trainer._add_old_log_prob(trainer._sample(1)))
    batch = dataclasses.replace(batch, rewards=[Reward(0.1 * row**2, correct=False) for row in range(12)])
    assert batch.correction is None or batch.correction.sequence_kept.all()
    default = trainer._add_advantages(batch).advantages
    trainer.config = micro_config(
        f"algorithm.rollout_correction={correction}", "algorithm.leave_rejected_out_of_baseline=false"
    )
    assert torch.equal(default, trainer._add_advantages(batch).advantages)


def test_ranks_refuse_an_engine_with_one_seed(micro_trainer):
    trainer = micro_trainer()
    trainer.engine.row_seeds = False
    with pytest.raises(ValueError, match="one seed per process"):
        grpo.GrpoTrainer(
            trainer.config, trainer.policy, trainer.engine, trainer.task, group=SimpleNamespace(size=lambda: 2)
        )


def test_the_engine_lags_on_purpose(micro_trainer):
    trainer = micro_trainer("rollout.refresh_every=3")
    metrics = [trainer.step(step).metrics for step in range(1, 6)]
    assert [m["engine/staleness"] for m in metrics] == [0, 1, 2, 0, 1]
    assert metrics[2]["rollout_corr/k3_kl"] > 10 * metrics[0]["rollout_corr/k3_kl"]


def test_a_rollout_carries_the_version_that_sampled_it(micro_trainer):
    trainer = micro_trainer("rollout.refresh_every=2")
    versions = [trainer.step(step).batch.rollout.sampling.policy_version for step in (1, 2, 3)]
    assert versions == [0, 0, 2]


def test_the_trainer_scores_at_the_sampling_temperature(micro_trainer):
    at_two = ("rollout.sampling.temperature=2.0", "rollout.sampling.logprobs=processed")
    assert micro_trainer(*at_two).step(1).metrics["rollout_corr/k3_kl"] < 1e-3


@pytest.mark.parametrize("preset", ["decoupled_seq_is_rs", "bypass_ppo_clip_k3_rs"])
def test_all_metrics_of_a_step_cross_to_the_host_at_once(micro_trainer, monkeypatch, preset):
    reads = []
    read = Statistics.read
    monkeypatch.setattr(Statistics, "read", lambda self: reads.append(1) or read(self))
    micro_trainer(f"algorithm.rollout_correction={preset}", "optim.mini_batch_size=4", "optim.ppo_epochs=2").step(1)
    assert len(reads) == 1


def test_the_divergence_from_the_reference_grows_from_zero(micro_trainer, micro_policy):
    reference = copy.deepcopy(micro_policy.model)
    trainer = micro_trainer("algorithm.loss.kl_coef=0.1", reference=reference)
    first, second = (trainer.step(step).metrics["actor/kl_ref"] for step in (1, 2))
    assert first == pytest.approx(0, abs=1e-9)
    assert second > 1e-4


def test_without_correction_nothing_is_measured(micro_trainer):
    metrics = micro_trainer("algorithm.rollout_correction=null").step(1).metrics
    assert not [name for name in metrics if name.startswith("rollout_corr/")]


def test_the_learning_rate_warms_up(micro_trainer):
    trainer = micro_trainer("optim.lr=0.04", "optim.lr_warmup_steps=4")
    rates = []
    for step in (1, 2, 4, 9):
        trainer.step(step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.02, 0.04, 0.04])


def test_a_step_repeats_itself_from_the_same_state(micro_trainer):
    first, second = (
        micro_trainer(policy=make_tiny_policy(seed=2, hidden_size=32, num_hidden_layers=1)) for _ in range(2)
    )
    torch.rand(7)  # the global generator plays no part
    results = [trainer.step(5).metrics | {"perf": 0} for trainer in (first, second)]
    assert torch.equal(weights(first), weights(second))
    assert results[0]["actor/loss"] == results[1]["actor/loss"]
