"""A picture policy small enough to train inside a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rollcorr.train import load_config
from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.flow_grpo.flow_grpo_recipe import make_policy, make_prompts
from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer
from rollcorr.train.flow_grpo.rewards import make_reward

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
from make_shapes_model import make_small_transformer, make_word_table, save_small_model

MICRO = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16}
MICRO_RUN = (
    "recipe=flow_grpo",
    "steps=4",
    "reward.name=color",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    "rollout.num_steps=4",
    "optim.lr=0.01",
    "checkpoint.every=0",
    "log.tensorboard=false",
    "log.evaluate=0",
    "log.null=0",
)


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory) -> Path:
    """A directory with a transformer of 7,000 random weights for 16 × 16 pixels, and a word table."""
    directory = tmp_path_factory.mktemp("model") / "micro"
    save_small_model(make_small_transformer(seed=3, **MICRO), make_word_table(), directory)
    return directory


@pytest.fixture
def flow_run(micro_model) -> tuple[str, ...]:
    """Overrides that make a run small."""
    return (*MICRO_RUN, f"model.path={micro_model}")


@pytest.fixture
def flow_config(flow_run, tmp_path):
    def make(*overrides: str) -> FlowGrpoConfig:
        return load_config(None, [f"run_dir={tmp_path / 'run'}", *flow_run, *overrides])

    return make


@pytest.fixture
def flow_trainer(flow_config):
    """A trainer outside any directory."""

    def make(*overrides: str, reference=None, reward=None) -> FlowGrpoTrainer:
        config = flow_config(*overrides)
        policy = make_policy(config, config.model.path)
        reward = reward or make_reward(config.reward.name, color_name=config.reward.color)
        return FlowGrpoTrainer(config, policy, make_prompts(config)[0], reward, reference=reference)

    return make


@pytest.fixture
def weights():
    """All parameters of a trainer's transformer, in one vector."""
    return lambda trainer: torch.cat([p.detach().flatten() for p in trainer.policy.transformer.parameters()])


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "console.txt").open("w", encoding="utf-8") as file:
        yield Console(file=file, width=200)
