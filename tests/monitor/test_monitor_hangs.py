"""A file or a tracker that hangs: no step waits for it, and no other file does. Events stand for servers and disks."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from rollcorr import Monitor, RolloutCorrectionConfig, RolloutSample, read_run
from rollcorr.monitor import rollout_sample, run_writer
from rollcorr.run_directory import read_metrics
from rollcorr.run_directory.run_lock import RunInUseError
from rollcorr.run_directory.sinks import JsonLines


class Hanging:
    """A call, or a sink, that waits for an event."""

    def __init__(self, *, closing=False):
        self.event, self.entered = threading.Event(), threading.Event()
        self.steps, self._in_close = [], closing

    def wrap(self, call):
        def waiting(*arguments):
            self.entered.set()
            assert self.event.wait(60)
            return call(*arguments)

        return waiting

    def write(self, step, metrics):
        self._wait(not self._in_close)
        self.steps.append(step)

    def close(self):
        self._wait(self._in_close)
        self.steps.append("closed")

    def _wait(self, here):
        if here:
            self.entered.set()
            self.event.wait(60)


def give_up_soon(writer):
    """Make the waits for a thread that hangs short. Other threads have their half minute."""
    writer.close, writer.flush = partial(writer.close, 0.1), partial(writer.flush, 0.1)


def measured(monitor):
    monitor.correct(-torch.ones(4, 10), -torch.ones(4, 10), torch.ones(4, 10))


@pytest.mark.parametrize("place", ["the file", "the rollout log", "a sink"])
def test_step_returns_while_its_files_hang(tmp_path, monkeypatch, place):
    hanging = Hanging()
    if place == "the file":
        monkeypatch.setattr(JsonLines, "write", hanging.wrap(JsonLines.write))
    if place == "the rollout log":
        monkeypatch.setattr(rollout_sample, "write_rows", hanging.wrap(rollout_sample.write_rows))
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
    monkeypatch.setattr(rollout_sample, "write_rows", hanging.wrap(rollout_sample.write_rows))
    monkeypatch.setattr(run_writer, "LOG_BYTES", 2 * 4 * 4 * 10 + 8 * 4 + 100)  # one step, not two
    with Monitor(tmp_path, rollouts=RolloutSample()) as monitor:
        for _ in range(5):
            measured(monitor)
            metrics = monitor.step(reward=torch.ones(4))
            assert hanging.entered.wait(60)
        assert metrics["monitor/lost_rollout_logs"] == 2
        hanging.event.set()
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert sorted(path.stem for path in (tmp_path / "rollouts").iterdir()) == ["step_000001", "step_000005"]
    assert caplog.text.count("is lost for the rollout log: too much waits to be written") == 1


def test_a_hanging_sink_delays_no_file(tmp_path, monkeypatch):
    hanging, written = Hanging(), threading.Event()
    write = JsonLines.write

    def telling(file, step, metrics):
        write(file, step, metrics)
        if step == 3:
            written.set()

    monkeypatch.setattr(JsonLines, "write", telling)
    with Monitor(tmp_path, sinks=[hanging], rollouts=RolloutSample()) as monitor:
        monitor.step()
        assert hanging.entered.wait(60)
        monitor.use_config(RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=7.0))
        for _ in range(2):
            measured(monitor)
            monitor.step()
        try:
            assert written.wait(20)
            assert [metrics["step"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
            assert len(list((tmp_path / "rollouts").iterdir())) == 2
            assert read_run(tmp_path).config.rollout_is_threshold == 7.0
            assert hanging.steps == []
        finally:
            hanging.event.set()


def test_steps_that_a_hanging_sink_holds_are_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_writer, "FULL_QUEUE", 4)
    hanging = Hanging()
    with Monitor(tmp_path, sinks=[hanging]) as monitor:
        try:
            for _ in range(8):
                metrics = monitor.step()
                assert hanging.entered.wait(60)
            assert metrics["monitor/lost_sink_steps"] == 4
        finally:
            hanging.event.set()
    assert hanging.steps == [1, 7, 8, "closed"]
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 9)]
    assert caplog.text.count("is lost for the sinks: too much waits to be written") == 1


def test_a_strict_monitor_names_what_hangs(tmp_path):
    hanging = Hanging()
    with Monitor(tmp_path, sinks=[hanging], strict=True) as monitor:
        give_up_soon(monitor._trackers)
        try:
            with pytest.raises(TimeoutError, match=r"step 1: not written within 30 s: the sinks \(1\)"):
                monitor.step()
        finally:
            hanging.event.set()


# --- The end of a Monitor ---------------------------------------------------------------------------------------------


def test_closing_gives_up_a_hanging_sink(tmp_path, caplog):
    """The lock goes back, and the sink gets no further steps."""
    hanging = Hanging()
    monitor = Monitor(tmp_path, sinks=[hanging])
    monitor.step(reward=1.0)
    assert hanging.entered.wait(60)
    monitor.step(reward=2.0)
    give_up_soon(monitor._trackers)
    monitor.close()
    assert not (tmp_path / "run.lock").exists()
    assert "not written: the sinks (2)" in caplog.text
    hanging.event.set()
    monitor._trackers._thread.join(60)
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert hanging.steps == [1, "closed"]


def test_a_hanging_write_keeps_the_lock_until_it_ends(tmp_path, monkeypatch):
    """A later process must not write into the same file."""
    hanging = Hanging()
    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", hanging.wrap(JsonLines.write))
        monitor = Monitor(tmp_path)
        monitor.step(reward=1.0)
        assert hanging.entered.wait(60)
        monitor.step(reward=2.0)
        give_up_soon(monitor._files)
        monitor.close()
    try:
        with pytest.raises(RunInUseError):
            Monitor(tmp_path, start=0)
    finally:
        hanging.event.set()
    monitor._files._thread.join(60)
    with Monitor(tmp_path, start=1) as monitor:
        monitor.step(reward=3.0)
    assert [metrics["reward"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 3.0]


def test_closing_waits_a_limited_time_for_a_tracker(tmp_path, caplog):
    hanging = Hanging(closing=True)
    monitor = Monitor(tmp_path, sinks=[hanging])
    monitor.step()
    assert monitor.flush()
    give_up_soon(monitor._trackers)
    monitor.close()
    try:
        assert hanging.steps == [1]
        assert "a sink or a file is not closed after 0.1 seconds" in caplog.text
        assert not (tmp_path / "run.lock").exists()
    finally:
        hanging.event.set()
