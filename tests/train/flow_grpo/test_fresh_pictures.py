"""Rollouts that the diagnosis reads: of a null at the start of a configuration, and of bypass mode."""

import copy

import torch
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
