"""Check, causes, report, watch, Monitor and advise return one first cause for a recorded fault."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs the extra [train]")
pytest.importorskip("pyarrow", reason="needs the extra [log]")

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "judge"))

from compact_logs import write_logs

from rollcorr import read_run
from rollcorr.cli import app
from rollcorr.diagnostics import advise, causes, check_logs, null_of_logs, run_report
from rollcorr.diagnostics.resolver import standing
from rollcorr.monitor import Monitor
from rollcorr.run_directory.directory import RunDirectory

RECORDED = {
    "repetition_penalty": "penalty_on_one_side",
    "system_prompt_lost": "some_rows_differ",
    "clamped_at_4": "clamped_values",
    "eos_as_pad": "last_token_differs",
    "logit_bias": "unknown",
    "guided_start": "unknown",
    "head_not_synced": "weights_differ",
    "tool_tokens": "",
}
"""Log → its first cause; empty where a new null is needed."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return dict(write_logs(tmp_path_factory.mktemp("logs")))


@pytest.fixture(scope="module")
def null(logs):
    return null_of_logs([logs["null"]])


@pytest.mark.parametrize("name", RECORDED)
def test_every_command_names_one_cause(tmp_path, logs, null, name):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "log.parquet").write_bytes(logs[name].read_bytes())
    null.save(tmp_path / "null.json")
    checked = check_logs([tmp_path], candidates=True)
    steps = "".join(json.dumps(step) + "\n" for step in checked.series)
    (tmp_path / "metrics.jsonl").write_text(steps, encoding="utf-8")
    answers = {
        "check": checked.causes,
        "causes": causes(tmp_path),
        "report": standing(run_report(read_run(tmp_path)).health.findings),
        "Monitor": Monitor.causes(SimpleNamespace(directory=RunDirectory(tmp_path))),
        "advise": advise(checked).repairs,
    }
    first = {user: "".join(cause.code for cause in found[:1]) for user, found in answers.items()}
    assert first == dict.fromkeys(answers, RECORDED[name])
    shown = CliRunner().invoke(app, ["watch", str(tmp_path), "--once"])
    assert [f"first cause: {cause.title}." in shown.output for cause in checked.causes[:1]] == [True] * bool(
        first["check"]
    )
    assert run_report(read_run(tmp_path)).health.verdict == checked.health.verdict
