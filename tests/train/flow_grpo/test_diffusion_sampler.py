"""Trajectories: steps inside and outside the window, and that every step can be scored again."""

import itertools
import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from rollcorr.train.flow_grpo.family import predict
from rollcorr.train.flow_grpo.flow_grpo_config import DiffusionRolloutConfig
from rollcorr.train.flow_grpo.sampler import (
    RolloutModel,
    Sampler,
    draw_windows,
    linear_e4m3,
    make_schedule,
    round_to_e4m3,
)
from rollcorr.train.flow_grpo.schedule import Schedule


@pytest.fixture
def sampler(flow_trainer):
    def make(*overrides):
        trainer = flow_trainer("rollout.dtype=float32", "rollout.num_steps=5", *overrides)
        return trainer.sampler, trainer.prompts(["a red circle", "a blue cross"], copies=2)

    return make


def test_only_the_steps_of_the_window_are_noisy(sampler):
    """By hand: outside the window x moves by (σ_next − σ) v; inside it moves by that, the drift and the noise."""
    sampler, prompts = sampler()
    steps = torch.tensor([[1, 2], [1, 2], [1, 2], [1, 2]])
    path = sampler.sample(prompts, steps, seed=0, step=1)
    x = sampler._draw_noise(4, 0, 1, "start")
    for number in range(5):
        sigma, sigma_next = sampler.schedule.sigmas[number : number + 2]
        policy = sampler.policy
        with torch.no_grad():
            v = predict(policy.transformer, policy.family, x, sigma.expand(4) * 1000, prompts, size=policy.size)
        if number in (1, 2):
            torch.testing.assert_close(path.data["latents"][:, number - 1], x, rtol=0, atol=0)
            g = 0.7 * math.sqrt(sigma / (1 - sigma))
            dt = sigma_next - sigma
            mean = x * (1 + g**2 * dt / (2 * sigma)) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
            clean = sampler.schedule.predicted_clean(mean, x, torch.full((4,), number))
            torch.testing.assert_close(clean, x - sigma * v, rtol=1e-4, atol=1e-4)
            s = g * math.sqrt(-dt)
            torch.testing.assert_close(path.data["prev_sample_mean"][:, number - 1], mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(path.data["std"][:, number - 1], torch.full((4,), s), rtol=1e-5, atol=0)
            x = path.data["latents"][:, number]
            log_prob = torch.distributions.Normal(mean, s).log_prob(x).mean((1, 2, 3))
            torch.testing.assert_close(path.data["rollout_log_probs"][:, number - 1], log_prob, rtol=1e-5, atol=1e-5)
        else:
            x = x + (sigma_next - sigma) * v
    torch.testing.assert_close(path.final, x, rtol=1e-5, atol=1e-5)


def test_a_window_of_its_own_for_each_sample(sampler):
    """Rows with the same window agree with a batch that shares it, to rounding."""
    sampler, prompts = sampler()
    own = sampler.sample(prompts, torch.tensor([[0, 1], [2, 3], [1, 2], [0, 1]]), seed=0, step=1)
    shared = sampler.sample(prompts, torch.tensor([[0, 1]] * 4), seed=0, step=1)
    for name in ("latents", "prev_sample_mean", "rollout_log_probs"):
        mine, theirs = own.data[name], shared.data[name]
        torch.testing.assert_close(mine[[0, 3]], theirs[[0, 3]], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(mine[[1, 2]], theirs[[1, 2]], atol=1e-3)
    assert own.data["timesteps"].tolist()[1] == own.schedule.timesteps[2:4].tolist()


def test_rows_at_a_time_change_nothing_but_memory(sampler):
    sampler, prompts = sampler()
    steps = torch.tensor([[1, 2]] * 4)
    few = Sampler(policy=sampler.policy, model=sampler.model, schedule=sampler.schedule, batch_size=3)
    one, other = (s.sample(prompts, steps, seed=0, step=1) for s in (sampler, few))
    torch.testing.assert_close(one.final, other.final, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*(s.data["rollout_log_probs"] for s in (one, other)), rtol=1e-4, atol=1e-5)


def test_what_is_stored_is_float32_in_any_precision(flow_trainer):
    trainer = flow_trainer("rollout.dtype=fp8")
    data = trainer.sample(1)[0].data
    assert {tensor.dtype for tensor in data.values()} == {torch.float32}
    shapes = {name: tuple(tensor.shape) for name, tensor in data.items()}
    one = (12, 2)
    assert shapes == {
        "rollout_log_probs": one,
        "timesteps": one,
        "std": one,
        "dt": one,
        "latents": (12, 3, 3, 16, 16),
        "prev_sample_mean": (12, 2, 3, 16, 16),
    }
    assert (data["dt"] < 0).all()


def windows(*, step, seed=0, **options):
    return draw_windows(DiffusionRolloutConfig(sde_window_range=(1, 5), **options), seed=seed, step=step)


def test_windows_lie_in_their_range_and_repeat():
    shared = windows(step=3)
    assert (shared == shared[0]).all()
    own = torch.cat([windows(step=step, sde_window="per_sample") for step in range(5)])
    assert sorted(set(own[:, 0].tolist())) == [1, 2, 3]
    assert (own.diff(dim=1) == 1).all()
    assert torch.equal(shared, windows(step=3))


def test_windows_move_after_their_interval():
    """Steps 1 to 4 in a range of four: starts 1, 2, 3, then no further; MixGRPO."""
    options = {"sde_window": "moving", "sde_window_interval": 10}
    starts = [windows(step=step, **options)[0].tolist() for step in (1, 10, 11, 21, 500)]
    assert starts == [[1, 2], [1, 2], [2, 3], [3, 4], [3, 4]]
    assert windows(step=11, sde_window_spacing=2, **options).tolist()[0] == [2, 4]


def test_windows_with_holes_take_every_second_step():
    found = {tuple(windows(step=step, sde_window_spacing=3).tolist()[0]) for step in range(20)}
    assert found == {(1, 4)}


@pytest.mark.parametrize("steps", [[[0, 2], [1, 3], [0, 3], [2, 3]], [[1, 2]] * 4])
def test_log_probs_equal_arithmetic_of_diffusers(sampler, steps):
    """Windows with holes and without: scheduler.step gives x + v dt; the mean adds g² dt / 2σ (x + (1 − σ) v)."""
    sampler, prompts = sampler()
    steps = torch.tensor(steps)
    path = sampler.sample(prompts, steps, seed=0, step=1)
    assert ("next_latents" in path.data) == bool((steps.diff(dim=1) > 1).any())
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(sampler.policy.scheduler.config)
    scheduler.set_timesteps(5)
    torch.testing.assert_close(path.schedule.sigmas, scheduler.sigmas)
    for row, column in itertools.product(range(4), range(2)):
        number = int(steps[row, column])
        x = path.data["latents"][row : row + 1, column]
        after = path.data.get("next_latents", path.data["latents"][:, 1:])[row, column]
        sigma, dt = scheduler.sigmas[number], scheduler.sigmas[number + 1] - scheduler.sigmas[number]
        with torch.no_grad():
            policy, prompt = sampler.policy, prompts.select(torch.tensor([row]))
            v = predict(policy.transformer, policy.family, x, sigma[None] * 1000, prompt, size=policy.size)
        scheduler._step_index = number
        straight = scheduler.step(v, scheduler.timesteps[number], x).prev_sample
        g = 0.7 * (sigma / (1 - min(sigma, scheduler.sigmas[1]))).sqrt()
        mean, s = straight + g**2 * dt / (2 * sigma) * (x + (1 - sigma) * v), g * (-dt).sqrt()
        expected = torch.distributions.Normal(mean, s).log_prob(after).mean()
        torch.testing.assert_close(path.data["rollout_log_probs"][row, column], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "window",
    [
        ["rollout.sde_window_spacing=2", "rollout.num_steps=5"],
        ["rollout.sde_window=moving", "rollout.sde_window_interval=1"],
        [
            "rollout.sde_window=per_sample",
            "rollout.sde_window_spacing=2",
            "algorithm.rollout_correction.bypass_mode=true",
        ],
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_windows_with_holes_train(flow_trainer, weights, dtype, window):
    """In float32 every log-ratio is 0, so old log-probs score the same steps that were sampled."""
    trainer = flow_trainer(f"rollout.dtype={dtype}", *window)
    before = weights(trainer)
    for step in (1, 2):
        metrics = trainer.step(step).metrics
        prefix = "actor/rollout_corr" if trainer.actor.bypass_mode else "rollout_corr"
        if dtype == "float16":
            assert metrics[f"{prefix}/exact_kl_mean"] > 0
        elif not trainer.actor.bypass_mode:
            assert metrics[f"{prefix}/exact_kl_mean"] == 0
    assert not torch.equal(weights(trainer), before)
    assert trainer.skipped_steps == 0


def test_float16_is_closer_than_bfloat16(flow_trainer):
    """Three more bits of precision, so about 64 times less KL; the trainer scores in float32 either way."""
    kl = {}
    for dtype in ("bfloat16", "float16"):
        result = flow_trainer(f"rollout.dtype={dtype}").step(1)
        kl[dtype] = result.metrics["rollout_corr/exact_kl_mean"]
        assert result.batch.data["old_log_probs"].dtype == torch.float32
    assert 0 < kl["float16"] < kl["bfloat16"] / 16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.sde_window_size=4"],
            r"window_range=\[0, 3\] must lie in .* hold 4 steps, for sde_window_size=4",
        ),
        (["rollout.sde_window_range=[2, 9]"], r"must lie in \[0, num_steps=4\]"),
        (["rollout.sde_window_range=[3, 1]"], r"sde_window_range=\[3, 1\]"),
        (["rollout.noise_level=0"], "a step without noise has no log-prob"),
    ],
)
def test_windows_that_cannot_be_are_refused_when_the_run_is_configured(flow_config, overrides, message):
    with pytest.raises(ValueError, match=message):
        flow_config(*overrides)


@pytest.mark.parametrize("sigmas", [[1.0, 0.5, 0.5, 0.0], [0.2, 0.6, 0.0], [1.0, 0.5], [1.5, 0.5, 0.0]])
def test_a_schedule_falls_from_at_most_1_to_0(sigmas):
    with pytest.raises(ValueError, match="must fall from at most 1 to 0"):
        Schedule(sigmas=torch.tensor(sigmas))


def test_the_schedule_is_that_of_diffusers(flow_trainer):
    from diffusers import FlowMatchEulerDiscreteScheduler

    policy = flow_trainer().policy
    theirs = FlowMatchEulerDiscreteScheduler()
    theirs.set_timesteps(7)
    mine = make_schedule(policy, 7)
    assert torch.equal(mine.sigmas, theirs.sigmas)
    assert torch.equal(mine.timesteps, theirs.timesteps)


def test_e4m3_rounding_by_hand():
    """With the row's maximum at 448 the steps are 32 above 256, 1 between 8 and 16, and 1/512 around 0."""
    weight = torch.tensor([[448.0, 300.0, 9.4, 0.0009], [-44.8, 30.0, 0.94, 0.0]])
    rounded = round_to_e4m3(weight)
    torch.testing.assert_close(rounded[0], torch.tensor([448.0, 288.0, 9.0, 0.0]))
    torch.testing.assert_close(rounded[1], torch.tensor([-44.8, 28.8, 0.9, 0.0]), rtol=1e-6, atol=0)
    assert torch.equal(round_to_e4m3(torch.zeros(2, 2)), torch.zeros(2, 2))


def test_e4m3_products_by_hand():
    """Rows with their maximum at 448 · 2ⁿ and 16 equal columns: every product is exact in e4m3."""
    layer, x = torch.nn.Linear(16, 16, dtype=torch.bfloat16), torch.zeros(2, 3, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.bias.copy_(torch.arange(16))
        layer.weight.zero_()[3, :2] = torch.tensor([448.0, 9.0])
    x[1, 2, :2], x[0, 0, :1] = torch.tensor([2.0, 2.0]), 1.0
    y = linear_e4m3(layer, x)
    assert y.shape == (2, 3, 16)
    assert (y[1, 2, 3], y[0, 0, 3], y[1, 1, 5]) == (916, 452, 5)  # 914 + 3 and 448 + 3, rounded to bfloat16


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: hardware fp8 needs a GPU")
        ),
    ],
)
def test_e4m3_products_train(flow_trainer, device):
    """Activations in e4m3 add to the rounding of the weights."""
    kl = {}
    for dtype in ("fp8", "fp8_matmul"):
        trainer = flow_trainer(f"rollout.dtype={dtype}", f"device={device}")
        kl[dtype] = trainer.step(1).metrics["rollout_corr/exact_kl_mean"]
        assert trainer.skipped_steps == 0
    assert 0 < kl["fp8"] < kl["fp8_matmul"]


def test_devices_without_e4m3_products_are_named(flow_trainer, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no float8 here")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(ValueError, match=r"fp8_matmul: cpu cannot multiply e4m3 \(no float8 here\); use fp8"):
        flow_trainer("rollout.dtype=fp8_matmul")


def test_fp8_rounds_linear_weights_and_leaves_adapters_alone(flow_trainer):
    trainer = flow_trainer("rollout.dtype=fp8", "model.lora.rank=2")
    source, copied = trainer.policy.transformer.state_dict(), trainer.sampler.model.module.state_dict()
    assert {value.dtype for value in copied.values()} == {torch.bfloat16}
    adapter = next(name for name in source if "lora_A" in name)
    assert torch.equal(copied[adapter], source[adapter].bfloat16())
    base = adapter.replace("lora_A.default", "base_layer")
    assert torch.equal(copied[base], round_to_e4m3(source[base]).bfloat16())
    assert not torch.equal(copied[base], source[base].bfloat16())


def test_a_copy_of_another_model_is_not_filled_halfway(flow_trainer):
    plain, adapted = flow_trainer(), flow_trainer("model.lora.rank=2")
    with pytest.raises(ValueError, match=r"weight sync incomplete: .* on one side only"):
        plain.engine.update_weights(adapted.policy.transformer, version=1)


def test_exported_weights_are_the_copy(flow_trainer):
    trainer = flow_trainer("rollout.dtype=fp8")
    other = RolloutModel(flow_trainer("seed=5").policy.transformer, dtype="fp8")
    other.import_weights(trainer.sampler.model.export_weights(), version=7)
    assert other.weight_version == 7
    mine, theirs = (model.module.state_dict() for model in (other, trainer.sampler.model))
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
