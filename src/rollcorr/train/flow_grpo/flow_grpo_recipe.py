"""Flow-GRPO as a recipe of the run loop: build, save and evaluate its policy.

RUN/images/before.png and after.png show the same prompts from the same noise, drawn along the ODE. If the prompts name
colored shapes, every step and both evaluations log how often a picture has the color and the shape of its prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollcorr.diffusion.step_correction import step_kl
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.sinks import ProgressColumn
from rollcorr.run_directory.stored_run import BadInputError
from rollcorr.train.checkpoint import Checkpoint
from rollcorr.train.flow_grpo.diffusion_policy import DiffusionPolicy, load_policy, save_policy
from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.flow_grpo.flow_grpo_trainer import (
    FirstScores,
    FlowGrpoTrainer,
    PictureBatch,
    PictureStepResult,
)
from rollcorr.train.flow_grpo.fresh_pictures import denoising_batch
from rollcorr.train.flow_grpo.images import save_grid, strip
from rollcorr.train.flow_grpo.prompts import read_prompts
from rollcorr.train.flow_grpo.rewards import make_reward
from rollcorr.train.flow_grpo.schedule import Schedule
from rollcorr.train.flow_grpo.shapes import (
    HELD_OUT_PROMPTS,
    SHAPES,
    TRAINED_PROMPTS,
    background_noise,
    class_of,
    classes_in,
    recognized,
)
from rollcorr.train.loop import Evaluation, Recipe
from rollcorr.train.reference_policy import reference_model
from rollcorr.train.steps import HELD_OUT

if TYPE_CHECKING:
    from rollcorr.diagnostics import PictureNull
    from rollcorr.rollout_log import RolloutBatch

logger = logging.getLogger(__name__)

DECODED = 4
"""Pictures of a step whose predictions are decoded for the rollout log."""


class FlowGrpoRecipe(Recipe):
    """A diffusion model, its prompts and its reward.

    Args:
        trainer: at the start of the run, or with the policy of a checkpoint.
        directory: directory of the run, for the pictures.
        held_out: prompts for evaluation only.
    """

    config_class = FlowGrpoConfig
    evaluation_text = "reward {reward:.3f} over {pictures} pictures drawn without exploring"

    def __init__(self, trainer: FlowGrpoTrainer, directory: RunDirectory, held_out: Sequence[str] = ()) -> None:
        self.trainer: FlowGrpoTrainer = trainer
        self.directory = directory
        self.held_out = held_out
        self.shows_shapes = all(len(classes_in(text)) == 1 for text in trainer.texts)
        self.newest: PictureStepResult | None = None
        if self.shows_shapes:
            self.evaluation_text += "; color right in {color_accuracy:.0%}, shape in {shape_accuracy:.0%}"
        if held_out:
            self.evaluation_text += "; of prompts that are not trained on, reward {held_out_reward:.3f}"
            if self.shows_shapes:
                self.evaluation_text += ", color {held_out_color_accuracy:.0%}, shape {held_out_shape_accuracy:.0%}"
        self.keeps_reference = trainer.reference is not None
        # Bypass mode measures the mismatch in the loss, under a different metric prefix.
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
        """Load the policy and make the copy that samples.

        Args:
            config: the run's configuration.
            directory: the run's directory.
            checkpoint: checkpoint to resume from; optional. Without it, the run starts new.
        """
        reward = make_reward(config.reward.name, color_name=config.reward.color, function=config.reward.function)
        texts, held_out = make_prompts(config)
        policy = make_policy(config, config.model.path if checkpoint is None else checkpoint.path)

        # With adapters, the base transformer is the reference of a KL penalty.
        reference = None
        if config.algorithm.loss.kl_coef and not config.model.lora.rank:
            reference = reference_model(
                policy.transformer,
                directory.reference,
                checkpoint,
                lambda folder: make_policy(config, folder).transformer,
            )
        trainer = FlowGrpoTrainer(config, policy, texts, reward, reference=reference)
        trainer.engine.weight_version = 0 if checkpoint is None else checkpoint.state.step
        return cls(trainer, directory, held_out)

    def step(self, step: int) -> dict[str, float]:
        """Run one step of the trainer."""
        every = self.trainer.config.log.null_every
        is_due = every > 0 and step % every == 0 and self.directory.null.exists()
        self.newest = self.trainer.step(step, null_pictures=8 if is_due else 0)
        batch = self.newest.batch
        return self.newest.metrics | {
            f"picture/{name}": value for name, value in self._recognition_metrics(batch.images, batch.texts).items()
        }

    def write_extras(self, step: int) -> None:
        """Write the rollout log of the step, and the null if it was measured again."""
        newest, config = self.newest, self.trainer.config
        if newest is not None and newest.fresh_null:
            self._update_null(step, newest.fresh_null)
        if config.log.rollouts and newest is not None and (newest.first or not self.trainer.actor.bypass_mode):
            policy = self.trainer.policy if config.log.images else None
            write_denoising_log(self.directory.rollout_log(step), step, newest.batch, config, newest.first, policy)

    def measure_null(self) -> PictureNull | None:
        """Sample pictures with the rollout copy and score them with the trainer, whose weights are the same."""
        count = self.trainer.config.log.null
        return self._null_of(self.trainer.null_pictures(count), self.directory.null.name) if count else None

    def _null_of(self, rows: Iterable[RolloutBatch], name: str) -> PictureNull:
        from rollcorr.diagnostics.log_check.log_null import null_of_pictures  # it needs Arrow

        return null_of_pictures(list(rows), name=name, quantized=self.trainer.engine.dtype.startswith("fp8"))

    def _update_null(self, step: int, rows: Iterable[RolloutBatch]) -> None:
        """Merge a measurement into the run's own null; a null that the user put there stays."""
        from rollcorr.diagnostics.null import read_picture_null

        try:
            null, fresh = read_picture_null(self.directory.null), self._null_of(rows, f"the measurement of step {step}")

            # A step that a resumed run repeats is measured already.
            if null is not None and null.origin.engine == fresh.origin.engine and null.last_step < step:
                null.followed_by(replace(fresh, last_step=step)).save(self.directory.null)
        except BadInputError as error:
            logger.warning("step %d: the null stays as it is: %s", step, error)

    def save_policy(self, directory: Path) -> None:
        """Write the trained parts and the paths of the frozen ones."""
        save_policy(self.trainer.policy, directory)

    def evaluate(self, when: str) -> Evaluation:
        """Draw held-out pictures along the ODE, compute their rewards, and save a grid of the first ones."""
        config = self.trainer.config
        found, shown = self._evaluate_pictures(self.trainer.texts)
        measured = {"reward": found["reward"], "pictures": config.log.evaluate, **found}
        if self.held_out:
            found, new = self._evaluate_pictures(self.held_out)
            measured |= {f"held_out_{name}": value for name, value in found.items()}

            # A third of the grid shows prompts that are not in the training set.
            count = config.log.images // 3
            shown = [
                *shown[: config.log.images - count],
                *((image, f"{text}\nheld out") for image, text in new[:count]),
            ]
        if config.log.images:
            images, captions = zip(*shown[: config.log.images], strict=True)
            save_grid(torch.stack(images), captions, self.directory.picture(when))
        return measured

    def _evaluate_pictures(self, prompts: Sequence[str]) -> tuple[dict[str, float], list[tuple[torch.Tensor, str]]]:
        """Return rewards and recognized shapes of pictures, and the pictures with their prompts."""
        trainer, config = self.trainer, self.trainer.config
        count = config.log.evaluate
        texts = [prompts[i % len(prompts)] for i in range(count)]

        pictures = []
        for number, part in enumerate(torch.arange(count, device="cpu").split(config.rollout.batch_size or count)):
            read = trainer.prompts(texts[i] for i in part.tolist())
            latents = trainer.sampler.draw(read, seed=config.seed, step=HELD_OUT + number)
            pictures.append(trainer.policy.decode(latents).cpu())
        images = torch.cat(pictures)

        reward = float(trainer.reward(images, texts).double().mean())
        return {"reward": reward} | self._recognition_metrics(images, texts), list(zip(images, texts, strict=True))

    def _recognition_metrics(self, images: torch.Tensor, texts: list[str]) -> dict[str, float]:
        """Compute shares of pictures with the color and the shape of their prompt, background noise, and diversity.

        Diversity is the standard deviation of a pixel among the pictures of one prompt.
        """
        rows = {text: [i for i, other in enumerate(texts) if other == text] for text in texts}
        spreads = [images[same].float().std(0).mean() for same in rows.values() if len(same) > 1]
        found = {"diversity": float(torch.stack(spreads).mean())} if spreads else {}
        if not self.shows_shapes:
            return found
        wanted, seen = torch.tensor([class_of(text) for text in texts], device="cpu"), recognized(images)
        return {
            "color_accuracy": float((wanted // len(SHAPES) == seen // len(SHAPES)).double().mean()),
            "shape_accuracy": float((wanted % len(SHAPES) == seen % len(SHAPES)).double().mean()),
            "background_noise": background_noise(images),
            **found,
        }


def make_prompts(config: FlowGrpoConfig) -> tuple[Sequence[str], Sequence[str]]:
    """Return prompts for training and for evaluation only: the small model's, or a file's and an empty tuple."""
    path = config.prompts.path
    return (TRAINED_PROMPTS, HELD_OUT_PROMPTS) if path is None else (read_prompts(path), ())


def make_policy(config: FlowGrpoConfig, path: str | Path) -> DiffusionPolicy:
    """Load the policy in a directory with the settings of a configuration.

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
        family=model.family,
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


@torch.no_grad()
def decoded_predictions(
    policy: DiffusionPolicy, schedule: Schedule, data: dict[str, torch.Tensor], steps: torch.Tensor
) -> list[str | None]:
    """Decode what both policies predicted at each step of the pictures with the largest exact KL.

    Args:
        policy: decodes.
        schedule: of the steps.
        data: `latents`, `prev_sample_mean`, `old_prev_sample_mean` and `std` of B pictures.
        steps: step numbers, (B, W).

    Returns:
        For each picture the column `predictions` of the log, or None if its KL is smaller.
    """
    x, means = data["latents"], (data["prev_sample_mean"], data["old_prev_sample_mean"])
    exact = step_kl(means[1], means[0], data["std"])
    assert exact is not None, "both means are there"
    kl = exact.nan_to_num().sum(1)

    # Decode a picture at a time: a batch of them may not fit beside the training.
    found: list[str | None] = [None] * len(kl)
    for row in kl.topk(min(DECODED, len(kl))).indices.tolist():
        clean = [schedule.predicted_clean(mean[row], x[row, : steps.shape[1]], steps[row]) for mean in means]
        pictures = [policy.decode(latents[None])[0] for latents in torch.cat(clean).nan_to_num()]
        found[row] = strip(torch.stack(pictures).unflatten(0, (2, -1)))
    return found


def write_denoising_log(
    path: Path,
    step: int,
    batch: PictureBatch,
    config: FlowGrpoConfig,
    first: FirstScores | None = None,
    policy: DiffusionPolicy | None = None,
) -> None:
    """Write one step's pictures: one row for each, one token for each denoising step of its window.

    Args:
        path: the Parquet file; replaced.
        step: the training step.
        batch: with log π_old, unless `first` is given.
        config: the run's configuration.
        first: of bypass mode, which computes no log π_old: log π_θ of the first mini-batch. Only its rows are written.
        policy: decodes predictions; optional.
    """
    from rollcorr.rollout_log import RolloutLogWriter

    # Rows of the first mini-batch are in random order; the log keeps the batch's.
    rows, data = torch.arange(len(batch), device="cpu"), batch.data
    if first is not None:
        order = first.rows.cpu().argsort()
        rows = first.rows.cpu()[order]
        data = {name: tensor[rows] for name, tensor in data.items()}
        data |= {name: tensor[order] for name, tensor in first.data.items()}

    trajectories, columns = batch.trajectories, dict[str, Any]()
    if policy is not None:
        columns["predictions"] = decoded_predictions(policy, trajectories.schedule, data, trajectories.steps[rows])
    log = denoising_batch(
        data,
        step=step,
        train_column="old_log_prob" if first is None else "log_prob",
        sequence_id=[f"{step}-{row}" for row in rows.tolist()],
        group_id=[f"{step}-{group}" for group in batch.group_ids[rows].tolist()],
        reward=batch.rewards[rows],
        advantages=data["advantages"][:, None].expand_as(data["rollout_log_probs"]),
        policy_versions=[trajectories.version] * len(rows),
        engine=f"rollout copy, {config.rollout.dtype}",
        model=config.model.path,
        prompt=[batch.texts[row] for row in rows.tolist()],
        **trajectories.schedule.logged(trajectories.steps[rows]),
        **columns,
    )
    with RolloutLogWriter(path, overwrite=True) as writer:
        writer.write(log)
