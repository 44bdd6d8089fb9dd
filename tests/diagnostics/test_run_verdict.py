"""One list of causes for a run directory: every command names the same first cause."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from test_resolver import RECORDED
from typer.testing import CliRunner

from rollcorr import read_run
from rollcorr.cli import app
from rollcorr.diagnostics import advise, causes, check_logs, run_report
from rollcorr.diagnostics.run_verdict import run_health
from rollcorr.monitor import Monitor
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter
from rollcorr.run_directory.directory import RunDirectory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Every third response of the recorded loop as a run directory, with metrics and rollouts."""
    path = tmp_path_factory.mktemp("runs") / "run"
    recorded = np.load(RECORDED)
    rows = [
        {name: recorded[name][row].tolist() for name in recorded.files} for row in range(0, len(recorded["step"]), 3)
    ]
    (path / "rollouts").mkdir(parents=True)
    with RolloutLogWriter(path / "rollouts" / "step.parquet") as writer:
        writer.write(RolloutBatch.from_rows(rows))
    steps = check_logs([path / "rollouts"]).series
    (path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    return path


def test_all_consumers_name_one_first_cause(run):
    checked = check_logs([run])
    answers = {
        "check": checked.causes[0],
        "causes": causes(run)[0],
        "report": run_report(read_run(run)).health.findings[0],
        "advise": advise(checked).repairs[0],
        "Monitor": Monitor.causes(SimpleNamespace(directory=RunDirectory(run)))[0],
    }
    assert {name: (one.code, one.first_step) for name, one in answers.items()} == dict.fromkeys(
        answers, ("weights_differ", 16)
    )
    shown = CliRunner().invoke(app, ["watch", str(run), "--once"])
    assert shown.exit_code == 1
    assert f"first cause: {checked.causes[0].title}. Fix: check the weight sync" in shown.output


def test_metrics_decide_without_rollouts(run, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    assert [cause.code for cause in causes(tmp_path)] == ["growing_mismatch"]
    assert run_health(read_run(run)).findings[0].code == "growing_mismatch"


def test_a_folder_of_logs_has_causes_too(run):
    assert [cause.code for cause in causes(run / "rollouts")] == ["weights_differ"]
