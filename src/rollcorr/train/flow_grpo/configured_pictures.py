"""Pictures of a `flow_grpo` configuration at its start, sampled and scored with the same weights: an active null."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.flow_grpo.flow_grpo_recipe import make_policy, make_prompts
from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer

if TYPE_CHECKING:
    from rollcorr.engines import DiffusionEngine
    from rollcorr.rollout_log import RolloutBatch


def configured_pictures(
    config: FlowGrpoConfig,
    make_engine: Callable[[FlowGrpoTrainer], DiffusionEngine] | None = None,
    *,
    pictures: int = 64,
) -> Iterator[RolloutBatch]:
    """Sample and score pictures with a `flow_grpo` run's initial weights; yield batches of a rollout log.

    Args:
        config: the run's configuration.
        make_engine: returns the engine that samples, from the trainer, which has `schedule` and `policy`; defaults to
            the configuration's rollout copy. The engine must have the weights of the start.
        pictures: how many.

    Raises:
        ImportError: an extra is missing.
        EngineError: the engine failed.
        KeyError: the engine returns no means.
        ValueError: the engine's schedule differs.
    """
    texts, _ = make_prompts(config)
    policy = make_policy(config, config.model.path)
    trainer = FlowGrpoTrainer(config, policy, texts, lambda _, prompts: torch.zeros(len(prompts), device="cpu"))
    return trainer.null_pictures(pictures, engine=None if make_engine is None else make_engine(trainer))
