"""Flow-GRPO as a recipe of the run loop: what it trains, what it saves, and the pictures before and after.

RUN/images/before.png, after.png hold the same prompts from the same noise, drawn without exploring.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.sinks import ProgressColumn
from rollcorr.train.checkpoint import Checkpoint
from rollcorr.train.flow_grpo.denoising_log import write_denoising_log
from rollcorr.train.flow_grpo.diffusion_policy import DiffusionPolicy, load_policy, save_policy
from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer, PictureStepResult
from rollcorr.train.flow_grpo.images import save_grid
from rollcorr.train.flow_grpo.prompts import PromptSource, read_prompts
from rollcorr.train.flow_grpo.rewards import make_reward
from rollcorr.train.flow_grpo.shapes import PROMPTS
from rollcorr.train.loop import Evaluation, Recipe
from rollcorr.train.reference_policy import check_reference
from rollcorr.train.steps import HELD_OUT


class FlowGrpoRecipe(Recipe):
    """A diffusion model, its prompts and its reward.

    Args:
        trainer: at the start of the run, or with the policy of a checkpoint.
        directory: where the pictures go.
    """

    config_class = FlowGrpoConfig
    evaluation_text = "reward {reward:.3f} over {pictures} pictures drawn without exploring"

    def __init__(self, trainer: FlowGrpoTrainer, directory: RunDirectory) -> None:
        self.trainer: FlowGrpoTrainer = trainer
        self.directory = directory
        self.newest: PictureStepResult | None = None
        self.keeps_reference = trainer.reference is not None
        # Bypass mode measures the mismatch in the loss, and has its metrics under another prefix.
        mismatch = "actor/rollout_corr" if trainer.actor.bypass_mode else "rollout_corr"
        self.columns = (
            ProgressColumn("reward", "reward/mean", "{:.3f}"),
            ProgressColumn("KL", f"{mismatch}/kl", "{:+.1e}"),
            ProgressColumn("k3", f"{mismatch}/k3_kl", "{:.1e}"),
            ProgressColumn("kept", "actor/kept_fraction", "{:.1%}"),
            ProgressColumn("loss", "actor/loss", "{:+.1e}"),
            ProgressColumn("passes", "perf/forward_passes", "{:.0f}"),
            ProgressColumn("images/s", "perf/images_per_second", "{:,.1f}"),
        )

    @classmethod
    def build(cls, config: FlowGrpoConfig, directory: RunDirectory, checkpoint: Checkpoint | None) -> FlowGrpoRecipe:
        """Load the policy and make the copy that samples."""
        reward = make_reward(config.reward.name, color_name=config.reward.color, function=config.reward.function)
        source = make_prompts(config)
        policy = make_policy(config, config.model.path if checkpoint is None else checkpoint.path)
        reference = _reference(config, directory, policy, checkpoint)
        trainer = FlowGrpoTrainer(config, policy, source, reward, reference=reference)
        trainer.engine.weight_version = 0 if checkpoint is None else checkpoint.state.step
        return cls(trainer, directory)

    def step(self, step: int) -> dict[str, float]:
        """One step of the trainer."""
        self.newest = self.trainer.step(step)
        return self.newest.metrics

    def write_extras(self, step: int) -> None:
        """Write the rollout log of the step."""
        if self.trainer.config.log.rollouts and self.newest is not None and not self.trainer.actor.bypass_mode:
            write_denoising_log(self.directory.rollout_log(step), step, self.newest.batch, self.trainer.config)

    def save_policy(self, directory: Path) -> None:
        """Write what was trained, and where the rest is."""
        save_policy(self.trainer.policy, directory)

    def evaluate(self, when: str) -> Evaluation:
        """Draw held-out pictures without exploring, judge them, and save a grid of the first ones."""
        trainer, config = self.trainer, self.trainer.config
        count = config.log.evaluate
        texts = [trainer.source.all[i % len(trainer.source.all)] for i in range(count)]

        pictures = []
        for number, part in enumerate(torch.arange(count, device="cpu").split(config.rollout.batch_size or count)):
            prompts = trainer.prompts(texts[i] for i in part.tolist())
            latents = trainer.sampler.draw(prompts, seed=config.seed, step=HELD_OUT + number)
            pictures.append(trainer.policy.decode(latents).cpu())
        images = torch.cat(pictures)

        if config.log.images:
            save_grid(images[: config.log.images], self.directory.picture(when))
        return {"reward": float(trainer.reward(images, texts).double().mean()), "pictures": count}


def make_prompts(config: FlowGrpoConfig) -> PromptSource:
    """The prompts that a configuration names."""
    return PromptSource(PROMPTS if config.prompts.path is None else read_prompts(config.prompts.path))


def make_policy(config: FlowGrpoConfig, path: str | Path) -> DiffusionPolicy:
    """The policy in a directory, as a configuration wants it.

    Raises:
        ImportError: the extra is missing.
    """
    try:
        import diffusers  # noqa: F401
    except ImportError as error:
        raise ImportError("diffusion policies need pip install 'rollcorr[diffusion]'") from error

    model = config.model
    policy = load_policy(
        path,
        height=model.height,
        width=model.width,
        lora=model.lora,
        encoder_dtype=getattr(torch, model.encoder_dtype),
        device=config.device,
        seed=config.seed,
    )
    if model.gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    return policy


def _reference(
    config: FlowGrpoConfig, directory: RunDirectory, policy: DiffusionPolicy, checkpoint: Checkpoint | None
) -> nn.Module | None:
    """The transformer that the run started from, when a KL penalty asks for it; adapters have it below them."""
    if config.algorithm.loss.kl_coef == 0 or config.model.lora.rank:
        return None
    if checkpoint is None:
        reference: nn.Module = copy.deepcopy(policy.transformer)
    else:
        check_reference(directory.reference, checkpoint)
        reference = make_policy(config, directory.reference).transformer
    return reference.eval().requires_grad_(False)
