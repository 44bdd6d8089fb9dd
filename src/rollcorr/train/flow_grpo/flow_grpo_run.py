"""A Flow-GRPO run and its directory: start or resume, train, save, stop on Ctrl-C, show pictures before and after.

    RUN/images/before.png, after.png    the same prompts from the same noise, drawn without exploring

The other files are those of the language-model recipe (`rollcorr.run_directory.run_logger`).
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from rollcorr.run_directory.run_logger import RunLogger, Shown
from rollcorr.train.checkpoint import Checkpoint, TrainState, save_checkpoint
from rollcorr.train.flow_grpo.diffusion_policy import DiffusionPolicy, load_policy, save_policy
from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer
from rollcorr.train.flow_grpo.images import save_grid
from rollcorr.train.flow_grpo.prompts import PromptSource, read_prompts
from rollcorr.train.flow_grpo.rewards import make_reward
from rollcorr.train.flow_grpo.shapes import PROMPTS
from rollcorr.train.grpo.warmup import HELD_OUT
from rollcorr.train.session import find_checkpoint, interruption, resume_command

SHOWN: tuple[Shown, ...] = (
    ("reward", "reward/mean", "{:.3f}"),
    ("KL", "rollout_corr/kl", "{:+.1e}"),
    ("k3", "rollout_corr/k3_kl", "{:.1e}"),
    ("kept", "actor/kept_fraction", "{:.1%}"),
    ("loss", "actor/loss", "{:+.1e}"),
    ("passes", "perf/forward_passes", "{:.0f}"),
    ("images/s", "perf/images_per_second", "{:,.1f}"),
)


@dataclass(frozen=True)
class PictureEvaluation:
    """Mean reward of pictures that a policy draws without exploring, and of how many."""

    reward: float
    pictures: int


@dataclass(frozen=True, kw_only=True)
class PictureSummary:
    """What a run came to.

    Attributes:
        run_dir: where everything is.
        step: completed training steps.
        interrupted: it was stopped before its last step.
        skipped_steps: optimizer steps that were left out: nothing was kept, or something was not finite.
        before: quality before the first training step; None when it was not measured.
        after: quality after the last one; None when it was not measured.
    """

    run_dir: Path
    step: int
    interrupted: bool
    skipped_steps: int
    before: PictureEvaluation | None
    after: PictureEvaluation | None


def train(config: FlowGrpoConfig, *, console: Console | None = None) -> PictureSummary:
    """Train from the start, or from the newest checkpoint when `config.resume`.

    Ctrl-C (or SIGTERM) finishes the step, saves, and returns; a second one stops at once. A resumed run equals an
    uninterrupted one, on the CPU to the last bit.

    Args:
        config: the run.
        console: where to show progress.

    Raises:
        FileExistsError: the directory holds a run already and `resume` is false.
        FileNotFoundError: there is nothing to resume from, or a model or prompt file does not exist.
        ValueError: a model, checkpoint or prompt cannot be read, or sampling left the range of its dtype.
        ImportError: an extra is missing; the message names it.
    """
    console = console or Console()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run_dir = Path(config.run_dir)
    checkpoint, changes = find_checkpoint(config, run_dir)
    trainer, state = _build(config, run_dir, checkpoint)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    with (
        RunLogger(
            run_dir,
            config.steps,
            start=state.step,
            tensorboard=config.log.tensorboard,
            console=console,
            shown=_shown(config),
        ) as log,
        interruption(log) as stop_requested,
    ):
        for change in changes:
            log.say(f"changed since this run began: {change}")
        before = _measure_before(trainer, run_dir, log, fresh=checkpoint is None)
        step = state.step
        while step < config.steps and not stop_requested():
            step += 1
            log.log(step, trainer.step(step).metrics)
            if config.checkpoint.every and step % config.checkpoint.every == 0 and step < config.steps:
                _save(trainer, run_dir, step)
        if step > state.step or checkpoint is None:
            log.say(f"saved {_save(trainer, run_dir, step)}")
        interrupted = step < config.steps
        if interrupted:
            log.say(f"stopped after step {step} of {config.steps}; go on with: {resume_command(config)}")
        after = None if interrupted else _measure(trainer, "after", run_dir, log, version=step)
    summary = PictureSummary(
        run_dir=run_dir,
        step=step,
        interrupted=interrupted,
        skipped_steps=trainer.skipped_steps,
        before=before,
        after=after,
    )
    text = json.dumps(asdict(summary) | {"run_dir": str(run_dir)}, indent=2)
    (run_dir / "summary.json").write_text(text + "\n", encoding="utf-8")
    return summary


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


def _build(config: FlowGrpoConfig, run_dir: Path, checkpoint: Checkpoint | None) -> tuple[FlowGrpoTrainer, TrainState]:
    reward = make_reward(config.reward.name, colour_name=config.reward.colour, function=config.reward.function)
    source = make_prompts(config)
    policy = make_policy(config, config.model.path if checkpoint is None else checkpoint.path)
    reference = _reference(config, run_dir, policy, fresh=checkpoint is None)
    trainer = FlowGrpoTrainer(config, policy, source, reward, reference=reference)
    state = TrainState() if checkpoint is None else checkpoint.state
    trainer.sampler.model.version = state.step
    if checkpoint is not None:
        trainer.optimizer.load_state_dict(checkpoint.optimizer)
        trainer.skipped_steps = state.skipped_steps
        if checkpoint.engine_weights is not None:
            trainer.sampler.model.import_weights(checkpoint.engine_weights, version=state.engine_version)
    return trainer, state


def _reference(config: FlowGrpoConfig, run_dir: Path, policy: DiffusionPolicy, *, fresh: bool) -> nn.Module | None:
    """The transformer that the run started from, kept beside its checkpoints; with adapters it is below them."""
    if config.algorithm.loss.kl_coef == 0 or config.model.lora.rank:
        return None
    if fresh:
        save_policy(policy, run_dir / "reference")
        reference: nn.Module = copy.deepcopy(policy.transformer)
    else:
        reference = make_policy(config, run_dir / "reference").transformer
    return reference.eval().requires_grad_(False)


def _save(trainer: FlowGrpoTrainer, run_dir: Path, step: int) -> Path:
    model = trainer.sampler.model
    return save_checkpoint(
        run_dir / "checkpoints",
        partial(save_policy, trainer.policy),
        trainer.optimizer,
        TrainState(step=step, engine_version=model.version, skipped_steps=trainer.skipped_steps),
        engine_weights=None if model.version == step else model.export_weights(),
        keep=trainer.config.checkpoint.keep,
    )


def _measure_before(
    trainer: FlowGrpoTrainer, run_dir: Path, log: RunLogger, *, fresh: bool
) -> PictureEvaluation | None:
    """Quality before the first step; a resumed run remembers it."""
    path = run_dir / "evaluation_before.json"
    if not fresh:
        return PictureEvaluation(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    evaluation = _measure(trainer, "before", run_dir, log, version=0)
    if evaluation is not None:
        path.write_text(json.dumps(asdict(evaluation)) + "\n", encoding="utf-8")
    return evaluation


def _measure(
    trainer: FlowGrpoTrainer, when: str, run_dir: Path, log: RunLogger, *, version: int
) -> PictureEvaluation | None:
    """Draw held-out pictures without exploring, judge them, and save a grid of the first ones."""
    config, model = trainer.config, trainer.sampler.model
    count = config.log.evaluate
    if not count:
        return None
    if model.version != version:
        model.update(trainer.policy.transformer, version=version)
    texts = [trainer.source.all[i % len(trainer.source.all)] for i in range(count)]
    pictures = []
    for number, part in enumerate(torch.arange(count, device="cpu").split(config.rollout.batch_size or count)):
        prompts = trainer.prompts(texts[i] for i in part.tolist())
        latents = trainer.sampler.draw(prompts, seed=config.seed, step=HELD_OUT + number)
        pictures.append(trainer.policy.decode(latents).cpu())
    images = torch.cat(pictures)
    reward = float(trainer.reward(images, texts).double().mean())
    if config.log.images:
        save_grid(images[: config.log.images], run_dir / "images" / f"{when}.png")
    log.say(f"{when} training: reward {reward:.3f} over {count} pictures drawn without exploring")
    return PictureEvaluation(reward=reward, pictures=count)


def _shown(config: FlowGrpoConfig) -> tuple[Shown, ...]:
    """The progress columns; bypass mode has its metrics of the mismatch under another prefix."""
    if not config.algorithm.actor.bypass_mode:
        return SHOWN
    return tuple((title, name.replace("rollout_corr/", "actor/rollout_corr/"), form) for title, name, form in SHOWN)
