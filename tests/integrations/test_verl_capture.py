"""Rollouts of a verl run on disk, by an environment variable and without an edit."""

import errno
import logging
import os

import pytest
import torch
from faulty_disk import Faults, faulty_disk
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.integrations import verl
from rollcorr.integrations.verl import capture, v2025_11
from rollcorr.integrations.verl.correction import TensorBatch
from rollcorr.integrations.verl_plugin import with_plugin
from rollcorr.integrations.verl_variables import ROLLOUTS

OPTIONS = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.9_1.1",
}


def batch_of(seed, noise=0.01, rows=64, tokens=40):
    draw = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, tokens, generator=draw) - 0.2
    return TensorBatch(
        {
            "old_log_probs": rollout + noise * torch.randn(rows, tokens, generator=draw),
            "rollout_log_probs": rollout,
            "response_mask": torch.ones(rows, tokens),
            "responses": torch.randint(0, 50, (rows, tokens), generator=draw),
        }
    )


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(ROLLOUTS, f"{tmp_path / 'ring'},steps=3")
    capture._capture_of.cache_clear()
    capture._log_once.cache_clear()
    yield tmp_path / "ring"
    capture._capture_of.cache_clear()


def close(directory):
    found = capture._capture_of(f"{directory},steps=3", os.getpid())
    assert found.flush()


def test_check_judges_the_kept_steps(directory):
    for step in range(6):
        verl.compute_rollout_correction_and_add_to_batch(batch_of(step, noise=0.01 if step < 4 else 0.8), OPTIONS)
    close(directory)
    assert sorted(path.name for path in directory.iterdir()) == [f"step_{n:06d}.parquet" for n in (0, 3, 4, 5)]
    result = CliRunner().invoke(app, ["check", str(directory)])
    assert result.exit_code == 1, result.output
    assert "256" in result.output  # all rows of the four steps


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("generation", [verl, v2025_11])
def test_results_do_not_depend_on_the_capture(directory, monkeypatch, generation, full):
    options = OPTIONS if generation is verl else {"rollout_is": "token", "rollout_is_threshold": 2.0}
    faults = Faults(errno.ENOSPC, first=2 if full else 0, count=10**6)
    with faulty_disk(directory.parent, faults):
        faults.happen = True
        kept, metrics = generation.compute_rollout_correction_and_add_to_batch(batch_of(0), dict(options))
        assert capture._capture_of(f"{directory},steps=3", os.getpid()).flush() is not full
        faults.happen = False
        assert (directory / "step_000000.parquet").exists() is not full
    monkeypatch.delenv(ROLLOUTS)
    plain, plain_metrics = generation.compute_rollout_correction_and_add_to_batch(batch_of(0), dict(options))
    assert metrics == plain_metrics
    assert all(kept.batch[name].equal(plain.batch[name]) for name in plain.batch)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [("{},size=3", "there is no option size"), ("{},steps=0", "at least 1"), ("{}/file", "Not a directory")],
)
def test_a_bad_setting_is_logged_and_nothing_raised(tmp_path, monkeypatch, caplog, setting, reason):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(ROLLOUTS, setting.format(tmp_path) if "file" not in setting else f"{tmp_path}/file")
    capture._capture_of.cache_clear()
    capture._log_once.cache_clear()
    with caplog.at_level(logging.ERROR):
        for step in range(2):
            verl.compute_rollout_correction_and_add_to_batch(batch_of(step), OPTIONS)
        if "file" in setting:
            capture._capture_of(f"{tmp_path}/file", os.getpid()).close()
    assert caplog.text.count("rollouts are not kept") == 1
    assert reason in caplog.text or "exists" in caplog.text


def test_ray_workers_get_the_variable(directory):
    assert with_plugin({})["env_vars"][ROLLOUTS] == f"{directory},steps=3"
    assert with_plugin({"env_vars": {ROLLOUTS: "/other"}})["env_vars"][ROLLOUTS] == "/other"
