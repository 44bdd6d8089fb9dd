"""Rollouts that the diagnosis reads: of a null at the start of a configuration, and of bypass mode."""

import base64
import copy
import dataclasses
import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from training_state import same_state, training_state
from typer.testing import CliRunner

from rollcorr import check_logs, read_rollout_log, read_run
from rollcorr.cli import app
from rollcorr.diagnostics import PictureNull, read_picture_null
from rollcorr.diagnostics.null import Origin
from rollcorr.diagnostics.null.picture_null import TimestepNoise
from rollcorr.diagnostics.run_verdict import run_health
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.stored_run import BadInputError
from rollcorr.train import train
from rollcorr.train.flow_grpo.flow_grpo_recipe import FlowGrpoRecipe


def test_a_configuration_gives_a_null(flow_run, tmp_path):
    settings = [part for override in flow_run for part in ("--config", override)]
    output = tmp_path / "null.json"
    result = CliRunner().invoke(app, ["null", *settings, "--rows", "24", "-o", str(output)])
    assert result.exit_code == 0, result.output
    null = read_picture_null(output)
    assert (null.pictures, null.dimensions) == (24, 768)
    assert null.origin.engine == ("rollout copy, bfloat16",)
    assert len(null.cells) == 3  # each picture has its own window, so that few cover every timestep
    assert 0 < null.exact_kl < 0.1


def test_bypass_mode_logs_its_first_scores(flow_trainer, tmp_path):
    trainer = flow_trainer("algorithm.rollout_correction={bypass_mode: true}", "optim.mini_batch_size=4")
    recipe = FlowGrpoRecipe(trainer, RunDirectory(tmp_path))
    before = copy.deepcopy(trainer.model)
    recipe.step(1)
    recipe.write_extras(1)

    (log,) = list(read_rollout_log(recipe.directory.rollout_log(1)))
    first = recipe.newest.first
    assert len(log) == 4
    assert not log.has("old_log_prob")
    expected = trainer.score_all(recipe.newest.batch.trajectories, before)["log_probs"]
    rows = first.rows.sort().values
    torch.testing.assert_close(log.packed("log_prob"), expected[rows].flatten())
    assert log.packed("exact_kl").isfinite().all()


def test_a_null_of_pictures_follows_and_changes_nothing(flow_config, console, tmp_path):
    for name, null in (("with", 16), ("without", 0), ("parted", 16)):
        options = (f"run_dir={tmp_path / name}", f"log.null={null}", "log.null_every=2", "optim.lr=1e-5")
        if name == "parted":
            train(flow_config(*options, "steps=2"), console=console)
        train(flow_config(*options), console=console)
    weights = [
        (tmp_path / name / "checkpoints" / "step_000004" / "transformer" / "diffusion_pytorch_model.safetensors")
        for name in ("with", "without", "parted")
    ]
    assert len({file.read_bytes() for file in weights}) == 1
    assert not (tmp_path / "without" / "null.json").exists()

    # 24 pictures at the start, in groups of 12; then 8 at steps 2 and 4.
    null = read_picture_null(tmp_path / "with" / "null.json")
    assert (null.pictures, null.last_step, len(null.cells)) == (40, 4, 3)
    assert (tmp_path / "parted" / "null.json").read_bytes() == (tmp_path / "with" / "null.json").read_bytes()
    report = run_health(read_run(tmp_path / "with"), tokens=True)
    assert report.judged_against == str(tmp_path / "with" / "null.json")
    assert report.verdict == "healthy"


def test_measuring_leaves_the_trainer_as_it_was(flow_trainer):
    trainer = flow_trainer("rollout.dtype=bfloat16")
    trainer.step(1)
    for parameter in trainer.parameters:
        parameter.grad = torch.ones_like(parameter)
    trainer.model.train()
    trainer.model.norm_out.eval()
    before = training_state(trainer.model, trainer.optimizer)
    assert sum(len(rows) for rows in trainer.null_pictures(8, step=2)) == 8
    assert same_state(before, training_state(trainer.model, trainer.optimizer))


def test_a_null_of_pictures_decays_and_refuses_jumps():
    """By hand: 64 pictures weigh 56 beside 8 new ones, at the timestep that both have."""
    cells = (TimestepNoise(1000.0, 64, 1e-6, 1.0), TimestepNoise(500.0, 64, 4e-6, 1.0))
    null = PictureNull(name="null.json", pictures=64, dimensions=768, cells=cells, origin=Origin())
    later = replace(null, pictures=8, cells=(TimestepNoise(1000.0, 16, 2e-6, 1.0),), last_step=20)
    followed = null.followed_by(later)
    assert (followed.pictures, followed.last_step) == (64, 20)
    assert followed.cells[0] == TimestepNoise(1000.0, 72, pytest.approx((56 * 1e-6 + 16 * 2e-6) / 72), 1.0)
    assert followed.cells[1] == cells[1]
    with pytest.raises(BadInputError, match=r"3 times the exact KL of null\.json"):
        null.followed_by(replace(later, cells=(TimestepNoise(1000.0, 16, 3.0001e-6, 1.0),)))


def test_a_sync_that_stops_is_no_null(flow_config, console, tmp_path, monkeypatch, caplog):
    options = (f"run_dir={tmp_path / 'run'}", "log.null=16", "log.null_every=2", "optim.lr=0.05")
    monkeypatch.setattr(
        "rollcorr.train.flow_grpo.sampler.RolloutModel.update_weights",
        lambda copy, model, version: setattr(copy, "weight_version", version),
    )
    train(flow_config(*options), console=console)
    null = read_picture_null(tmp_path / "run" / "null.json")
    assert (null.pictures, null.last_step) == (24, 0)
    assert "the null stays as it is" in caplog.text


def test_the_log_shows_what_both_policies_predicted(flow_trainer, tmp_path):
    """Of the four pictures with the largest exact KL; without pictures in the report, of none."""
    trainer = flow_trainer("log.images=2", "rollout.dtype=bfloat16")
    recipe = FlowGrpoRecipe(trainer, RunDirectory(tmp_path))
    recipe.step(1)
    recipe.write_extras(1)
    (log,) = list(read_rollout_log(recipe.directory.rollout_log(1)))
    kl, shown = log.packed("exact_kl").view(len(log), -1).sum(1), log.objects("predictions")
    assert {row for row, text in enumerate(shown) if text} == set(kl.topk(4).indices.tolist())

    # A column for each step, the sampler's prediction above the trainer's; JPEG and its scale lose a little.
    row, trajectories = int(kl.argmax()), recipe.newest.batch.trajectories
    picture = Image.open(io.BytesIO(base64.b64decode(shown[row])))
    columns, side = trajectories.steps.shape[1], trainer.policy.decode(trajectories.final[:1]).shape[-1]
    assert picture.size == (columns * side, 2 * side)
    mean, x = (trajectories.data[name][row, :1] for name in ("prev_sample_mean", "latents"))
    expected = trainer.policy.decode(trainer.schedule.predicted_clean(mean, x, trajectories.steps[row, :1]))[0]
    tile = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[:, :side, :side] / 255
    assert (tile - expected).abs().mean() < 0.04

    recipe.trainer.config = dataclasses.replace(trainer.config, log=dataclasses.replace(trainer.config.log, images=0))
    recipe.write_extras(2)
    (log,) = list(read_rollout_log(recipe.directory.rollout_log(2)))
    assert not log.has("predictions")


def test_bypass_mode_shows_weights_that_never_arrive(flow_config, console, tmp_path):
    options = ("algorithm.rollout_correction.bypass_mode=true", "rollout.refresh_every=1000", "log.null=16")
    train(flow_config(*options, "steps=6", "optim.lr=0.003", f"run_dir={tmp_path / 'run'}"), console=console)
    null = read_picture_null(tmp_path / "run" / "null.json")
    result = check_logs([tmp_path / "run" / "rollouts"], null=null)
    assert [result.causes[0].code, result.health.exit_code] == ["stale_by_lag", 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_the_advised_clip_spares_the_first_update(flow_config, console, tmp_path, dtype):
    """A run in bypass mode gives the advice; a second one, of another seed, measures what ε clips before any update."""
    common = (f"rollout.dtype={dtype}", "rollout.group_size=16", "optim.mini_batch_size=48", "steps=2")
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    train(flow_config(*common, bypass, "log.null=24", f"run_dir={tmp_path / 'first'}"), console=console)
    null = read_picture_null(tmp_path / "first" / "null.json")
    remarks = check_logs([tmp_path / "first" / "rollouts"], null=null).remarks
    (found,) = filter(None, (re.search(r"at ε = (\S+), .*; take (\S+) or more", remark) for remark in remarks))

    clipped = []
    for name, clip in (("small", found[1]), ("advised", found[2])):
        options = (bypass, "seed=5", f"algorithm.loss.clip_ratio={float(clip)}", f"run_dir={tmp_path / name}")
        train(flow_config(*common, *options), console=console)
        (first, *_) = read_run(tmp_path / name).series
        clipped.append(first["actor/clip_fraction_high"] + first["actor/clip_fraction_low"])
    assert clipped[1] <= 0.05 < clipped[0]
