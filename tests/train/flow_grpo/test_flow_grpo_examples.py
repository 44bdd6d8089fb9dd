"""The examples of the recipe: the judge by hand, the script of the quickstart, configurations that are read."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_pipelines
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


# The overrides of verl-omni's run_qwen_image_ocr_lora_rollout_corr.sh (commit a1139ba) that set options here, and the
# paths of the others, which place processes and files.
PLACEMENT = (
    "data.train_files data.val_files data.max_prompt_length actor_rollout_ref.actor.ppo_mini_batch_size "
    "actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload "
    "actor_rollout_ref.actor.fsdp_config.model_dtype actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu "
    "actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.agent.num_workers "
    "actor_rollout_ref.rollout.load_format actor_rollout_ref.rollout.layered_summon "
    "actor_rollout_ref.rollout.pipeline.max_sequence_length actor_rollout_ref.rollout.val_kwargs.algo.noise_level "
    "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps "
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu reward.num_workers reward.reward_model.enable "
    "reward.reward_model.model_path reward.reward_model.rollout.name "
    "reward.reward_model.rollout.tensor_model_parallel_size reward.custom_reward_function.path "
    "reward.custom_reward_function.name trainer.logger trainer.project_name trainer.experiment_name "
    "trainer.log_val_generations trainer.val_before_train trainer.n_gpus_per_node trainer.nnodes trainer.test_freq "
    "trainer.total_epochs"
)
ENGINE = "actor_rollout_ref.rollout.name"
QUICKSTART = (
    "recipe=flow_grpo",
    "data.train_batch_size=32",
    "algorithm.rollout_correction.bypass_mode=True",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_is_threshold=2.0",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
    "actor_rollout_ref.model.algorithm=flow_grpo",
    "actor_rollout_ref.model.path=Qwen/Qwen-Image",
    "actor_rollout_ref.model.lora_rank=64",
    "actor_rollout_ref.model.lora_alpha=128",
    "actor_rollout_ref.model.target_modules=['to_q','to_k','to_v','to_out.0','add_q_proj','add_k_proj','add_v_proj',"
    "'to_add_out','img_mlp.net.0.proj','img_mlp.net.2','txt_mlp.net.0.proj','txt_mlp.net.2']",
    "actor_rollout_ref.actor.optim.lr=3e-4",
    "actor_rollout_ref.actor.optim.weight_decay=0.0001",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.0",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.algo.noise_level=1.2",
    "actor_rollout_ref.rollout.algo.sde_type=sde",
    "actor_rollout_ref.rollout.algo.sde_window_size=2",
    "actor_rollout_ref.rollout.algo.sde_window_range=[0,5]",
    "trainer.save_freq=30",
    "trainer.total_training_steps=300",
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of the pipelines
@pytest.mark.filterwarnings(
    "ignore:rollout_is='sequence' does not weight the loss", "ignore:rollout_rs .* rejects nothing"
)
def test_quickstart_of_verl_omni_trains_tiny_qwen_image(tmp_path, console):
    example = EXAMPLES / "train" / "qwen_image_ocr.yaml"
    without_effect = "algorithm.rollout_correction.apply_is=False"  # the example says it, so that nothing warns
    theirs, ours = load_config(None, [*QUICKSTART, without_effect]), load_config(example)
    for part in ("steps", "checkpoint", "rollout", "algorithm"):
        assert getattr(ours, part) == replace_batch(getattr(theirs, part)), part
    assert (ours.model.path, ours.model.lora) == (theirs.model.path, theirs.model.lora)
    assert ours.optim.micro_batch_size == theirs.optim.micro_batch_size
    assert (ours.optim.lr, ours.optim.weight_decay) == (theirs.optim.lr, theirs.optim.weight_decay)

    tiny_pipelines.save_qwen(tmp_path / "qwen")
    (tmp_path / "prompts.txt").write_text('a sign "red"\na sign "green"\n')
    small = [
        f"model.path={tmp_path / 'qwen'}", f"run_dir={tmp_path / 'run'}", f"prompts.path={tmp_path / 'prompts.txt'}",
        "model.height=16", "device=cpu", "reward.name=color", "optim.mini_batch_size=4", "optim.micro_batch_size=2",
        "rollout.prompts_per_step=2", "rollout.group_size=4", "log.evaluate=0", "log.tensorboard=false", "steps=2",
    ]  # fmt: skip
    summary = train(load_config(example, small), console=console)
    assert (summary.step, summary.skipped_steps) == (2, 0)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["actor/rollout_corr/rollout_rs_masked_fraction"] == 0 for row in rows)
    assert all(row["actor/rollout_corr/exact_kl_mean"] > 0 for row in rows)


@pytest.mark.filterwarnings("ignore:rollout_is='sequence' does not weight the loss")
def test_script_of_verl_omni_runs_as_messages_say():
    """Paste the whole script; leave out what the two messages list."""
    with pytest.raises(ValueError) as refused:
        load_config(None, [*QUICKSTART, *(f"{path}=1" for path in PLACEMENT.split()), f"{ENGINE}=vllm_omni"])
    start, _, listed = str(refused.value).partition(" verl's paths without a counterpart here: leave out ")
    assert (start, listed) == ("optim.mini_batch_size counts responses, not prompts.", PLACEMENT)
    with pytest.raises(ValueError, match=rf"{ENGINE} is rollout.engine, which .* does not have; leave it out"):
        load_config(None, [*QUICKSTART, f"{ENGINE}=vllm_omni"])
    assert load_config(None, QUICKSTART).optim.micro_batch_size == 16


def replace_batch(part):
    """The part of a configuration with the example's rows at a time, which change memory only."""
    return dataclasses.replace(part, batch_size=16) if hasattr(part, "batch_size") else part


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
