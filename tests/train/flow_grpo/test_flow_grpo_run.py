"""A Flow-GRPO run and its directory: resume is exact, Ctrl-C saves, the report shows the pictures."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.run_directory import read_metrics
from rollcorr.train import latest_checkpoint, load_config, train
from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig
from rollcorr.train.flow_grpo.flow_grpo_trainer import FlowGrpoTrainer
from rollcorr.train.grpo.grpo_config import GrpoConfig


def outcome(run_dir):
    """Everything a run computed: final weights, optimizer state, and metrics without timings."""
    path = latest_checkpoint(run_dir / "checkpoints")
    rows = [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in read_metrics(run_dir / "metrics.jsonl")
    ]
    (file,) = [*path.glob("transformer/*.safetensors"), *path.glob("lora/*.safetensors")]
    return load_file(file), torch.load(path / "optimizer.pt", weights_only=True)["state"], rows


def assert_same(got, expected):
    for mine, theirs in zip(got[:2], expected[:2], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, theirs[key], rtol=0, atol=0)
    assert got[2] == expected[2]


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.dtype=fp8", "rollout.refresh_every=2", "optim.mini_batch_size=6", "rollout.sde_window=per_sample"],
        ["algorithm.rollout_correction={bypass_mode: true}", "algorithm.loss.kl_coef=0.1", "optim.ppo_epochs=2"],
        ["model.lora.rank=2", "algorithm.loss.kl_coef=0.1", "algorithm.loss.loss_mode=grpo_guard"],
        ["model.lora.rank=2", "rollout.dtype=fp8", "rollout.refresh_every=2"],
    ],
    ids=["decoupled, stale fp8 copy", "bypass, reference KL", "adapters, GRPO-Guard", "adapters, stale fp8 copy"],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(flow_config, tmp_path, console, overrides):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(flow_config(f"run_dir={whole}", "steps=5", *overrides), console=console)
    train(flow_config(f"run_dir={parted}", "steps=3", *overrides), console=console)
    torch.rand(3)  # whatever else happens in the process
    train(load_config(parted / "config.yaml", ["steps=5"]), console=console)
    assert_same(outcome(parted), outcome(whole))


def test_a_checkpoint_of_adapters_holds_no_other_weights(flow_config, tmp_path, console):
    """The policy, its moments and the lagging copy contain the trained tensors only."""
    train(flow_config("steps=1", "model.lora.rank=2", "rollout.refresh_every=2"), console=console)
    path = latest_checkpoint(tmp_path / "run" / "checkpoints")
    adapters = load_file(path / "lora" / "pytorch_lora_weights.safetensors")
    copied = load_file(path / "engine.safetensors")
    moments = torch.load(path / "optimizer.pt", weights_only=True)["state"]
    assert len(adapters) == len(copied) == len(moments) > 0
    assert all("lora_" in name for name in (*adapters, *copied))
    assert not (path / "transformer").exists()


def test_the_copy_refuses_weights_of_other_adapters(flow_trainer):
    weights = flow_trainer("model.lora.rank=2").engine.export_weights()
    with pytest.raises(ValueError, match=r"do not fit model\.lora: .* set model\.lora as it was"):
        flow_trainer().engine.import_weights(weights, version=1)


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(flow_config, tmp_path, console, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    step = FlowGrpoTrainer.step

    def interrupted_step(self, count, **options):
        if count == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, count)

    monkeypatch.setattr(FlowGrpoTrainer, "step", interrupted_step)
    summary = train(flow_config("steps=4", "log.evaluate=2"), console=console)
    assert (summary.step, summary.interrupted, summary.after) == (2, True, None)
    assert signal.getsignal(signal.SIGINT) == handler
    console.file.flush()
    told = (tmp_path / "console.txt").read_text(encoding="utf-8")
    assert "stopped by SIGINT after step 2 of 4\nthe same command continues after step 2\n" in told


def test_a_run_leaves_pictures_and_a_report_that_shows_them(flow_run, tmp_path):
    run = tmp_path / "run"
    arguments = [*flow_run, f"run_dir={run}", "steps=2", "log.evaluate=4", "log.tensorboard=true"]
    runner = CliRunner()
    trained = runner.invoke(app, ["train", *arguments])
    assert trained.exit_code == 0, trained.output
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["before"]["pictures"] == summary["after"]["pictures"] == 4
    assert {path.name for path in (run / "images").iterdir()} == {"before.png", "after.png"}
    assert list((run / "tensorboard").iterdir())
    names = {"reward", "color_accuracy", "shape_accuracy", "background_noise", "diversity"}
    wanted = {name for name in names if name != "diversity"}  # four pictures of four prompts have none
    for when in ("before", "after"):
        assert set(summary[when]) == {"pictures", *wanted, *(f"held_out_{name}" for name in wanted)}
    (_, row) = read_metrics(run / "metrics.jsonl")
    assert {f"picture/{name}" for name in names - {"reward"}} <= set(row)
    assert "of prompts that are not trained on" in trained.output

    # Without a null nobody knows which KL is noise.
    assert runner.invoke(app, ["report", str(run)]).exit_code == 3
    settings = [part for setting in flow_run for part in ("--config", setting)]
    measured = runner.invoke(app, ["null", *settings, "--rows", "24", "-o", str(run / "null.json")])
    assert measured.exit_code == 0, measured.output
    reported = runner.invoke(app, ["report", str(run)])
    assert reported.exit_code == 0, reported.output
    assert reported.output.startswith("healthy")
    page = (run / "report" / "report.html").read_text(encoding="utf-8")
    assert page.count('class="pixels"') == 2
    assert "Before training" in page
    assert "picture/color_accuracy" in page
    assert "actor/kept_fraction" in page
    assert {path.name for path in (run / "report").iterdir()} == {"report.html"}  # curves are in the page

    again = runner.invoke(app, ["train", *arguments])
    assert again.exit_code == 0
    assert "finished: step 2 of 2 is done" in again.output


def test_the_recipe_says_which_trainer_reads_the_options(tmp_path):
    assert isinstance(load_config(None, []), GrpoConfig)
    assert isinstance(load_config(None, ["recipe=flow_grpo"]), FlowGrpoConfig)
    file = tmp_path / "run.yaml"
    file.write_text("recipe: flow_grpo\nrollout: {noise_level: 0.5}\n")
    assert load_config(file, ["steps=3"]).rollout.noise_level == 0.5
    with pytest.raises(ValueError, match=r"unknown option 'rollout.noise_level'"):
        load_config(file, ["recipe=grpo"])
    with pytest.raises(ValueError, match="recipe='flux' is unknown; choose from grpo, flow_grpo"):
        load_config(None, ["recipe=flux"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.noise=1", "Did you mean 'rollout.noise_level'"),
        ("rollout.dtype=int4", "rollout.dtype"),
        ("rollout.group_size=1", "rollout.group_size must be at least 2"),
        ("reward.color=pink", "reward.color='pink' is unknown"),
        ("reward.name=function", "reward.function belongs to reward.name=function"),
        ("algorithm.loss.clip_ratio=0", "clip_ratio"),
        ("algorithm.loss.reduction=median", "reduction must be"),
        ("algorithm.rollout_correction.rollout_rs=nothing", "nothing"),
    ],
)
def test_a_wrong_option_is_explained(override, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, ["recipe=flow_grpo", override])


def test_the_effective_configuration_reads_back_as_itself(tmp_path):
    config = load_config(
        None,
        [
            "recipe=flow_grpo", "rollout.sde_window_range=[1, 5]", "model.lora.rank=3", "algorithm.loss.reduction=0.5",
            "algorithm.rollout_correction={rollout_rs: step_kl, rollout_rs_threshold: 0.3}",
        ],
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again = load_config(tmp_path / "config.yaml")
    assert again.to_yaml() == config.to_yaml()
    assert again.algorithm.actor == config.algorithm.actor
    assert again.algorithm.actor.step_kl == 0.3
    assert (again.rollout, again.model) == (config.rollout, config.model)


def test_the_help_teaches_the_recipes():
    told = CliRunner().invoke(app, ["train", "--help"]).output
    assert "flow_grpo" in told
    assert "recipe" in told


def test_the_command_explains_mistakes(tmp_path, flow_run):
    runner = CliRunner()
    for arguments, message in (
        (["model.path=/nowhere"], "does not exist"),
        (["prompts.path=/nowhere.txt"], "does not exist"),
        (["reward.name=function", "reward.function=nowhere"], "must be package.module:name or file.py:name"),
    ):
        result = runner.invoke(app, ["train", *flow_run, f"run_dir={tmp_path / 'run'}", *arguments])
        assert result.exit_code == 2
        assert message in result.output
