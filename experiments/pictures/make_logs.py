"""Make logs of pictures with and without faults, and keep what the verdict reads of them.

    python experiments/pictures/make_logs.py OUT.npz --seeds 10
    python experiments/pictures/make_logs.py OTHER.npz --others --seeds 10
    python experiments/pictures/make_logs.py TABLE.npz --sizes --seeds 7 --large-seeds 0

Every fault is planted in the program that samples or scores, never in the numbers. D = 768: the small shapes model of
`rollcorr.train.flow_grpo`. D = 65,536: an analytic denoiser of a Gaussian mixture on latents of 16 × 64 × 64
(`analytic_denoiser.py`). Weights that were never sent are trained with the recipe's own loss. `--others`: the models,
prompts and settings of `other_models.py`. `--sizes`: 4 × 8 and 12 × 8 pictures in each step, and all three learning
rates for each seed. Seeds that the file already has stay as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from analytic_denoiser import analytic_logs
from other_models import SETTINGS as OTHERS
from other_models import make_model
from torch import Tensor

from rollcorr.core.diffusion import gaussian_log_prob
from rollcorr.diffusion.step_correction import step_kl
from rollcorr.train import load_config
from rollcorr.train.flow_grpo.family import predict
from rollcorr.train.flow_grpo.flow_grpo_config import DiffusionRolloutConfig
from rollcorr.train.flow_grpo.flow_grpo_recipe import make_policy, make_prompts
from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer, PictureBatch
from rollcorr.train.flow_grpo.rewards import make_reward
from rollcorr.train.flow_grpo.sampler import RolloutModel, round_to_e4m3
from rollcorr.train.flow_grpo.schedule import Schedule

STEPS, NULL_STEPS = 3, 3
STALE_STEPS = {"1e-5": 24, "5e-5": 10, "4e-4": 10}
CONFIG = Path(__file__).parents[2] / "examples" / "train" / "flow_grpo.yaml"
SETTINGS = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "optim.mini_batch_size=8",
    "log.tensorboard=false",
)
SIZE = "rollout.prompts_per_step={} rollout.group_size=8 optim.mini_batch_size={}"
COLUMNS = ("step", "group", "timestep", "sigma", "sigma_next", "std", "log_mu", "log_pi", "kl", "version")
Log = dict[str, np.ndarray]


class Laboratory:
    """The shapes model, a sampler, and trainers with and without a fault."""

    def __init__(self, seed: int, *overrides: str) -> None:
        config = load_config(CONFIG, [*SETTINGS, f"seed={seed}", *overrides])
        policy = make_policy(config, config.model.path)
        texts, _ = make_prompts(config)
        reward = make_reward(config.reward.name, color_name=config.reward.color, function=config.reward.function)
        self.trainer = FlowGrpoTrainer(config, policy, texts, reward)

    def set(self, **options: Any) -> DiffusionRolloutConfig:  # noqa: ANN401
        """Change options of sampler and trainer."""
        rollout = replace(self.trainer.config.rollout, **options)
        self.trainer.config = replace(self.trainer.config, rollout=rollout)
        return rollout

    def sampled(self, step: int, *, dtype: str = "bfloat16", guidance: float = 1.0) -> PictureBatch:
        """Pictures of a sampler with the trainer's weights, in a precision and with a guidance."""
        trainer = self.trainer
        if trainer.engine.dtype != dtype:
            trainer.engine = RolloutModel(trainer.model, dtype=dtype)
            trainer.sampler = replace(trainer.sampler, model=trainer.engine)
        trainer.engine.update_weights(trainer.model, version=step - 1)
        if dtype == "fp8" and type(trainer.model).__name__ == "UNet2DConditionModel":
            _round_convolutions(trainer.engine.module)
        rollout = self.set(guidance_scale=guidance)
        trajectories, texts = trainer.sample(step)
        groups = torch.arange(rollout.prompts_per_step).repeat_interleave(rollout.group_size)
        return PictureBatch(
            trajectories=trajectories,
            texts=texts,
            images=torch.zeros(len(texts), 1),
            rewards=torch.zeros(len(texts)),
            group_ids=groups,
            data=trajectories.data,
        )

    @torch.no_grad()
    def scored(
        self,
        batch: PictureBatch,
        *,
        schedule: Schedule | None = None,
        lag: int = 0,
        guidance: float | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """log π (B, W) and the exact KL (B, W) of a trainer with another schedule, guidance, or prompts by row.

        A trainer with a lag scores each step with the σ and the timestep of a later one.
        """
        trainer, given = self.trainer, batch.trajectories.prompts
        prompts = given if rows is None else given.select(rows)
        if guidance is not None:
            names = batch.texts[:: trainer.config.rollout.group_size]
            before = trainer.config
            rollout = self.set(guidance_scale=guidance)
            prompts = trainer.prompts(names, copies=rollout.group_size)
            trainer.config = before
        used = schedule or trainer.schedule
        log_pi, means = [], []
        for column in range(batch.trajectories.steps.shape[1]):
            x, after = batch.data["latents"][:, column], batch.data["latents"][:, column + 1]
            steps = (batch.trajectories.steps[:, column] + lag).clamp(max=used.steps - 1)
            times = used.timestep(steps)
            v = predict(trainer.model, trainer.policy.family, x, times, prompts, size=trainer.policy.size)
            mean, std = used.moments(v, x, steps)
            log_pi.append(gaussian_log_prob(after, mean, std))
            means.append(mean)
        kl = step_kl(torch.stack(means, 1), batch.data["prev_sample_mean"], batch.data["std"])
        assert kl is not None
        return torch.stack(log_pi, 1), kl

    def train(self, step: int) -> None:
        """One update of the trainer; the sampler is not told."""
        trainer = self.trainer
        batch = self.newest
        images = trainer.policy.decode(batch.trajectories.final)
        batch = replace(batch, images=images, rewards=trainer.reward(images, batch.texts))
        trainer._add_old_log_probs(batch)
        trainer._add_correction(batch)
        batch.data["advantages"] = (batch.rewards - batch.rewards.mean()) / (batch.rewards.std() + 1e-4)
        trainer._update(batch, step)


@torch.no_grad()
def _round_convolutions(module: torch.nn.Module) -> None:
    """Round the weights of convolutions like those of linear layers, as an engine that keeps all of a UNet in fp8."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.weight.copy_(round_to_e4m3(layer.weight.float().flatten(1)).view_as(layer.weight))


def columns_of(batch: PictureBatch, step: int, log_pi: Tensor, kl: Tensor) -> Log:
    """What a rollout log records of a step, one value for each denoising step, flat."""
    data = batch.data
    width, unknown = log_pi.shape[1], torch.full_like(log_pi, torch.nan)
    sigmas = batch.trajectories.schedule.logged(batch.trajectories.steps)
    found = {
        "step": torch.full_like(log_pi, step),
        "group": batch.group_ids[:, None].expand(-1, width),
        "timestep": data["timesteps"],
        "sigma": sigmas.get("sigma", unknown),
        "sigma_next": sigmas.get("sigma_next", unknown),
        "std": data["std"],
        "log_mu": data["rollout_log_probs"],
        "log_pi": log_pi,
        "kl": kl,
        "version": torch.full_like(log_pi, batch.trajectories.version),
    }
    return {name: found[name].float().numpy().ravel() for name in COLUMNS}


def joined(parts: list[Log]) -> Log:
    """One log of several steps."""
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def shifted(schedule: Schedule, factor: float) -> Schedule:
    """The schedule of a scheduler whose shift is larger by a factor: σ′ = f σ / (1 + (f − 1) σ)."""
    sigmas = schedule.sigmas
    return replace(schedule, sigmas=factor * sigmas / (1 + (factor - 1) * sigmas), values=None)


@dataclass(frozen=True)
class Choices:
    """Settings of a model's logs.

    Attributes:
        stale_steps: steps with weights that are not sent.
        guidance: of guided logs.
        wrong_guidance: of a trainer whose sampler has none.
        level: a wrong noise level.
        shift: factor of a wrong scheduler shift; None for a schedule without shift.
        every: one picture in so many has a different prompt.
        null_windows: windows of the null's pictures.
    """

    stale_steps: int
    guidance: float
    wrong_guidance: float
    level: float
    shift: float | None
    every: int = 8
    null_windows: str = "shared"


def shapes_logs(seed: int) -> Iterator[tuple[str, Log]]:
    """Every log of one seed at D = 768, with its name: kind, or null of a kind."""
    rate = ("1e-5", "5e-5", "4e-4")[seed % 3]
    draw = np.random.default_rng(seed)
    level, shift = float(draw.choice([0.5, 0.6, 0.8, 1.0])), float(draw.choice([1.5, 2.0, 3.0]))
    choices = Choices(STALE_STEPS[rate], 3.0, float(draw.choice([1.5, 3.0, 4.5])), level, shift)
    yield from logs_of(Laboratory(seed, f"optim.lr={rate}"), seed, choices)


def other_logs(name: str, seed: int, folder: Path) -> Iterator[tuple[str, Log]]:
    """Every log of one seed of a model of `other_models.py`."""
    setting, draw = OTHERS[name], np.random.default_rng(1000 + seed)
    directory = folder / f"{name}-{seed % 2}"
    if not directory.exists():
        make_model(name, 50 + seed % 2, directory)
    rate = tuple(setting.rates)[seed % 3]
    steps = setting.steps[seed // 3 % 3]
    lab = Laboratory(
        seed,
        f"model.path={directory}",
        f"model.height={setting.size}",
        f"prompts.path={directory / 'prompts.txt'}",
        "reward.name=color",
        f"optim.lr={rate}",
        f"rollout.num_steps={steps}",
        f"rollout.sde_window_range=[0,{steps // 2}]",
        f"rollout.noise_level={setting.level[0]}",
    )
    choices = Choices(
        stale_steps=setting.rates[rate],
        guidance=setting.guidance[0],
        wrong_guidance=float(draw.choice(setting.guidance[1:])),
        level=float(draw.choice(setting.level[1:])),
        shift=float(draw.choice([1.5, 2.0, 4.0])) if name == "wan" else None,
        every=5,
        null_windows="per_sample",
    )
    yield from logs_of(lab, seed, choices)


def null_logs(lab: Laboratory, guidance: float) -> Iterator[tuple[str, Log]]:
    """Nulls of the start: the same weights on both sides, right settings, other noise than the logs'."""
    for kind, settings in (("bf16", {}), ("fp8", {"dtype": "fp8"}), ("guided", {"guidance": guidance})):
        parts = [lab.sampled(10_000 + step, **settings) for step in range(NULL_STEPS)]
        scores = [lab.scored(part) for part in parts]
        yield f"null {kind}", joined([columns_of(b, i, *s) for i, (b, s) in enumerate(zip(parts, scores, strict=True))])


def stale_log(lab: Laboratory, steps: int) -> Log:
    """Weights that the sampler never gets: it keeps those of step 1."""
    rollout = lab.set(guidance_scale=1.0)
    stale, engine = [], RolloutModel(lab.trainer.model, dtype="bfloat16")
    for step in range(1, steps + 1):
        lab.trainer.engine, lab.trainer.sampler = engine, replace(lab.trainer.sampler, model=engine)
        trajectories, texts = lab.trainer.sample(step)
        lab.newest = PictureBatch(
            trajectories=trajectories,
            texts=texts,
            images=torch.zeros(1),
            rewards=torch.zeros(1),
            group_ids=torch.arange(rollout.prompts_per_step).repeat_interleave(rollout.group_size),
            data=trajectories.data,
        )
        stale.append(columns_of(lab.newest, step, *lab.scored(lab.newest)))
        lab.train(step)
    return joined(stale)


def size_logs(seed: int) -> Iterator[tuple[str, Log]]:
    """Logs of one seed at D = 768 with 32 pictures in each step, and one step of 96 pictures."""
    for rate, steps in STALE_STEPS.items():
        lab = Laboratory(seed, *SIZE.format(4, 16).split(), f"optim.lr={rate}")
        if rate == "1e-5":
            yield from null_logs(lab, 3.0)
        yield f"stale @ {rate}", stale_log(lab, steps)
    lab.set(guidance_scale=1.0)
    yield "healthy bf16", joined([columns_of(b, s, *lab.scored(b)) for s in (1, 2, 3) for b in [lab.sampled(s)]])
    fp8 = [(s, lab.sampled(s, dtype="fp8")) for s in (1, 2, 3)]
    yield "healthy fp8", joined([columns_of(b, s, *lab.scored(b)) for s, b in fp8])
    batch = lab.sampled(1, guidance=3.0)
    yield "guidance lost", columns_of(batch, 1, *lab.scored(batch, guidance=1.0))
    for prompts in (4, 12):
        lab = Laboratory(seed, *SIZE.format(prompts, 16).split())
        batch = lab.sampled(1)
        scores = lab.scored(batch, rows=wrong_rows(len(batch), 8, seed, 8))
        yield f"prompts @ {prompts} x 8", columns_of(batch, 1, *scores)


def wrong_rows(pictures: int, every: int, first: int, group_size: int) -> Tensor:
    """Rows whose prompts a trainer reads, (B,): one picture in `every` has the next group's."""
    rows = torch.arange(pictures)
    return torch.where(rows % every == first % every, (rows + group_size) % pictures, rows)


def logs_of(lab: Laboratory, seed: int, choices: Choices) -> Iterator[tuple[str, Log]]:
    """Every log of a model, with its name: kind, or null of a kind."""
    windows = lab.trainer.config.rollout.sde_window
    lab.set(sde_window=choices.null_windows)
    yield from null_logs(lab, choices.guidance)
    rollout = lab.set(sde_window=windows)
    yield "stale", stale_log(lab, choices.stale_steps)

    # The rest with the weights that were trained: the sampler has them.
    logs: dict[str, list[Log]] = {}

    def add(kind: str, batch: PictureBatch, step: int, **fault: object) -> None:
        logs.setdefault(kind, []).append(columns_of(batch, step, *lab.scored(batch, **fault)))

    for step in range(1, STEPS + 1):
        batch = lab.sampled(step)
        wrong = wrong_rows(len(batch), choices.every, seed, rollout.group_size)
        schedule = lab.trainer.schedule
        add("healthy bf16", batch, step)
        add("prompts", batch, step, rows=wrong)
        add("noise level", batch, step, schedule=replace(schedule, noise_level=choices.level))
        if choices.shift is not None:
            add("shift", batch, step, schedule=shifted(schedule, choices.shift))
        add("schedule", batch, step, lag=1)
        add("guidance", batch, step, guidance=choices.wrong_guidance)
        add("guidance lost", lab.sampled(step, guidance=choices.guidance), step, guidance=1.0)
        add("healthy guided", lab.sampled(step + 100, guidance=choices.guidance), step)
        lab.set(guidance_scale=1.0)
        add("precision", lab.sampled(step, dtype="fp8"), step)
        add("healthy fp8", lab.sampled(step + 100, dtype="fp8"), step)
        add("healthy bf16 again", lab.sampled(step + 100), step)
    for kind, parts in logs.items():
        yield kind, joined(parts)


def main() -> None:
    """Make the logs of every seed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("output", type=Path)
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--large-seeds", type=int, default=10)
    arguments.add_argument("--others", action="store_true", help="the models of other_models.py instead")
    arguments.add_argument("--sizes", action="store_true", help="the shapes model with 32 and 96 pictures in each step")
    given = arguments.parse_args()
    torch.set_num_threads(1)

    found: dict[str, np.ndarray] = dict(np.load(given.output)) if given.output.exists() else {}
    done = {name.rpartition("/")[0] for name in found}
    with TemporaryDirectory() as folder:
        sources: list[tuple[int, Callable[[int], Iterator[tuple[str, Log]]], int]] = [
            (65_536, analytic_logs, given.large_seeds),
            (768, size_logs if given.sizes else shapes_logs, given.seeds),
        ]
        if given.others:
            sources = [
                (3 * OTHERS[name].size ** 2, partial(other_logs, name, folder=Path(folder)), given.seeds)
                for name in OTHERS
            ]
        for seed in range(max(given.seeds, given.large_seeds)):
            for dimensions, make, seeds in sources:
                for kind, log in make(seed) if seed < seeds and f"{dimensions}/{seed}" not in done else ():
                    name = f"{dimensions}/{seed}/{kind}"
                    found[name] = np.stack([log[column] for column in COLUMNS]).astype(np.float32)
                    sys.stdout.write(f"{name}: mean KL {log['kl'].mean():.4g}\n")
                    sys.stdout.flush()
                np.savez_compressed(given.output, **found)


if __name__ == "__main__":
    main()
