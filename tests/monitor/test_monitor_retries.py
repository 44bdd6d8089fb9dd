"""A call that is refused leaves no trace: the caller may catch the error, correct the call, and go on."""

import logging

import pytest
import torch

from rollcorr import Monitor, RolloutSample

MASK = torch.ones(4, 6, dtype=torch.bool)
OLD = -torch.rand(4, 6, generator=torch.Generator().manual_seed(0))


def batch(**columns):
    return (OLD, OLD + 0.01, MASK), {"columns": columns}


def test_a_batch_that_is_refused_is_not_counted(tmp_path):
    with Monitor(tmp_path / "run", rollouts=RolloutSample()) as monitor:
        for wrong in ({"group_id": ["a"] * 3}, {"gid": ["a"] * 4}):
            given, columns = batch(**wrong)
            with pytest.raises(ValueError, match=r"group_id|gid"):
                monitor.correct(*given, **columns)
        given, columns = batch(group_id=["a"] * 4)
        monitor.correct(*given, **columns)
        metrics = monitor.step(reward=[1.0] * 4)
    assert metrics["rollout_corr/sequence_count"] == 4


def test_an_unknown_column_is_refused_also_on_a_step_that_is_not_logged(tmp_path):
    with Monitor(tmp_path / "run", rollouts=RolloutSample(every=100)) as monitor:
        given, columns = batch(gid=["a"] * 4)
        with pytest.raises(ValueError, match="gid"):
            monitor.correct(*given, **columns)


def test_a_step_that_failed_can_be_ended_again(tmp_path):
    with Monitor(tmp_path / "run", rollouts=RolloutSample()) as monitor:
        monitor.correct(OLD, OLD + 0.01, MASK)
        with pytest.raises(ValueError, match="4 sequences"):
            monitor.step(reward=[1.0] * 3, loss=2.0)
        metrics = monitor.step(reward=[1.0] * 4, loss=1.0)
    assert (metrics["reward/mean"], metrics["loss"], monitor.steps) == (1.0, 1.0, 1)


def test_steps_that_a_start_drops_are_named(tmp_path, caplog):
    with Monitor(tmp_path / "run") as monitor:
        for _ in range(3):
            monitor.correct(OLD, OLD + 0.01, MASK)
            monitor.step()
    with caplog.at_level(logging.WARNING, logger="rollcorr.monitor"), Monitor(tmp_path / "run", start=1) as monitor:
        assert monitor.steps == 1
    assert "the steps 2 to 3 were logged after step 1" in caplog.text


def test_a_resume_drops_later_logs_of_every_rank(tmp_path):
    """A run of four ranks goes on with one, which writes no logs."""
    with Monitor(tmp_path) as monitor:
        for _ in range(3):
            monitor.step()
    logs = [monitor.directory.rollout_log(step, rank) for step in (1, 2, 3) for rank in range(4)]
    monitor.directory.rollouts.mkdir()
    for log in logs:
        log.touch()
    with Monitor(tmp_path, start=2):
        assert sorted(monitor.directory.rollouts.iterdir()) == sorted(logs[:8])
