"""Pictures of an active null: sampled and scored with the same weights, as rollouts that `rollcorr null` measures.

The sampler and the trainer are any two functions; `configured_pictures` has those of a `flow_grpo` configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.diffusion.batch_checks import check_shapes, dimensions_of, require
from rollcorr.diffusion.step_correction import step_kl

if TYPE_CHECKING:
    from rollcorr.rollout_log import RolloutBatch

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
        if not done:
            raise ValueError("the sampler returned no picture; it must return one or more for each number")


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
