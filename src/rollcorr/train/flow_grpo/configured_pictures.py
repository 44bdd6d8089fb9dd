"""Pictures of a `flow_grpo` configuration at its start, sampled and scored with the same weights: an active null."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.flow_grpo.flow_grpo_recipe import make_policy, make_prompts
from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer
from rollcorr.train.flow_grpo.fresh_pictures import fresh_pictures
from rollcorr.train.steps import HELD_OUT

if TYPE_CHECKING:
    from rollcorr.rollout_log import RolloutBatch


def configured_pictures(config: FlowGrpoConfig, *, pictures: int = 64) -> Iterator[RolloutBatch]:
    """Sample and score the pictures of a `flow_grpo` configuration at its start; yield batches of a rollout log.

    Each picture has a window of its own, so that few pictures cover every timestep of the run.

    Raises:
        ImportError: an extra is missing.
    """
    config = replace(config, rollout=replace(config.rollout, sde_window="per_sample"))
    texts, _ = make_prompts(config)
    trainer = FlowGrpoTrainer(config, make_policy(config, config.model.path), texts, _no_reward)

    def sample(number: int) -> Mapping[str, Any]:
        trajectories, prompts = trainer.sample(HELD_OUT + number)
        sigma, sigma_next = trajectories.schedule.at(trajectories.steps)
        return {
            **trajectories.data,
            "sigma": sigma,
            "sigma_next": sigma_next,
            "prompt": prompts,
            "engine": f"rollout copy, {config.rollout.dtype}",
            "model": config.model.path,
            "trajectories": trajectories,
        }

    def score(sampled: Mapping[str, Any]) -> Mapping[str, Tensor]:
        return trainer.score_all(sampled["trajectories"], trainer.model)

    return fresh_pictures(sample, score, pictures=pictures)


def _no_reward(images: Tensor, texts: Sequence[str]) -> Tensor:
    return torch.zeros(len(texts), device="cpu")
