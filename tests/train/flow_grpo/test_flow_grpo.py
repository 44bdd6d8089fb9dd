"""One training step: recomputed log-probs, rejected steps, and the learned tensors."""

import copy
import math
import warnings

import pytest
import torch

from rollcorr.config import InertOptionWarning
from rollcorr.train.flow_grpo.schedule import Schedule

BYPASS = "algorithm.rollout_correction={bypass_mode: true}"
QUICKSTART = (
    "algorithm.rollout_correction.bypass_mode=True",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
)
NOTHING_KEPT = "rollout_rs: token_k1, rollout_rs_threshold: 2.0_3.0"


def metric(metrics, name):
    return metrics.get(f"rollout_corr/{name}", metrics.get(f"actor/rollout_corr/{name}"))


@pytest.mark.parametrize("mode", ["algorithm.rollout_correction={}", BYPASS], ids=["decoupled", "bypass"])
@pytest.mark.parametrize("window", ["shared", "per_sample"])
def test_the_same_model_in_the_same_precision_has_a_log_ratio_of_0_up_to_rounding(flow_trainer, mode, window):
    metrics = flow_trainer("rollout.dtype=float32", f"rollout.sde_window={window}", mode).step(1).metrics
    # The order of additions differs between processors and memory addresses, so 0 means 0 up to rounding here.
    assert metric(metrics, "log_ratio_max") == pytest.approx(0, abs=1e-6)
    assert metric(metrics, "log_ratio_min") == pytest.approx(0, abs=1e-6)
    assert metric(metrics, "exact_kl_max") == pytest.approx(0, abs=1e-8)
    assert metrics["actor/ratio"] == pytest.approx(1, abs=1e-6)


def test_lower_precision_shows_as_a_mismatch_that_grows_with_the_rounding(flow_trainer):
    kl = [
        metric(flow_trainer(f"rollout.dtype={dtype}").step(1).metrics, "exact_kl_mean")
        for dtype in ("float32", "bfloat16", "fp8")
    ]
    assert 0 == kl[0] < kl[1] < kl[2]


def test_bypass_saves_the_recompute_pass(flow_trainer):
    """Calls of the trainer's own transformer: two steps of the window, forward in the update, and once before it."""
    calls = {}
    for name, overrides in (("decoupled", ()), ("bypass", (BYPASS,))):
        trainer = flow_trainer("optim.micro_batch_size=6", *overrides)
        calls[name] = 0

        def count(*_, name=name):
            calls[name] += 1

        trainer.policy.transformer.register_forward_hook(count)
        metrics = trainer.step(1).metrics
        assert metrics["perf/forward_passes"] == calls[name]
    window, micro_batches = 2, 2
    assert calls == {"decoupled": 2 * window * micro_batches, "bypass": window * micro_batches}


def test_the_quickstart_overrides_are_read_as_they_stand(flow_trainer):
    with pytest.warns(InertOptionWarning, match="metrics only"):
        trainer = flow_trainer(*QUICKSTART)
    with pytest.warns(InertOptionWarning, match="rejects nothing"):
        metrics = trainer.step(1).metrics
    assert trainer.actor.bypass_mode
    assert metrics["actor/rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    assert metrics["actor/rollout_corr/rollout_rs_masked_fraction"] == 0


@pytest.mark.parametrize("mode", ["", "bypass_mode: true, "], ids=["decoupled", "bypass"])
def test_when_nothing_is_kept_no_parameter_moves(flow_trainer, weights, mode):
    trainer = flow_trainer(f"algorithm.rollout_correction={{{mode}{NOTHING_KEPT}}}", "optim.mini_batch_size=6")
    before = weights(trainer)
    metrics = trainer.step(1).metrics
    assert metrics["actor/kept_fraction"] == 0
    assert metrics["actor/skipped_steps"] == 2
    assert torch.equal(weights(trainer), before)
    assert not trainer.optimizer.state  # the moments have not seen it either


def test_too_little_kept_is_skipped_on_request(flow_trainer, weights):
    band = "algorithm.rollout_correction={rollout_rs: token_k1, rollout_rs_threshold: 0.9999_1.0001}"
    careless = flow_trainer(band, "rollout.dtype=fp8")
    share = careless.step(1).metrics["actor/kept_fraction"]
    assert 0 < share < 0.9
    careful = flow_trainer(band, "rollout.dtype=fp8", "algorithm.loss.min_keep_fraction=0.9")
    before = weights(careful)
    assert careful.step(1).metrics["actor/skipped_steps"] == 1
    assert torch.equal(weights(careful), before)
    assert not torch.equal(weights(careless), before)


def test_a_gradient_that_is_not_finite_costs_its_step(flow_trainer, weights):
    trainer = flow_trainer()
    before = weights(trainer)
    trainer.policy.transformer.proj_out.weight.register_hook(lambda gradient: gradient * math.inf)
    assert trainer.step(1).metrics["actor/skipped_steps"] == 1
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize("mode", ["algorithm.rollout_correction={}", BYPASS], ids=["decoupled", "bypass"])
def test_micro_batches_change_nothing_but_memory(flow_trainer, weights, mode):
    """The band rejects some steps, so a micro-batch divided by its own count would show."""
    band = mode.replace("{", "{rollout_rs: token_k1, rollout_rs_threshold: 0.9999_1.0001, ").replace(", }", "}")
    results = []
    for size in (12, 5, 1):
        trainer = flow_trainer(band, "rollout.dtype=fp8", f"optim.micro_batch_size={size}")
        trainer.optimizer = torch.optim.SGD(trainer.parameters, lr=1.0)  # Adam would blow up rounding errors
        assert 0 < trainer.step(1).metrics["actor/kept_fraction"] < 1
        results.append(weights(trainer))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


def test_a_step_moves_the_policy_towards_the_reward(flow_trainer):
    """After some steps on one fixed reward the same noise produces redder pictures."""
    trainer = flow_trainer("optim.lr=3e-3", "rollout.group_size=16", "algorithm.loss.clip_ratio=0.01")
    rewards = [trainer.step(step).metrics["reward/mean"] for step in range(1, 21)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.02


@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard", "flow_dppo"])
@pytest.mark.parametrize("mode", ["algorithm.rollout_correction={}", BYPASS], ids=["decoupled", "bypass"])
def test_every_loss_trains_in_both_modes(flow_trainer, weights, loss_mode, mode):
    trainer = flow_trainer(mode, f"algorithm.loss.loss_mode={loss_mode}")
    before = weights(trainer)
    assert trainer.step(1).metrics["actor/skipped_steps"] == 0
    assert not torch.equal(weights(trainer), before)


def test_reinforce_in_bypass_mode_trains_too(flow_trainer, weights):
    correction = "{bypass_mode: true, loss_type: reinforce, rollout_is: token}"
    trainer = flow_trainer(f"algorithm.rollout_correction={correction}")
    before = weights(trainer)
    trainer.step(1)
    assert not torch.equal(weights(trainer), before)


def test_the_divergence_from_the_reference_grows_from_zero(flow_trainer):
    reference = copy.deepcopy(flow_trainer().policy.transformer)
    trainer = flow_trainer("algorithm.loss.kl_coef=0.1", reference=reference)
    first, second = (trainer.step(step).metrics["actor/kl_ref"] for step in (1, 2))
    assert second > 1e-8
    assert 0 <= first < 1e-3 * second


def test_adapters_are_trained_alone_and_the_model_below_them_is_the_reference(flow_trainer):
    trainer = flow_trainer("model.lora.rank=2", "algorithm.loss.kl_coef=0.1")
    model = trainer.policy.transformer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (trainer.step(step).metrics["actor/kl_ref"] for step in (1, 2))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert 0 <= first < 1e-3 * second  # fresh adapters are the identity


def test_the_copy_lags_on_purpose(flow_trainer):
    trainer = flow_trainer("rollout.refresh_every=3", "rollout.dtype=float32")
    metrics = [trainer.step(step).metrics for step in range(1, 6)]
    assert [m["engine/staleness"] for m in metrics] == [0, 1, 2, 0, 1]
    same, lagging = ([metric(metrics[i], "exact_kl_mean") for i in steps] for steps in ((0, 3), (1, 2, 4)))
    assert max(same) < 1e-3 * min(lagging)


def test_guidance_runs_the_empty_prompt_too(flow_trainer):
    plain, guided = (flow_trainer(f"rollout.guidance_scale={g}", "rollout.dtype=float32").step(1) for g in (1, 3))
    assert not torch.equal(plain.batch.images, guided.batch.images)
    assert metric(guided.metrics, "log_ratio_max") == pytest.approx(0, abs=1e-6)


def test_a_step_repeats_itself_from_the_same_state(flow_trainer, weights):
    first, second = flow_trainer(), flow_trainer()
    torch.rand(7)  # the global generator plays no part
    results = [trainer.step(5) for trainer in (first, second)]
    assert torch.equal(weights(first), weights(second))
    assert torch.equal(results[0].batch.images, results[1].batch.images)


def test_the_learning_rate_warms_up(flow_trainer):
    trainer = flow_trainer("optim.lr=0.04", "optim.lr_warmup_steps=4")
    rates = []
    for step in (1, 2, 4, 9):
        trainer.step(step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.02, 0.04, 0.04])


def test_broken_weights_are_an_error_and_not_a_picture(flow_trainer):
    trainer = flow_trainer()
    with torch.no_grad():
        trainer.policy.transformer.proj_out.bias[0] = math.nan
    trainer.engine.update_weights(trainer.policy.transformer, version=0)
    with pytest.raises(ValueError, match=r"12 of 12 sampled latents are NaN or inf \(rollout.dtype=bfloat16\)"):
        trainer.step(1)


def test_nan_latents_in_a_batch_are_named(flow_trainer):
    trainer = flow_trainer()
    batch = trainer._build_batch(*trainer.sample(1))
    batch.data["latents"][5, 1, 0, 0, 0] = math.nan
    trainer._add_old_log_probs(batch)
    with pytest.raises(ValueError, match=r"latents has NaN or inf in 1 of 12 samples"):
        trainer._add_correction(batch)


def test_a_schedule_that_the_trainer_does_not_share_is_refused(flow_trainer):
    trainer = flow_trainer()
    batch = trainer._build_batch(*trainer.sample(1))
    sigmas = trainer.schedule.sigmas.clone()
    sigmas[1] += 0.01
    trainer.schedule = Schedule(sigmas=sigmas)
    with pytest.raises(ValueError, match="rollout and trainer schedules differ first at entry 1"):
        trainer._add_old_log_probs(batch)


@pytest.mark.parametrize("key", ["rollout_log_probs", "latents", "prev_sample_mean"])
def test_a_tensor_of_the_wrong_shape_is_named(flow_trainer, key):
    trainer = flow_trainer()
    batch = trainer._build_batch(*trainer.sample(1))
    trainer._add_old_log_probs(batch)
    batch.data[key] = batch.data[key][:, :1]
    with pytest.raises(ValueError, match=key):
        trainer._add_correction(batch)


def test_a_rollout_without_log_probs_is_refused(flow_trainer):
    trainer = flow_trainer(BYPASS)
    batch = trainer._build_batch(*trainer.sample(1))
    del batch.data["rollout_log_probs"]
    with pytest.raises(KeyError, match="calculate_log_probs"):
        trainer._add_correction(batch)


def test_a_reward_sees_the_pictures_and_their_prompts(flow_trainer):
    seen = []

    def reward(images, prompts):
        seen.append((tuple(images.shape), len(prompts), float(images.min()) >= 0, float(images.max()) <= 1))
        return torch.arange(12.0)

    result = flow_trainer(reward=reward).step(1)
    assert seen == [((12, 3, 16, 16), 12, True, True)]
    assert result.metrics["reward/mean"] == 5.5
    assert result.batch.texts[0] == result.batch.texts[3] != result.batch.texts[4]


def test_without_correction_nothing_is_measured(flow_trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = flow_trainer("algorithm.rollout_correction=null").step(1).metrics
    assert not [name for name in metrics if "rollout_corr/" in name]
