"""The settings of Fang and Khazi, "Mismatch Praxis", section 5, as a file that anyone with the machines can run."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rollcorr.train import load_config, train

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "experiments" / "mismatch_in_practice" / "qwen3_8b.yaml"
TINY_QWEN3 = (
    "{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}"
)
ON_THIS_MACHINE = {
    "model.path": "null",
    "model.config": TINY_QWEN3,
    "task.path": str(ROOT / "tests" / "data" / "gsm8k_12.jsonl"),
    "rollout.engine": "transformers",
    "rollout.max_new_tokens": "16",
    "rollout.batch_size": "64",
    "optim.micro_batch_size": "64",
    "device": "cpu",
    "threads": "1",
    "steps": "2",
    "log.evaluate": "0",
    "log.tensorboard": "false",
}
CORRECTIONS = {
    "none": ("algorithm.rollout_correction=null",),
    "token": (),
    "sequence": (
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=4.0",
    ),
}
SAMPLINGS = {
    "temperature 1.0": (),
    "temperature 0.4": ("rollout.sampling.temperature=0.4",),
    "Qwen3's": (
        "rollout.sampling.temperature=0.7",
        "rollout.sampling.top_p=0.8",
        "rollout.sampling.top_k=20",
    ),
}


def test_the_file_says_what_the_document_says():
    config = load_config(SETTINGS)
    correction = config.algorithm.correction
    assert config.optim.lr == 1e-6
    assert config.rollout.prompts_per_step == 32
    assert config.rollout.group_size == 8
    assert config.optim.mini_batch_size == config.rollout.rows  # one update per batch
    assert config.optim.ppo_epochs == 1
    assert config.rollout.max_new_tokens == 10_000
    assert config.rollout.sampling.logprobs == "processed"
    assert config.algorithm.advantage == "grpo"
    assert config.algorithm.loss.kl_coef == 0
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.0)
    assert correction.rollout_is_batch_normalize is False


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_each_cell_of_the_grid_is_the_file_and_overrides(correction, sampling):
    config = load_config(SETTINGS, (*CORRECTIONS[correction], *SAMPLINGS[sampling]))
    base = load_config(SETTINGS)
    assert dataclasses.replace(config, algorithm=base.algorithm, rollout=base.rollout) == base
    made = config.algorithm.correction
    assert (made and made.rollout_is) == {"none": None, "token": "token", "sequence": "sequence"}[correction]
    if correction == "sequence":
        assert made.rollout_is_threshold == 4.0


def test_two_steps_run_on_a_tiny_model_of_the_same_architecture(tmp_path):
    overrides = [f"{name}={value}" for name, value in ON_THIS_MACHINE.items()]
    config = load_config(SETTINGS, (*overrides, f"run_dir={tmp_path / 'run'}"))
    summary = train(config, console=Console(file=io.StringIO()))

    assert (summary.step, summary.failure) == (2, None)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["rollout_corr/token_count"] > 256 for step in steps)


def test_only_what_a_small_machine_lacks_differs_from_the_file(tmp_path):
    config = load_config(SETTINGS, [f"{name}={value}" for name, value in ON_THIS_MACHINE.items()])
    base = load_config(SETTINGS)
    assert config.algorithm == base.algorithm
    assert config.actor == base.actor
    assert dataclasses.replace(config.optim, micro_batch_size=1) == base.optim
    same = {"engine": "vllm", "max_new_tokens": 10_000, "batch_size": None}
    assert dataclasses.replace(config.rollout, **same) == base.rollout
