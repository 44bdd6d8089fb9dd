"""What `rollcorr train` can train: a configuration's `recipe` names one of these.

grpo         a language model: rollcorr.train.grpo.grpo_trainer
flow_grpo    a diffusion model: rollcorr.train.flow_grpo.flow_grpo_trainer
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollcorr.train.config_file import load_config, recipe_of
from rollcorr.train.grpo.grpo_config import TrainConfig

if TYPE_CHECKING:
    from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
    from rollcorr.train.flow_grpo.flow_grpo_run import PictureSummary
    from rollcorr.train.grpo.grpo_run import Summary

RECIPES = ("grpo", "flow_grpo")


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig | FlowGrpoConfig:
    """The configuration of the recipe that the file or an override names under `recipe`; grpo when none does.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the recipe or a name is unknown, or a value is wrong.
    """
    recipe = recipe_of(path, overrides)
    if recipe == "grpo":
        return load_config(path, overrides, TrainConfig)
    if recipe == "flow_grpo":
        from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig

        return load_config(path, overrides, FlowGrpoConfig)
    raise ValueError(f"recipe={recipe!r} is unknown; choose from {', '.join(RECIPES)}")


def run_recipe(config: TrainConfig | FlowGrpoConfig) -> Summary | PictureSummary:
    """Train as the configuration says."""
    if isinstance(config, TrainConfig):
        from rollcorr.train.grpo.grpo_run import train

        return train(config)
    from rollcorr.train.flow_grpo.flow_grpo_run import train as train_pictures

    return train_pictures(config)
