"""Rollouts that the diagnosis reads: of a null at the start of a configuration, and of bypass mode."""

import base64
import copy
import dataclasses
import io

import numpy as np
import torch
from PIL import Image
from typer.testing import CliRunner

from rollcorr import read_rollout_log
from rollcorr.cli import app
from rollcorr.diagnostics import read_picture_null
from rollcorr.run_directory.directory import RunDirectory
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
