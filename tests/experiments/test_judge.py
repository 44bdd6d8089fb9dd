"""The judge's answer key covers its logs, and a log of each kind can be made and read."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra [train]")
pytest.importorskip("pyarrow", reason="needs the extra [log]")

import numpy as np
import torch

from rollcorr import read_rollout_log

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "judge"))

import loop_faults
import outside_lab
from judge_key import excess_in, first_cause, read_key, wilson
from judge_tasks import TASKS
from loop_faults import LOOPS
from make_logs import LOOP_NAMES, TASK_NAMES, Log, all_logs, log_paths, make


def test_key_has_a_row_for_each_log():
    logs, key = all_logs(), read_key()
    assert len({log.path for log in logs}) == len(logs)
    assert all(key.of(log).codes for log in logs)
    names = {f"{log.kind}/{log.name}" for log in logs}
    assert {row for row in key.logs if not row.endswith("*")} <= names


def test_key_declares_quantized_engines():
    key = read_key()
    precision = {log.name: key.of(log).engine_precision for log in all_logs() if log.kind in ("nulls", "healthy")}
    assert precision["int4_engine"] == "int4"
    assert precision["0.3-int8"] == "int8"
    assert precision["stale_head"] is precision["0.3-bf16"] is None


def test_loops_are_complete():
    assert set(LOOP_NAMES) == set(LOOPS)
    assert set(TASK_NAMES) == set(TASKS)
    assert sum(log.kind == "loops" for log in all_logs()) == 225


@pytest.mark.parametrize(("name", "onsets"), [("frozen_sync", "FROZEN_FROM"), ("partial_sync", "PARTIAL_FROM")])
def test_key_has_the_onsets(name, onsets):
    expected = getattr(loop_faults, onsets)
    assert tuple(read_key().of(Log("loops", name, seed, "copy")).onset for seed in range(5)) == expected
    assert all(2 <= onset < min(task.steps for task in TASKS.values()) for onset in expected)


def test_a_frozen_loop_writes_its_log(tmp_path):
    torch.manual_seed(0)
    (tmp_path / "starts").mkdir()
    weights = TASKS["ngram"].build().state_dict()
    torch.save({"start": weights, "other": weights}, tmp_path / "starts" / "ngram-2.pt")

    log = Log("loops", "frozen_sync", 2, "ngram")
    make(log, tmp_path, steps=3, rows=16)
    assert [path.parent.name for _, path in log_paths(tmp_path)] == ["frozen_sync-2"]
    gaps = {step: [] for step in range(1, 4)}
    for batch in read_rollout_log(tmp_path / log.path / "rollouts.parquet"):
        for row in batch.to_rows():
            gaps[row["step"]] += np.subtract(row["old_log_prob"], row["rollout_log_prob"]).tolist()

    # Seed 2 freezes at step 2: from there on the gap is that of the updates, not of the sampler's precision.
    assert np.std(gaps[3]) > 3 * np.std(gaps[1]) > 0
    assert (tmp_path / log.null).exists()


def test_an_outside_fault_marks_its_excess(tmp_path, monkeypatch):
    monkeypatch.setattr(outside_lab, "ROWS", 8)
    monkeypatch.setattr(outside_lab, "NULL_ROWS", 4)
    monkeypatch.setattr(outside_lab, "PROMPT_LENGTHS", (5,))
    log = Log("outside", "sequence_parallel", 0)
    make(log, tmp_path)
    excess = np.load(tmp_path / log.path / "excess.npz")
    assert excess["excess"][excess["planted"]].sum() > 0.99 * excess["excess"].sum() > 0
    edges = {"positions": [[edge, edge] for edge in (7, 15, 23, 31, 39)]}
    assert excess_in(edges, tmp_path / log.path / "excess.npz") > 0.99
    rows = [row for batch in read_rollout_log(tmp_path / log.path / "rollouts.parquet") for row in batch.to_rows()]
    assert len(rows) == 8


def test_answers_are_judged_by_hand():
    key, log = read_key(), Log("loops", "dropout", 0, "copy")
    findings = [
        {"code": "above_null", "severity": "warning", "follows_from": "stochastic_trainer"},
        {"code": "ordinary_noise", "severity": "note"},
        {"code": "stochastic_trainer", "severity": "warning", "follows_from": None},
    ]
    answer = {"verdict": "unhealthy", "findings": findings}
    assert first_cause(answer)["code"] == "stochastic_trainer"
    assert key.judge(log, answer) == "right"
    assert key.judge(Log("loops", "template", 0, "copy"), answer) == "false"
    assert key.judge(log, {"verdict": "healthy", "findings": findings[1:2]}) == "healthy"
    assert key.judge(log, {"verdict": "unhealthy", "findings": [{"code": "unexplained", "severity": "warning"}]}) == (
        "unknown"
    )


def test_wilson_interval_by_hand():
    low, high = wilson(23, 25)
    assert (round(low, 3), round(high, 3)) == (0.750, 0.978)
