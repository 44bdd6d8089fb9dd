"""The script of `make gpu`: its stages run without a GPU, write results, and report skipped stages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import gpu  # noqa: E402
from gpu_stages import STAGES, Plan  # noqa: E402
from gpu_stages.recorder import Recorder  # noqa: E402


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path / "results.json")


def stored(recorder):
    return json.loads(recorder.path.read_text(encoding="utf-8"))["stages"]


def test_a_run_writes_every_stage_and_what_it_takes_to_repeat_it(tmp_path, capsys):
    """Two stages in processes of their own, as `make gpu` runs all of them."""
    code = gpu.main(["--device", "cpu", "--quick", "--stages", "log_probs,nsight", "--results", str(tmp_path)])
    content = json.loads((tmp_path / "gpu_cpu_quick.json").read_text(encoding="utf-8"))
    assert code == 0, capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_cpu_quick.json"]
    assert (
        content["command"] == f"python tools/gpu.py --device cpu --quick --stages log_probs,nsight --results {tmp_path}"
    )
    assert {"date", "commit", "device", "torch", "triton", "python"} <= content.keys()
    assert {name: stage["status"] for name, stage in content["stages"].items()} == {
        "log_probs": "done",
        "nsight": "done",
    }
    (ours,) = [row for row in content["stages"]["log_probs"]["rows"] if row["name"] == "V = 512, rollcorr, torch"]
    assert 0 < ours["min"] <= ours["median"]
    assert content["stages"]["nsight"]["rows"] == [{"name": "counters", "not_run": "no GPU"}]


def test_a_stage_that_fails_leaves_its_rows_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    broken = STAGES["log_probs"]._replace(module="no_such_module")
    monkeypatch.setattr(gpu, "run_stage", lambda name, arguments, recorder, limit: fail(name, recorder))

    def fail(name, recorder):
        try:
            if name == "log_probs":
                broken.run(Plan("cpu", True), recorder.of(name))
        except ModuleNotFoundError as error:
            recorder.finish(name, "failed", str(error), 0.1)
        else:
            recorder.finish(name, "done", "", 0.1)

    assert gpu.main(["--device", "cpu", "--quick", "--stages", "log_probs,nsight", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "log_probs    failed" in said
    assert "nsight       done" in said


def test_a_row_is_in_the_file_before_the_next_is_measured(recorder):
    rows = recorder.of("ceilings")
    for i in range(3):
        rows.add(f"row {i}", seconds=i)
        assert len(stored(recorder)["ceilings"]["rows"]) == i + 1
    assert not recorder.path.with_suffix(".partial").exists()


def test_an_error_is_a_row_and_what_follows_still_runs(recorder, capsys):
    rows = recorder.of("correction")
    rows.attempt("ours", lambda: 1 / 0)
    rows.attempt("a peer", lambda: 1 / 0, required=False)
    rows.attempt("a difference", lambda: {"right": False, "differing": ["case"]})
    rows.attempt("fine", lambda: {"seconds": 1})
    stage = stored(recorder)["correction"]
    assert stage["wrong"] == 2
    assert [row.get("error") for row in stage["rows"]] == [*["ZeroDivisionError: division by zero"] * 2, None, None]
    assert [row.get("wrong", False) for row in stage["rows"]] == [True, False, True, False]


def test_a_stage_is_not_begun_when_the_minutes_are_over(tmp_path, capsys):
    arguments = ["--device", "cpu", "--quick", "--minutes", "0.01", "--stages", "nsight", "--results", str(tmp_path)]
    assert gpu.main(arguments) == 1
    (stage,) = json.loads((tmp_path / "gpu_cpu_quick.json").read_text(encoding="utf-8"))["stages"].values()
    assert stage["status"] == "not run"
    assert stage["reason"] == "the 0.01 minutes were over"


def test_the_limits_of_the_stages_and_the_imports_stay_under_nine_minutes():
    assert gpu.parse([]).minutes * 60 + 15 < 9 * 60
    assert max(stage.seconds for stage in STAGES.values()) <= 150


def test_a_stage_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="there is no stage 'speed'; there are ceilings, correctness,"):
        gpu.main(["--stages", "speed"])


def test_what_is_predicted_is_measured():
    """Each prediction names a row that a run writes."""
    content = json.loads((ROOT / "tools" / "gpu_stages" / "predictions.json").read_text(encoding="utf-8"))
    from gpu_stages import correction_time, log_prob_time

    rows = {
        "correction": {
            f"{tokens:,} tokens, {layout}, {name}"
            for tokens in correction_time.SIZES
            for layout in ("dense", "padded", "packed")
            for name in correction_time.contenders(Plan("cuda", False))
        },
        "log_probs": {
            f"V = {V:,}, {name}" for V in (32_768, 151_936) for name in log_prob_time.contenders(Plan("cuda", False))
        },
        "training": {"share of a step"},
    }
    for prediction in content["predictions"]:
        stage, row = prediction["row"]
        assert row in rows[stage]


def test_the_page_shows_predictions_alone_or_beside_what_was_found(tmp_path):
    from gpu_page import gpu_section

    def table(header, rows):
        return "\n".join(" | ".join(map(str, row)) for row in [header, *rows])

    without = gpu_section(table, tmp_path / "none.json")
    assert "No run on a GPU has happened" in without
    assert "correction by Triton, 8 M tokens | 40 µs to 55 µs | not measured" in without

    found = tmp_path / "gpu_cuda.json"
    names = dict.fromkeys(("torch", "triton", "python", "date", "commit", "command"), "x") | {"device": "NVIDIA H200"}
    timed = {"name": "8,388,608 tokens, dense, triton", "median": 81e-6, "min": 80e-6}
    wrong = {"name": "equal bits, triton", "wrong": True, "differing": ["packed"]}
    stage = {"status": "done", "seconds": 12.0, "rows": [timed]}
    stages = {
        "correction": stage,
        "correctness": {"status": "wrong", "seconds": 3.0, "reason": "1 row", "rows": [wrong]},
    }
    found.write_text(json.dumps(names | {"stages": stages}), encoding="utf-8")
    page = gpu_section(table, found)
    assert "No run" not in page
    assert "correction by Triton, 8 M tokens | 40 µs to 55 µs | 81 µs" in page
    assert "correctness | wrong | 3 s | 1 row" in page
    assert "WRONG; differing: ['packed']" in page
