"""Options fixed by a checkpoint cannot change; every other change applies."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from rollcorr.run_directory import read_metrics
from rollcorr.train import latest_checkpoint, load_config, train
from rollcorr.train.config_file import read_config
from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.grpo.grpo_config import GrpoConfig
from rollcorr.train.option_changes import OPTION_RULES, compared_options, find_changes, refuse_fixed, rule_of

CONFIGS = {"grpo": GrpoConfig, "flow_grpo": FlowGrpoConfig}

FIXED = [
    ("grpo", "rollout.prompts_per_step=4"),
    ("flow_grpo", "rollout.prompts_per_step=4"),
    ("grpo", "seed=1"),
    ("grpo", "optim.betas=[0.9, 0.99]"),
    ("grpo", "model.path=elsewhere"),
    ("grpo", "warm_up.steps=3"),
    ("grpo", "task.max_operand=9"),
    ("grpo", "task.additions=9"),
    ("flow_grpo", "model.lora.rank=2"),
    ("flow_grpo", "model.height=16"),
    ("flow_grpo", "prompts.path=prompts.txt"),
]
FREE = [
    ("grpo", "steps=7"),
    ("grpo", "device=meta"),
    ("grpo", "optim.weight_decay=0.1"),
    ("grpo", "optim.lr=1e-5"),
    ("grpo", "algorithm.rollout_correction=bypass_pg_is"),
    ("grpo", "rollout.group_size=4"),
    ("grpo", "rollout.engine_options={a: 1}"),
    ("grpo", "task.bonus_length=3"),
    ("grpo", "log.evaluate=5"),
    ("flow_grpo", "model.gradient_checkpointing=true"),
    ("flow_grpo", "reward.name=color"),
]


def changes(recipe, override):
    config = read_config(None, [override], CONFIGS[recipe])
    return find_changes(compared_options(CONFIGS[recipe]()), config)


@pytest.mark.parametrize(("recipe", "override"), FIXED)
def test_a_change_of_what_a_checkpoint_fixes_is_refused_with_old_and_new_value(recipe, override):
    name, _, value = override.partition("=")
    with pytest.raises(ValueError, match="other options, which cannot change within a run") as refused:
        refuse_fixed(changes(recipe, override), "runs/x")
    assert f"{name}: " in str(refused.value)
    assert f" → {value!r}" in str(refused.value) or f" → {value}" in str(refused.value)
    assert "choose another run_dir to start a new run" in str(refused.value)


@pytest.mark.parametrize(("recipe", "override"), FREE)
def test_every_other_change_is_named_and_accepted(recipe, override):
    found = changes(recipe, override)
    refuse_fixed(found, "runs/x")
    assert override.partition("=")[0] in [change.name for change in found]


@pytest.mark.parametrize("override", ["run_dir=elsewhere", "resume=false", "stop_after_minutes=5"])
def test_what_belongs_to_one_command_is_not_compared(override):
    assert changes("grpo", override) == []


def test_another_recipe_is_refused():
    with pytest.raises(ValueError, match="recipe: 'grpo' → 'flow_grpo'"):
        refuse_fixed(find_changes(compared_options(GrpoConfig()), FlowGrpoConfig()), "runs/x")


def test_an_option_that_is_newer_than_the_checkpoint_had_its_default():
    old = {name: value for name, value in compared_options(GrpoConfig()).items() if name != "optim.weight_decay"}
    assert find_changes(old, GrpoConfig()) == []
    (change,) = find_changes(old, read_config(None, ["optim.weight_decay=0.5"], GrpoConfig))
    assert str(change) == "optim.weight_decay: 0.0 → 0.5"


def test_every_rule_is_about_an_option_that_exists_and_says_why_it_refuses():
    configs = [config() for config in CONFIGS.values()]
    names = {name for config in configs for name in (*compared_options(config), *vars(config))}
    for rule in OPTION_RULES:
        assert any(name == rule.name or name.startswith(f"{rule.name}.") for name in names), rule.name
        assert (rule.kind == "fixed") == bool(rule.reason), rule.name
    assert rule_of("optimism").kind == "free"


@pytest.mark.parametrize("value", ["{a: {5: 1.0}}", "{a: [1, 2.0]}"])
def test_a_value_that_json_writes_differently_is_no_change(value):
    config = read_config(None, [f"rollout.engine_options={value}"], GrpoConfig)
    assert find_changes(compared_options(config), config) == []


# Through a run.


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "console.txt").open("w", encoding="utf-8") as file:
        yield Console(file=file, width=300)


def weights(run_dir):
    from safetensors.torch import load_file

    return load_file(latest_checkpoint(run_dir / "checkpoints") / "model.safetensors")


def test_a_new_weight_decay_takes_effect(micro_config, tmp_path, console):
    for name in ("new", "old"):
        train(micro_config(f"run_dir={tmp_path / name}", "steps=1"), console=console)
    train(micro_config(f"run_dir={tmp_path / 'new'}", "steps=2", "optim.weight_decay=0.5"), console=console)
    train(micro_config(f"run_dir={tmp_path / 'old'}", "steps=2"), console=console)

    # AdamW shrinks the weights by lr × weight decay before it moves them.
    start = weights(tmp_path / "old")
    changed = weights(tmp_path / "new")
    before = latest_checkpoint(tmp_path / "new" / "checkpoints").with_name("step_000001")
    from safetensors.torch import load_file

    for name, first in load_file(before / "model.safetensors").items():
        torch.testing.assert_close(changed[name], start[name] - 0.01 * 0.5 * first, rtol=1e-5, atol=1e-6)
    stored = torch.load(latest_checkpoint(tmp_path / "new" / "checkpoints") / "optimizer.pt", weights_only=True)
    assert stored["param_groups"][0]["weight_decay"] == 0.5


def test_another_model_is_refused_before_anything_is_loaded(micro_config, tmp_path, console):
    train(micro_config("steps=1"), console=console)
    with pytest.raises(ValueError, match=r"model\.config: .*'head_dim': 16.* → .*'head_dim': 8"):
        train(micro_config("steps=2", "model.config={head_dim: 8}"), console=console)


def test_a_penalty_that_comes_later_has_no_policy_to_compare_with(micro_config, tmp_path, console):
    train(micro_config("steps=1"), console=console)
    with pytest.raises(ValueError, match="this run did not keep, because it began with kl_coef=0"):
        train(micro_config("steps=2", "algorithm.loss.kl_coef=0.1"), console=console)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_reference_that_is_not_the_first_policy_is_refused(micro_config, tmp_path, console, damage):
    penalty = "algorithm.loss.kl_coef=0.1"
    train(micro_config("steps=1", penalty), console=console)
    reference = tmp_path / "run" / "reference"
    if damage == "gone":
        reference.rename(tmp_path / "kept")
    else:
        content = bytearray((reference / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (reference / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is not the policy that the run started from: a file in it was changed, lost"):
        train(micro_config("steps=2", penalty), console=console)
    assert train(micro_config("steps=2", "algorithm.loss.kl_coef=0"), console=console).step == 2


def test_an_engine_with_new_options_starts_with_the_newest_weights(micro_config, tmp_path, console):
    lagging = "rollout.refresh_every=4"
    train(micro_config("steps=2", lagging), console=console)
    train(micro_config("steps=3", lagging, "rollout.dtype=float32"), console=console)
    console.file.flush()
    assert "the engine starts with the policy's weights, version 2" in (tmp_path / "console.txt").read_text("utf-8")
    staleness = [row["engine/staleness"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert staleness == [0, 1, 0]


def test_a_run_of_one_configuration_is_continued_from_its_file(micro_config, low_byte_reward, tmp_path, console):
    train(micro_config("steps=1", "resume=false"), console=console)
    assert train(load_config(tmp_path / "run" / "config.yaml", ["steps=2"]), console=console).step == 2
