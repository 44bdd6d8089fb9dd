"""`rollcorr train` as a scheduler starts it: as real processes, twice at once, and with real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from short_runs import short_run
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.run_directory import read_metrics
from rollcorr.train import latest_checkpoint


@pytest.fixture
def command(tmp_path):
    """The arguments of a run that does not end by itself."""
    endless = ["steps=1000000", "log.evaluate=0", "warm_up.steps=0", "log.tensorboard=false", "log.rollouts=false"]
    return ["train", *short_run("grpo", tmp_path), *endless, f"run_dir={tmp_path / 'run'}"]


@pytest.fixture
def process(command, tmp_path):
    """That run, as a process that has finished its first steps."""
    with (tmp_path / "told.txt").open("w", encoding="utf-8") as told:
        started = subprocess.Popen([sys.executable, "-m", "rollcorr", *command], stdout=told, stderr=told)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while started.poll() is None and not (metrics.is_file() and metrics.read_text(encoding="utf-8").count("\n") > 2):
        time.sleep(0.05)
    assert started.poll() is None, (tmp_path / "told.txt").read_text(encoding="utf-8")
    yield started
    started.kill()
    started.wait()


def test_a_second_process_is_refused_and_the_first_is_stopped_by_a_signal(process, command, tmp_path):
    refused = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert refused.exit_code == 2
    assert f"is in use by process {process.pid} on" in refused.output
    assert "Traceback" not in refused.output

    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    told = (tmp_path / "told.txt").read_text(encoding="utf-8")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == f"step_{len(rows):06d}"
    assert f"stopped by SIGTERM after step {len(rows)} of 1000000" in told
    assert f"the same command continues after step {len(rows)}" in told
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_launcher_of_two_processes_is_refused_and_writes_nothing(command, tmp_path):
    launcher = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    refused = CliRunner().invoke(app, command, env={"COLUMNS": "300", **launcher})
    assert refused.exit_code == 2
    assert "WORLD_SIZE=2: a run is one process on one device, so start it without torchrun" in refused.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tasks", ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_two_slurm_tasks_are_refused_and_write_nothing(command, tmp_path, tasks, rank):
    refused = CliRunner().invoke(app, command, env={"COLUMNS": "300", tasks: "2", "SLURM_PROCID": rank})
    assert refused.exit_code == 2
    assert f"{tasks}=2: a run is one process on one device, so start it with srun --ntasks 1" in refused.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(28, "No space left on device"), 1),
        (FileNotFoundError("nowhere"), 2),
        (ValueError("wrong"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code_and_no_traceback(command, monkeypatch, error, code):
    from rollcorr.train import recipes

    def fails(_):
        raise error

    monkeypatch.setattr(recipes, "train", fails)
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert (result.exit_code, "Traceback" in result.output) == (code, False)


def test_a_disk_that_is_full_from_the_start_is_one_sentence(command, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert "No space left on device" in result.output
    assert "Traceback" not in result.output
