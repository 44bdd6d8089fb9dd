"""A failing disk or tracker, the end of a program, a fork: none of them disturbs a training step."""

from __future__ import annotations

import asyncio
import errno
import json

import pytest
import torch
from fault_cases import STEPS, faults_of, run_on
from faulty_disk import ERRORS, Faults, faulty_disk
from processes import run_python
from recording_sinks import Recording

from rollcorr import Monitor, RolloutCorrectionConfig, RolloutSample, read_run
from rollcorr.monitor import rollout_sample, run_writer
from rollcorr.run_directory import read_metrics
from rollcorr.run_directory.sinks import JsonLines

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


def test_flush_tries_what_failed_once_more(tmp_path, monkeypatch):
    """As often in every run, however the threads take turns."""
    attempts = []

    def failing(_, step, metrics):
        attempts.append(step)
        raise OSError(errno.EIO, "Input/output error")

    with Monitor(tmp_path) as monitor:
        monkeypatch.setattr(JsonLines, "write", failing)
        for step in range(1, 21):
            monitor.step()
            assert not monitor.flush()
            assert len(attempts) == 2 * step
        monkeypatch.undo()


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
    done = run_python(PROGRAM, tmp_path)
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
        monkeypatch.setattr(rollout_sample.CollectedRollouts, "task", no_memory)
        monitor.correct(log_prob, log_prob, torch.ones(2, 3))
        monitor.step(x=1.0)
    assert [json.loads(line)["x"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [1.0]


def test_a_line_is_written_without_its_rows(tmp_path, monkeypatch):
    write, is_full = rollout_sample.write_rows, [True]

    def writing(*arguments):
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(rollout_sample, "write_rows", writing)
    with Monitor(tmp_path, rollouts=RolloutSample()) as monitor:
        monitor.correct(-torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3))
        monitor.step(x=1.0)
        assert not monitor.flush()
        assert [metrics["x"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]
        is_full[0] = False
        assert monitor.flush(), "the rows are tried again"
    assert [path.stem for path in (tmp_path / "rollouts").iterdir()] == ["step_000001"]


def test_only_the_newest_configuration_waits(tmp_path, caplog):
    faults = Faults(errno.EIO, 1, 10**9)
    with faulty_disk(tmp_path, faults), Monitor(tmp_path) as monitor:
        faults.happen = True
        for threshold in (2.0, 3.0, 4.0, 5.0):
            monitor.use_config(RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold))
            assert not monitor.flush()
        monitor.close()
        assert "not written: config.yaml (1)" in caplog.text


def test_a_closed_monitor_logs_once_that_it_does_not_write(tmp_path, caplog):
    sink = Recording()
    monitor = Monitor(tmp_path, sinks=[sink])
    monitor.step(reward=1.0)
    monitor.close()
    for _ in range(2):
        assert monitor.step(reward=2.0) == {"reward": 2.0}
        monitor.close()
    assert caplog.text.count("this Monitor is closed: make another one, with start=N") == 1
    assert [metrics["reward"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]
    assert sink.steps == [1, "closed"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_a_strict_monitor_ends_no_program(tmp_path, error):
    class Leaving(Recording):
        def write(self, step, metrics):
            raise error

    with Monitor(tmp_path, sinks=[Leaving()], strict=True) as monitor:
        with pytest.raises(RuntimeError, match=f"step 1: a sink raised {type(error).__name__}"):
            monitor.step(reward=1.0)
        assert monitor.steps == 1
