"""Make logs of pictures with and without faults, and keep what the verdict reads of them.

    python experiments/pictures/make_logs.py OUT.npz --seeds 10

Every fault is planted in the program that samples or scores, never in the numbers. D = 768: the small shapes model of
`rollcorr.train.flow_grpo`. D = 65,536: an analytic denoiser of a Gaussian mixture on latents of 16 × 64 × 64
(`analytic_denoiser.py`). Weights that were never sent are trained with the recipe's own loss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from analytic_denoiser import analytic_logs
from torch import Tensor

from rollcorr.core.diffusion import gaussian_log_prob
from rollcorr.diffusion.step_correction import step_kl
from rollcorr.train import load_config
from rollcorr.train.flow_grpo.families import velocity
from rollcorr.train.flow_grpo.flow_grpo_config import DiffusionRolloutConfig
from rollcorr.train.flow_grpo.flow_grpo_recipe import make_policy, make_prompts
from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer, PictureBatch
from rollcorr.train.flow_grpo.rewards import make_reward
from rollcorr.train.flow_grpo.sampler import RolloutModel, Schedule

STEPS, NULL_STEPS = 3, 3
STALE_STEPS = {"1e-5": 24, "5e-5": 10, "4e-4": 10}
CONFIG = Path(__file__).parents[2] / "examples" / "train" / "flow_grpo.yaml"
SETTINGS = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "optim.mini_batch_size=8",
    "log.tensorboard=false",
)
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

    def guide(self, guidance: float) -> DiffusionRolloutConfig:
        """Set the guidance of sampler and trainer."""
        rollout = replace(self.trainer.config.rollout, guidance_scale=guidance)
        self.trainer.config = replace(self.trainer.config, rollout=rollout)
        return rollout

    def sampled(self, step: int, *, dtype: str = "bfloat16", guidance: float = 1.0) -> PictureBatch:
        """Pictures of a sampler with the trainer's weights, in a precision and with a guidance."""
        trainer = self.trainer
        if trainer.engine.dtype != dtype:
            trainer.engine = RolloutModel(trainer.model, dtype=dtype)
            trainer.sampler = replace(trainer.sampler, model=trainer.engine)
        trainer.engine.update_weights(trainer.model, version=step - 1)
        rollout = self.guide(guidance)
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
        guidance: float | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """log π (B, W) and the exact KL (B, W) of a trainer with another schedule, guidance, or prompts by row."""
        trainer, given = self.trainer, batch.trajectories.prompts
        prompts = given if rows is None else given.select(rows)
        if guidance is not None:
            names = batch.texts[:: trainer.config.rollout.group_size]
            before = trainer.config
            rollout = self.guide(guidance)
            prompts = trainer.prompts(names, copies=rollout.group_size)
            trainer.config = before
        used = schedule or trainer.schedule
        log_pi, means = [], []
        for column in range(batch.trajectories.steps.shape[1]):
            x, after = batch.data["latents"][:, column], batch.data["latents"][:, column + 1]
            steps = batch.trajectories.steps[:, column]
            v = velocity(trainer.model, trainer.policy.family, x, used.at(steps)[0], prompts, size=trainer.policy.size)
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


def columns_of(batch: PictureBatch, step: int, log_pi: Tensor, kl: Tensor) -> Log:
    """What a rollout log records of a step, one value for each denoising step, flat."""
    data = batch.data
    sigma, sigma_next = batch.trajectories.schedule.at(batch.trajectories.steps)
    width = log_pi.shape[1]
    found = {
        "step": torch.full_like(log_pi, step),
        "group": batch.group_ids[:, None].expand(-1, width),
        "timestep": data["timesteps"],
        "sigma": sigma,
        "sigma_next": sigma_next,
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
    return replace(schedule, sigmas=factor * sigmas / (1 + (factor - 1) * sigmas))


class OffByOne(Schedule):
    """Scores each step with the σ of the next one."""

    def at(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """σ and the next σ of the step behind."""
        return super().at((steps + 1).clamp(max=self.steps - 1))


def shapes_logs(seed: int) -> Iterator[tuple[str, Log]]:
    """Every log of one seed at D = 768, with its name: kind, or null of a kind."""
    rate = ("1e-5", "5e-5", "4e-4")[seed % 3]
    lab = Laboratory(seed, f"optim.lr={rate}")

    # Nulls of the start: the same weights on both sides, right settings, other noise than the logs'.
    for kind, settings in (("bf16", {}), ("fp8", {"dtype": "fp8"}), ("guided", {"guidance": 3.0})):
        parts = [lab.sampled(10_000 + step, **settings) for step in range(NULL_STEPS)]
        scores = [lab.scored(part) for part in parts]
        yield f"null {kind}", joined([columns_of(b, i, *s) for i, (b, s) in enumerate(zip(parts, scores, strict=True))])

    # Weights that the sampler never gets: it keeps those of step 1.
    lab.guide(1.0)
    stale, engine = [], RolloutModel(lab.trainer.model, dtype="bfloat16")
    for step in range(1, STALE_STEPS[rate] + 1):
        lab.trainer.engine, lab.trainer.sampler = engine, replace(lab.trainer.sampler, model=engine)
        trajectories, texts = lab.trainer.sample(step)
        groups = torch.arange(4).repeat_interleave(4)
        lab.newest = PictureBatch(
            trajectories=trajectories,
            texts=texts,
            images=torch.zeros(1),
            rewards=torch.zeros(1),
            group_ids=groups,
            data=trajectories.data,
        )
        stale.append(columns_of(lab.newest, step, *lab.scored(lab.newest)))
        lab.train(step)
    yield "stale", joined(stale)

    # The rest with the weights that were trained: the sampler has them.
    sharp = np.random.default_rng(seed)
    level, shift = float(sharp.choice([0.5, 0.6, 0.8, 1.0])), float(sharp.choice([1.5, 2.0, 3.0]))
    wrong_guidance = float(sharp.choice([1.5, 3.0, 4.5]))
    logs: dict[str, list[Log]] = {}

    def add(kind: str, batch: PictureBatch, step: int, **fault: object) -> None:
        logs.setdefault(kind, []).append(columns_of(batch, step, *lab.scored(batch, **fault)))

    for step in range(1, STEPS + 1):
        batch = lab.sampled(step)
        rows = torch.arange(len(batch))
        other = torch.where(rows % 8 == seed % 8, (rows + 4) % len(rows), rows)
        schedule = lab.trainer.schedule
        add("healthy bf16", batch, step)
        add("prompts", batch, step, rows=other)
        add("noise level", batch, step, schedule=replace(schedule, noise_level=level))
        add("shift", batch, step, schedule=shifted(schedule, shift))
        add("schedule", batch, step, schedule=OffByOne(sigmas=schedule.sigmas, noise_level=schedule.noise_level))
        add("guidance", batch, step, guidance=wrong_guidance)
        add("guidance lost", lab.sampled(step, guidance=3.0), step, guidance=1.0)
        add("healthy guided", lab.sampled(step + 100, guidance=3.0), step)
        lab.guide(1.0)
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
    arguments.add_argument("--large-seeds", type=int, default=4)
    given = arguments.parse_args()
    torch.set_num_threads(1)

    found: dict[str, np.ndarray] = {}
    sources: list[tuple[int, Callable[[int], Iterator[tuple[str, Log]]], int]] = [
        (65_536, analytic_logs, given.large_seeds),
        (768, shapes_logs, given.seeds),
    ]
    for dimensions, make, seeds in sources:
        for seed in range(seeds):
            for kind, log in make(seed):
                name = f"{dimensions}/{seed}/{kind}"
                found[name] = np.stack([log[column] for column in COLUMNS]).astype(np.float32)
                sys.stdout.write(f"{name}: mean KL {log['kl'].mean():.4g}\n")
                sys.stdout.flush()
            np.savez_compressed(given.output, **found)


if __name__ == "__main__":
    main()
