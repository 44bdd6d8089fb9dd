"""A disk that fails or hangs, a tracker that hangs, a judgment that fails: a training step notices nothing of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from fault_cases import STEPS, faults_of, run_on
from faulty_disk import ERRORS, Faults, faulty_disk

from rollcorr import Monitor, RolloutSample, read_run
from rollcorr.monitor import run_writer
from rollcorr.monitor.rollout_sample import CollectedRollouts, RolloutRows
from rollcorr.run_directory import JsonLines, read_metrics

CASES = [(number, 1 + 5 * i, (1, 4, 30)[i % 3]) for i, number in enumerate((*ERRORS, *ERRORS[:5]))]


@pytest.mark.parametrize(("number", "first", "count"), CASES, ids=lambda value: errno.errorcode.get(value, str(value)))
def test_no_number_is_lost_on_a_failing_disk(tmp_path, caplog, number, first, count):
    faults = Faults(number, first, count)
    found = run_on(tmp_path, faults)
    assert len(found) == STEPS
    assert faults.calls > first, "the disk has failed"
    assert faults_of(tmp_path, found, log=caplog.text) == []


def test_a_failing_write_is_logged_once_and_counted(tmp_path, caplog):
    """Three steps on a full disk."""
    found, faults = [], Faults(errno.ENOSPC, 1, 10**9)
    with faulty_disk(tmp_path, faults), Monitor(tmp_path) as monitor:
        monitor.step(number=0.0)
        monitor.flush()
        faults.happen = True
        for number in range(4):
            found.append(monitor.step(number=float(number)))
            assert not monitor.flush()
        faults.happen = False
        found.append(monitor.step(number=4.0))
        assert monitor.flush()
        found.append(monitor.step(number=5.0))
    assert [metrics.get("monitor/unwritten_steps") for metrics in found] == [None, 1, 2, 3, 4, None]
    assert [metrics["number"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [0, 0, 1, 2, 3, 4, 5]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "No space left on device" in messages[0]
    assert messages[1] == "metrics.jsonl is written again"


def test_more_failed_lines_than_fit_are_counted_as_lost(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(run_writer, "FAILED_LINES", 3)
    faults = Faults(errno.EIO, 1, 10**9)
    with faulty_disk(tmp_path, faults), Monitor(tmp_path) as monitor:
        faults.happen = True
        for number in range(6):
            monitor.step(number=float(number))
            monitor.flush()
        faults.happen = False
        assert monitor.step(number=6.0)["monitor/unwritten_steps"] == 6
        monitor.flush()
        assert monitor.step(number=7.0)["monitor/unwritten_steps"] == 3
    assert [metrics["number"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [3, 4, 5, 6, 7]
    assert "step 1 is lost for metrics.jsonl: 3 lines wait to be written" in caplog.text


def test_a_strict_monitor_raises_and_counts_each_step_once(tmp_path):
    faults = Faults(errno.EIO, 1, 10**9)
    with faulty_disk(tmp_path, faults), Monitor(tmp_path, strict=True) as monitor:
        faults.happen = True
        for _ in range(2):
            monitor.correct(-torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3))
            with pytest.raises(OSError, match="Input/output error"):
                monitor.step()
        faults.happen = False
        monitor.correct(-torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3))
        assert monitor.step()["rollout_corr/token_count"] == 6
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [(metrics["step"], metrics["rollout_corr/token_count"]) for metrics in steps] == [(1, 6), (2, 6), (3, 6)]


# --- What hangs -------------------------------------------------------------------------------------------------------


class Hanging:
    """A call, or a sink, that waits for an event."""

    def __init__(self):
        self.event, self.entered = threading.Event(), threading.Event()
        self.steps = []

    def wrap(self, call):
        def waiting(*arguments):
            self.entered.set()
            assert self.event.wait(60)
            return call(*arguments)

        return waiting

    def write(self, step, metrics):
        self.entered.set()
        assert self.event.wait(60)
        self.steps.append(step)

    def close(self):
        self.steps.append("closed")


@pytest.mark.parametrize("place", ["the file", "the rollout log", "a sink"])
def test_step_returns_while_its_files_hang(tmp_path, monkeypatch, place):
    hanging = Hanging()
    if place == "the file":
        monkeypatch.setattr(JsonLines, "write", hanging.wrap(JsonLines.write))
    if place == "the rollout log":
        monkeypatch.setattr(RolloutRows, "write", hanging.wrap(RolloutRows.write))
    with Monitor(tmp_path, rollouts=RolloutSample(), sinks=[hanging] if place == "a sink" else []) as monitor:
        train = -torch.rand(4, 5)
        for step in range(3):
            monitor.correct(train, train, torch.ones(4, 5))
            monitor.step(reward=torch.full((4,), float(step)))
            assert hanging.entered.wait(60)
        train.zero_()
        assert monitor.steps == 3
        assert not hanging.event.is_set()
        hanging.event.set()
    assert [metrics["reward/mean"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert len(list((tmp_path / "rollouts").iterdir())) == 3
    assert hanging.steps == ([1, 2, 3, "closed"] if place == "a sink" else [])


def test_a_full_queue_drops_the_oldest_rows_and_no_line(tmp_path, monkeypatch, caplog):
    hanging = Hanging()
    monkeypatch.setattr(RolloutRows, "write", hanging.wrap(RolloutRows.write))
    monkeypatch.setattr(run_writer, "LOG_BYTES", 2 * 4 * 4 * 10 + 8 * 4 + 100)  # one step, not two
    with Monitor(tmp_path, rollouts=RolloutSample()) as monitor:
        for _ in range(5):
            monitor.correct(-torch.ones(4, 10), -torch.ones(4, 10), torch.ones(4, 10))
            metrics = monitor.step(reward=torch.ones(4))
            assert hanging.entered.wait(60)
        assert metrics["monitor/lost_rollout_logs"] == 2
        hanging.event.set()
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert sorted(path.stem for path in (tmp_path / "rollouts").iterdir()) == ["step_000001", "step_000005"]
    assert caplog.text.count("is lost for the rollout log: the disk is slow or full") == 1


def test_closing_gives_up_a_hanging_sink(tmp_path, monkeypatch, caplog):
    """The lock goes back, and what hangs writes nothing after that."""
    monkeypatch.setattr(run_writer.RunWriter.close, "__defaults__", (0.1,))
    hanging = Hanging()
    monitor = Monitor(tmp_path, sinks=[hanging])
    monitor.step(reward=1.0)
    assert hanging.entered.wait(60)
    monitor.step(reward=2.0)
    thread, file = monitor._writer._thread, monitor._file
    monitor.close()
    assert not (tmp_path / "run.lock").exists()
    assert "not written: the sinks (2), metrics.jsonl (1)" in caplog.text
    hanging.event.set()
    thread.join(60)
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert hanging.steps == [1]
    file.close()


# --- The end of the program, and forks --------------------------------------------------------------------------------


PROGRAM = """
import os, sys, torch
from rollcorr import Monitor, RolloutSample

monitor = Monitor(sys.argv[1], rollouts=RolloutSample())
monitor.step(reward=1.0)
child = os.fork()
for _ in range(19):
    monitor.correct(-torch.ones(64, 100), -torch.ones(64, 100), torch.ones(64, 100))
    monitor.step(reward=10.0 if child == 0 else 2.0)
if child == 0:
    monitor.close()
    print("child", monitor.steps, monitor.flush(), flush=True)
else:
    print("parent", monitor.steps, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    assert os.path.exists(sys.argv[1] + "/run.lock"), "the child has taken the parent's lock"
"""


def test_an_unclosed_run_is_written_and_a_fork_adds_nothing(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    own = {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **own})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["child 20 False", "parent 20 0"]
    assert done.stderr.count("is a forked child: the Monitor of process") == 1

    rewards = [(metrics["step"], metrics["reward"]) for metrics in read_run(tmp_path).series]
    assert rewards == [(1, 1.0), *((step, 2.0) for step in range(2, 21))]
    assert len(list((tmp_path / "rollouts").iterdir())) == 19


def test_a_cancelled_sink_leaves_the_writer_alive(tmp_path):
    class Cancelled:
        def write(self, step, metrics):
            metrics.clear()  # of a copy: the line and other sinks keep their metrics
            if step == 2:
                raise asyncio.CancelledError

        def close(self):
            pass

    with Monitor(tmp_path / "run", sinks=[Cancelled()]) as monitor:
        for step in range(1, 5):
            monitor.step(x=step)
        assert monitor.flush()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["x"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_rollouts_that_cannot_be_copied_cost_no_line(tmp_path, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("out of memory")

    log_prob = torch.full((2, 3), -1.0)
    with Monitor(tmp_path / "run", rollouts=RolloutSample()) as monitor:
        monkeypatch.setattr(CollectedRollouts, "rows", no_memory)
        monitor.correct(log_prob, log_prob, torch.ones(2, 3))
        monitor.step(x=1.0)
    assert [json.loads(line)["x"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [1.0]
