"""The examples of the recipe: the judge by hand, the script of the quickstart, configurations that are read."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from make_shapes_model import flow_matching_loss, make_small_transformer, make_word_table, pretrain
from rich.console import Console

from rollcorr.run_directory import read_metrics
from rollcorr.train import load_config, train
from rollcorr.train.flow_grpo.diffusion_policy import load_policy
from rollcorr.train.steps import derived_generator

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ("steps=1", "log.evaluate=4", "log.tensorboard=false", "rollout.prompts_per_step=2", "rollout.group_size=4")


@pytest.fixture(scope="module")
def seeds():
    script = EXAMPLES.parent / "experiments" / "training_runs" / "flow_grpo_seeds.py"
    spec = importlib.util.spec_from_file_location("flow_grpo_seeds", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_run_is_judged_by_its_first_and_last_ten_steps(seeds):
    verdict = seeds.judge([0.0, 0.1] * 5 + [99.0] + [0.4, 0.5] * 5, [1e-4, 3e-4])
    assert (verdict.first, verdict.last, verdict.exact_kl) == pytest.approx((0.05, 0.45, 2e-4))
    # Sample variance of ten alternating values is 0.0025 · 10 / 9; two windows of ten.
    assert verdict.standard_error == pytest.approx((2 * 0.0025 * 10 / 9 / 10) ** 0.5)
    assert verdict.failures == []


@pytest.mark.parametrize(
    ("gain", "noise", "kl", "failure"),
    [
        (0.01, 0.0, 1e-3, "gain 0.010 below 0.05"),
        (0.1, 0.5, 1e-3, "standard errors"),
        (0.1, 0.0, 0.0, "exact KL 0.0e+00 outside"),
    ],
)
def test_each_condition_can_fail_alone(seeds, gain, noise, kl, failure):
    rewards = [-noise, noise] * 5 + [gain - noise, gain + noise] * 5
    (found,) = seeds.judge(rewards, [kl]).failures
    assert failure in found


@pytest.mark.parametrize("name", ["flow_grpo", "flow_grpo_fp8"])
def test_an_example_starts(name, tmp_path):
    with Console(quiet=True) as console:
        config = load_config(EXAMPLES / "train" / f"{name}.yaml", [*SMALL, f"run_dir={tmp_path / 'run'}"])
        summary = train(config, console=console)
    assert (summary.step, summary.skipped_steps) == (1, 0)


def test_the_example_for_a_large_pipeline_is_read():
    config = load_config(EXAMPLES / "train" / "flow_grpo_ocr.yaml")
    assert (config.reward.name, config.model.lora.rank, config.algorithm.actor.bypass_mode) == ("ocr", 32, True)


def test_the_quickstart_script_trains_in_bypass_mode(tmp_path):
    environment = {**os.environ, "ROLLCORR": f"{sys.executable} -m rollcorr"}
    command = ["sh", str(EXAMPLES / "train" / "flow_grpo_bypass.sh"), f"run_dir={tmp_path / 'run'}", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["actor/rollout_corr/rollout_rs_masked_fraction"] == 0
    assert row["actor/rollout_corr/exact_kl_mean"] > 0
    assert "rollout_is='sequence' does not weight the loss" in done.stderr


def test_the_small_model_was_taught_shapes():
    """Its loss on fresh pictures is far below random weights', and its file is small."""
    policy = load_policy("shapes")
    table = make_word_table()
    taught, random = (
        float(flow_matching_loss(model, table, 64, 0.0, derived_generator(1, "fresh")).detach())
        for model in (policy.transformer, make_small_transformer(seed=7))
    )
    assert taught < 0.3 * random
    assert sum(p.numel() for p in policy.transformer.parameters()) == 288_432
    assert sum(file.stat().st_size for file in (policy.base).rglob("*") if file.is_file()) < 4_000_000


def test_pretraining_lowers_the_loss_and_repeats():
    table, shape = make_word_table(), {"num_layers": 1, "num_attention_heads": 2, "caption_projection_dim": 32}
    losses = []
    for _ in range(2):
        model, seen = make_small_transformer(**shape), []
        note = lambda _, loss, seen=seen: seen.append(loss)  # noqa: E731
        pretrain(model, table, steps=30, batch_size=16, learning_rate=0.05, on_step=note)
        losses.append(seen)
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.8 * losses[0][0]
