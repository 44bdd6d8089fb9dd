"""Pictures of an active null: sampled and scored with the same weights, as rollouts that `rollcorr null` measures.

The sampler and the trainer are any two functions, or those of a `flow_grpo` configuration at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.diffusion.batch_checks import check_shapes, dimensions_of, require
from rollcorr.diffusion.step_correction import step_kl
from rollcorr.train.steps import HELD_OUT

if TYPE_CHECKING:
    from rollcorr.engines import DiffusionEngine
    from rollcorr.rollout_log import RolloutBatch
    from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
    from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer

PictureSampler = Callable[[int], Mapping[str, Any]]
PictureScorer = Callable[[Mapping[str, Any]], Mapping[str, Tensor]]


def fresh_pictures(sample: PictureSampler, score: PictureScorer, *, pictures: int = 64) -> Iterator[RolloutBatch]:
    """Sample and score until there are enough pictures; yield batches of a rollout log.

    Args:
        sample: a number, which seeds the noise → the tensors of `rollcorr.diffusion` (`rollout_log_probs`,
            `prev_sample_mean`, `std`, `timesteps`, `latents`), and further columns of the log if it has them: `sigma`
            and `sigma_next` (B, W), `prompt`, `engine`, `model`.
        score: what `sample` returned → `log_probs` (B, W) and `prev_sample_mean` (B, W, …) of the trainer, with the
            weights that sampled.
        pictures: how many.

    Raises:
        KeyError: a tensor is missing.
        ValueError: shapes differ.
    """
    done = 0
    for number in count():
        if done >= pictures:
            return
        sampled = sample(number)
        scored = score(sampled)
        data = {**sampled, "old_log_probs": scored["log_probs"], "old_prev_sample_mean": scored["prev_sample_mean"]}
        columns: dict[str, Any] = {name: sampled.get(name) for name in _COLUMNS}
        yield denoising_batch(data, step=0, **columns)
        done += len(sampled["rollout_log_probs"])


_COLUMNS = ("sigma", "sigma_next", "prompt", "engine", "model")


def denoising_batch(
    data: Mapping[str, Any],
    *,
    step: int,
    train_column: str = "old_log_prob",
    **columns: Any,  # noqa: ANN401 (of the log)
) -> RolloutBatch:
    """Return rollouts of denoising steps: a row for each picture, a "token" for each step of its window.

    Latents and means are left out: they are large, and the diagnosis needs only one number of them, the exact KL.

    Args:
        data: as `rollcorr.diffusion` reads it, with `old_log_probs` and `old_prev_sample_mean` of the trainer.
        step: the training step.
        train_column: the column of the trainer's log-probs.
        **columns: further columns of the log.

    Raises:
        KeyError: a tensor is missing.
        ValueError: shapes differ.
    """
    from rollcorr.rollout_log import RolloutBatch

    tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
    names = ("rollout_log_probs", "old_log_probs", "prev_sample_mean", "old_prev_sample_mean", "std", "timesteps")
    rollout, train, mean, own_mean, std, times = require(tensors, *names, reason="a log of pictures records")
    check_shapes({name: tensors[name] for name in names})
    return RolloutBatch.from_padded(
        torch.ones_like(rollout, dtype=torch.bool),
        step=step,
        rollout_log_prob=rollout,
        dimensions=dimensions_of(tensors),
        timestep=times,
        step_std=std,
        exact_kl=step_kl(own_mean, mean, std),
        **{**columns, train_column: train},
    )


def configured_pictures(
    config: FlowGrpoConfig,
    make_engine: Callable[[FlowGrpoTrainer], DiffusionEngine] | None = None,
    *,
    pictures: int = 64,
) -> Iterator[RolloutBatch]:
    """Sample and score the pictures of a `flow_grpo` configuration at its start; yield batches of a rollout log.

    Each picture has a window of its own, so that few pictures cover every timestep of the run.

    Args:
        config: of the run.
        make_engine: returns the engine that samples, from the trainer, which has `schedule` and `policy`; defaults to
            the configuration's rollout copy. The engine must have the weights of the start.
        pictures: how many.

    Raises:
        ImportError: an extra is missing.
        EngineError: the engine failed.
        KeyError: the engine returns no means.
        ValueError: the engine's schedule differs.
    """
    from rollcorr.train.flow_grpo.flow_grpo_recipe import make_policy, make_prompts
    from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer

    # Windows of every picture's own cover all timesteps.
    config = replace(config, rollout=replace(config.rollout, sde_window="per_sample"))
    texts, _ = make_prompts(config)
    trainer = FlowGrpoTrainer(config, make_policy(config, config.model.path), texts, _no_reward)

    engine = None if make_engine is None else make_engine(trainer)
    name = f"rollout copy, {config.rollout.dtype}" if engine is None else engine.engine

    def sample(number: int) -> Mapping[str, Any]:
        trajectories, prompts = trainer.sample(HELD_OUT + number, engine)
        return {
            **trajectories.data,
            **trajectories.schedule.logged(trajectories.steps),
            "prompt": prompts,
            "engine": name,
            "model": config.model.path,
            "trajectories": trajectories,
        }

    def score(sampled: Mapping[str, Any]) -> Mapping[str, Tensor]:
        return trainer.score_all(sampled["trajectories"], trainer.model)

    return fresh_pictures(sample, score, pictures=pictures)


def _no_reward(images: Tensor, texts: Sequence[str]) -> Tensor:
    return torch.zeros(len(texts), device="cpu")
