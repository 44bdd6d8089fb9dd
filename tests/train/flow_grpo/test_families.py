"""Wan, Stable Diffusion 1.5 and families of your own: log-probs against diffusers' schedulers, and training."""

import dataclasses
import itertools

import pytest
import tiny_pipelines
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, PNDMScheduler, UniPCMultistepScheduler

from rollcorr.train import Family, FlowGrpoTrainer, load_config
from rollcorr.train.config_file import check_trusted
from rollcorr.train.flow_grpo.diffusion_policy import load_policy
from rollcorr.train.flow_grpo.families import StableDiffusion1, Wan
from rollcorr.train.flow_grpo.family import predict
from rollcorr.train.flow_grpo.flow_grpo_recipe import make_policy
from rollcorr.train.flow_grpo.rewards import make_reward

TEXTS = ["a red circle", "a green square"]
HOLES = ["rollout.sde_window_spacing=2", "rollout.sde_window=per_sample"]
MOVING = ["rollout.sde_window=moving", "rollout.sde_window_interval=1"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of the pipelines


@pytest.fixture(scope="module", params=["wan", "sd15"])
def pipeline(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pipelines") / request.param
    tiny_pipelines.PIPELINES[request.param](directory)
    return directory


def step_moments(scheduler, prediction, number, x, noise_level):
    """Mean and deviation of a step, with the arithmetic of diffusers' scheduler."""
    t = scheduler.timesteps[number]
    if isinstance(scheduler, DDIMScheduler):
        before = int(t) - scheduler.config.num_train_timesteps // scheduler.num_inference_steps
        mean = scheduler.step(prediction, int(t), x, eta=noise_level, variance_noise=torch.zeros_like(x)).prev_sample
        return mean, noise_level * scheduler._get_variance(int(t), before) ** 0.5
    scheduler._step_index = number
    straight = scheduler.step(prediction, t, x).prev_sample
    sigma, dt = scheduler.sigmas[number], scheduler.sigmas[number + 1] - scheduler.sigmas[number]
    g = noise_level * (sigma / (1 - min(sigma, scheduler.sigmas[1]))).sqrt()
    return straight + g**2 * dt / (2 * sigma) * (x + (1 - sigma) * prediction), g * (-dt).sqrt()


@pytest.mark.parametrize(("dtype", "window"), [("float32", HOLES), ("float16", HOLES), ("float16", MOVING)])
def test_log_probs_equal_the_scheduler_of_diffusers(pipeline, dtype, window):
    """Two training steps; rollout and trainer, each with its own network's prediction, to 1e-6."""
    config = load_config(
        None,
        ["recipe=flow_grpo", f"model.path={pipeline}", "model.height=16", "rollout.prompts_per_step=2", "steps=2",
         "rollout.group_size=2", "rollout.num_steps=5", "reward.name=color", "optim.lr=0.01", f"rollout.dtype={dtype}",
         *window],
    )  # fmt: skip
    trainer = FlowGrpoTrainer(config, make_policy(config, pipeline), TEXTS, make_reward("color"))
    policy, scheduler = trainer.policy, type(trainer.policy.scheduler).from_config(trainer.policy.scheduler.config)
    scheduler.set_timesteps(5)
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    assert trainer.step(1).metrics["rollout_corr/exact_kl_mean"] >= (1e-12 if dtype == "float16" else 0)

    batch = trainer._build_batch(*trainer.sample(2))
    trainer._add_old_log_probs(batch)
    data, steps = batch.data, batch.trajectories.steps
    following = data.get("next_latents", data["latents"][:, 1:])
    assert ("next_latents" in data) == (window is HOLES)
    for row, column in itertools.product(range(4), range(2)):
        number, one = int(steps[row, column]), slice(row, row + 1)
        x, prompt = data["latents"][one, column], batch.trajectories.prompts.select(torch.tensor([row]))
        assert data["timesteps"][row, column] == scheduler.timesteps[number]
        for network, name in ((trainer.engine.module, "rollout_log_probs"), (policy.transformer, "old_log_probs")):
            with torch.no_grad():
                v = predict(network, policy.family, x, scheduler.timesteps[number][None], prompt, size=policy.size)
            mean, std = step_moments(scheduler, v, number, x, 0.7)
            expected = torch.distributions.Normal(mean, std).log_prob(following[one, column]).mean()
            torch.testing.assert_close(data[name][row, column], expected, rtol=0, atol=1e-6)

    trainer.step(2)
    assert trainer.skipped_steps == 0
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.parameters, strict=True))


def test_unipc_gives_its_sigmas_and_no_others():
    options = {"prediction_type": "flow_prediction", "flow_shift": 3.0}
    unipc = UniPCMultistepScheduler(use_flow_sigmas=True, solver_order=1, disable_corrector=[0, 1, 2, 3], **options)
    made = Wan().schedule(unipc, {"patch_size": (1, 2, 2)}, (8, 8), steps=4, noise_level=0.7)
    torch.testing.assert_close(made.sigmas, unipc.sigmas)
    assert made.timesteps.tolist() == unipc.timesteps.tolist()  # whole numbers, as Wan's pipeline passes them

    # UniPC begins at 0.999999: the noise of the first step must be that of σ = 1.
    _, std = made.moments(torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([0]))
    after = unipc.sigmas[1]
    assert std[0] == pytest.approx(float(0.7 * (1 / (1 - after) * (1 - after)).sqrt()), rel=1e-4)

    # Without corrector and at order 1, UniPC takes the same Euler step.
    x, v = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    step = unipc.step(v, unipc.timesteps[0], x).prev_sample
    torch.testing.assert_close(made.straight(v, x, torch.tensor([0])), step, rtol=0, atol=1e-5)

    with pytest.raises(ValueError, match="use_flow_sigmas of Wan's scheduler must be true"):
        Wan().schedule(UniPCMultistepScheduler(**options), {"patch_size": (1, 2, 2)}, (8, 8), steps=4, noise_level=0.7)
    with pytest.raises(ValueError, match="two transformers"):
        Wan().check({"boundary_ratio": 0.875})


@pytest.mark.parametrize(("predicts", "clip"), [("epsilon", False), ("v_prediction", True)])
def test_ddim_steps_equal_those_of_diffusers(predicts, clip):
    """Also from the configuration of PNDM, which Stable Diffusion 1.5 ships."""
    kind = DDIMScheduler if clip else PNDMScheduler
    shipped = kind(prediction_type=predicts, steps_offset=1)
    if not clip:
        shipped.register_to_config(clip_sample=False)
    made = StableDiffusion1().schedule(shipped, {"block_out_channels": (8, 8)}, (8, 8), steps=10, noise_level=0.5)
    ddim = DDIMScheduler.from_config(shipped.config)
    ddim.set_timesteps(10)
    x, prediction = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    for number in range(9):
        mean, std = step_moments(ddim, prediction, number, x, 0.5)
        mine, deviation = made.moments(prediction, x, torch.tensor([number]))
        torch.testing.assert_close(mine, mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(deviation[0], std, rtol=1e-5, atol=1e-7)

        # Without clipping, the mean gives back what the model predicted.
        plain, at = dataclasses.replace(made, clip=None), torch.tensor([number])
        clean = plain.predicted_clean(plain.moments(prediction, x, at)[0], x, at)
        expected = ddim.step(prediction, int(ddim.timesteps[number]), x).pred_original_sample
        torch.testing.assert_close(clean.clamp(-1, 1) if clip else clean, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "steps", "noise_level", "message"),
    [
        ({"thresholding": True}, 10, 0.7, "needs no thresholding"),
        ({"prediction_type": "sample"}, 10, 0.7, "prediction_type='sample'"),
        ({"timestep_spacing": "linspace"}, 10, 0.7, "timestep_spacing to leading"),
        ({}, 10, 1.5, "noise_level=1.5 is η of DDIM, which is at most 1"),
    ],
)
def test_unsupported_ddim_options_are_refused(options, steps, noise_level, message):
    with pytest.raises(ValueError, match=message):
        StableDiffusion1().schedule(
            DDIMScheduler(**options), {"block_out_channels": (8,)}, (8, 8), steps=steps, noise_level=noise_level
        )


OWN = '''
from rollcorr.train import Condition, Family, Schedule


class Own(Family):
    """SD3 in pixel space, with squared σ."""

    def arguments(self, latents, timestep, condition, guidance, height, width):
        return {
            "hidden_states": latents,
            "timestep": timestep,
            "encoder_hidden_states": condition.embeds,
            "pooled_projections": condition.pooled,
        }

    def encode(self, pipeline, prompt, device):
        raise AssertionError("this model has a word table")

    def schedule(self, scheduler, config, size, *, steps, noise_level):
        made = super().schedule(scheduler, config, size, steps=steps, noise_level=noise_level)
        return Schedule(sigmas=made.sigmas**2, noise_level=noise_level)


def no_family():
    return 3
'''


def test_a_family_of_your_own_trains(flow_trainer, tmp_path, weights):
    file = tmp_path / "own.py"
    file.write_text(OWN, encoding="utf-8")
    trainer = flow_trainer(f"model.family={file}:Own", "rollout.dtype=float32")
    assert isinstance(trainer.policy.family, Family)
    before = weights(trainer)
    result = trainer.step(1)
    assert result.metrics["rollout_corr/exact_kl_mean"] == 0
    assert not torch.equal(weights(trainer), before)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(trainer.policy.scheduler.config)
    scheduler.set_timesteps(4)
    torch.testing.assert_close(result.batch.trajectories.schedule.sigmas, scheduler.sigmas**2)
    with pytest.raises(ValueError, match=r"no_family' is no subclass of rollcorr.train.Family"):
        load_policy(trainer.config.model.path, family=f"{file}:no_family")


def test_a_family_from_a_file_needs_trust(flow_config, tmp_path):
    own = f"model.family={tmp_path / 'own.py'}:Own"
    config = flow_config(own)
    check_trusted(config, [own])
    with pytest.raises(ValueError, match=r"model.family=.* may run code and comes from run.yaml"):
        check_trusted(config, [], "run.yaml")
