"""A policy small enough to train inside a test, and a reward that random weights can earn."""

import os

import pytest

from rollcorr.train import load_config
from rollcorr.train.grpo import grpo_trainer as grpo
from rollcorr.train.grpo.engine_choice import make_engine
from rollcorr.train.grpo.grpo_config import GrpoConfig
from rollcorr.train.grpo.grpo_recipe import make_task
from rollcorr.train.grpo.policy import Policy, make_tiny_policy
from rollcorr.train.grpo.tasks import Reward

MICRO = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
MICRO_RUN = (
    "model.path=null",
    "model.config={" + ", ".join(f"{key}: {value}" for key, value in MICRO.items()) + "}",
    "steps=4",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    "rollout.max_new_tokens=8",
    "optim.lr=0.01",
    "checkpoint.every=0",
    "log.tensorboard=false",
    "log.rollouts=false",
    "log.evaluate=0",
    "log.null=0",
)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """No test of this process cuts the power, so no test waits for a busy disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def micro_policy() -> Policy:
    return make_tiny_policy(seed=0, **MICRO)


@pytest.fixture
def low_byte_reward(monkeypatch):
    """Reward the share of tokens below 128: learnable from random weights, and different within a group."""

    def reward(response_ids, answer, tokenizer, *, bonus_length):
        low = sum(token < 128 for token in response_ids)
        return Reward(low / max(len(response_ids), 1), correct=low * 2 > len(response_ids))

    monkeypatch.setattr(grpo, "hard_gated_reward", reward)


@pytest.fixture
def micro_run() -> tuple[str, ...]:
    """Overrides that make a run small."""
    return MICRO_RUN


@pytest.fixture
def micro_config(tmp_path, low_byte_reward):
    def make(*overrides: str) -> GrpoConfig:
        return load_config(None, [f"run_dir={tmp_path / 'run'}", *MICRO_RUN, *overrides])

    return make


@pytest.fixture
def micro_trainer(micro_config, micro_policy):
    """A trainer outside any directory."""

    def make(*overrides: str, policy: Policy = micro_policy, reference=None) -> grpo.GrpoTrainer:
        config = micro_config(*overrides)
        engine = make_engine(config, policy)
        return grpo.GrpoTrainer(config, policy, engine, make_task(config.task), reference=reference)

    return make
