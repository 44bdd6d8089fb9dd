"""Causes of alarms: the writer thread analyzes the rows at hand as `rollcorr check` does, and no step waits for it."""

from __future__ import annotations

import threading

import pytest
import torch
from synthetic_policies import head, sample, shifted, zeros_at_end

from rollcorr import Monitor
from rollcorr.diagnostics import check_logs
from rollcorr.monitor import run_monitor
from rollcorr.monitor.batch_at_hand import MOST_ROWS, BatchAtHand
from rollcorr.monitor.rollout_sample import write_rows

HEAD = head()
FAULTS = {
    "shift": lambda seed: shifted(sample(seed, HEAD)),
    "tempered trainer": lambda seed: sample(seed, HEAD, temperature=0.6),
    "zeros": lambda seed: zeros_at_end(sample(seed, HEAD)),
}


def add(monitor, rows):
    monitor.correct(rows.train, rows.rollout, rows.mask, columns={"response_ids": rows.ids})
    return monitor.step()


@pytest.mark.parametrize("start", [1, 12])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_an_alarm_has_the_first_cause_of_check(tmp_path, monkeypatch, fault, start):
    analyzed = []

    def first_cause(rows, null):
        analyzed.append(rows)
        return original(rows, null)

    original = run_monitor.first_cause
    monkeypatch.setattr(run_monitor, "first_cause", first_cause)
    with Monitor(tmp_path / "run") as monitor:
        for step in range(1, start + 4):
            add(monitor, FAULTS[fault](step) if step >= start else sample(step, HEAD))
        assert monitor.flush()
        alarms = monitor.alarms

    write_rows(tmp_path / "rows.parquet", analyzed[0])
    cause = check_logs(tmp_path / "rows.parquet").causes[0]
    assert {alarm.follows_from for alarm in alarms} == {cause.code}
    assert all(cause.title in alarm.reason and alarm.fix == cause.fix for alarm in alarms)
    assert not any("truncate" in alarm.fix for alarm in alarms)


def test_a_step_does_not_wait_for_an_analysis(tmp_path, monkeypatch):
    may_end, has_begun = threading.Event(), threading.Event()

    def first_cause(rows, null):
        has_begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(run_monitor, "first_cause", first_cause)
    with Monitor(tmp_path) as monitor:
        add(monitor, FAULTS["shift"](1))
        assert has_begun.wait(60)
        add(monitor, FAULTS["shift"](2))
        assert not may_end.is_set()
        may_end.set()
        assert monitor.flush()
    assert monitor.steps == 2


def test_an_unnamed_mismatch_is_not_to_be_truncated(tmp_path):
    generator = torch.Generator().manual_seed(0)
    train = -2 * torch.rand(64, 40, generator=generator)
    with Monitor(tmp_path) as monitor:
        monitor.correct(train, train + 2.0 * torch.randn(64, 40, generator=generator), torch.ones(64, 40))
        monitor.step()
        (alarm,) = (alarm for alarm in monitor.alarms if alarm.metric == "chi2_token")
    assert "truncate" not in alarm.fix
    assert "find the cause" in alarm.fix


def test_a_failed_analysis_ends_no_step(tmp_path, monkeypatch, caplog):
    def first_cause(rows, null):
        raise ValueError("no cause today")

    monkeypatch.setattr(run_monitor, "first_cause", first_cause)
    with Monitor(tmp_path) as monitor:
        add(monitor, FAULTS["shift"](1))
        monitor.flush()
        assert monitor.alarms
    assert "no cause today" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_rows_at_hand_are_few_and_unchanged():
    hand, mask = BatchAtHand(), torch.ones(200, 3)
    parts = [torch.full((200, 3), float(part)) for part in range(3)]
    for part in parts:
        hand.hold(mask, {"old_log_prob": part}, None)
    rows, size = hand.on_host(1)
    assert [len(part) for part, _, _ in rows] == [200, MOST_ROWS - 200]
    assert size == 2 * 4 * 3 * MOST_ROWS

    # A buffer that was reused holds other rows by now.
    parts[0].zero_()
    ((_, _, columns),) = hand.on_host(1)[0]
    assert columns["old_log_prob"].unique().tolist() == [1.0]
