"""A run directory that may not be read is named itself, and a named pipe is not waited for."""

import os
import threading
from contextlib import contextmanager, suppress

import pytest
from typer.testing import CliRunner

from rollcorr import Monitor, RolloutSample
from rollcorr.cli import app

torch = pytest.importorskip("torch")
NOBODY = 65_534


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    with Monitor(path, rollouts=RolloutSample()) as monitor:
        for step in range(2):
            sides = -torch.rand(2, 16, 20, generator=torch.Generator().manual_seed(step))
            monitor.correct(*sides, torch.ones(16, 20))
            monitor.step()
    return path


@contextmanager
def without_privileges():
    """The superuser reads everything, so somebody else must."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("command", "mode"),
    [(["report"], 0), (["check"], 0), (["watch", "--once"], 0), (["compare"], 0), (["check"], 0o444)],
)
def test_an_unreadable_run_directory_is_named_itself(run, command, mode):
    arguments = [command[0], str(run), *command[1:]]
    assert CliRunner().invoke(app, arguments).exit_code in (0, 1, 3)  # all is imported
    for folder in [run, *run.parents][:3]:
        folder.chmod(0o755)
    run.chmod(mode)
    try:
        with without_privileges():
            result = CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})
    finally:
        run.chmod(0o755)
    assert result.exit_code == 2, result.output
    assert f"{run}: it cannot be read (Permission denied)" in result.output
    assert "null.json" not in result.output


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "null.json"])
def test_a_pipe_in_a_run_is_not_waited_for(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for command in (["compare"], ["check"], ["watch", "--once"]):
        result = CliRunner().invoke(app, [command[0], str(run), *command[1:]])
        assert isinstance(result.exception, SystemExit | None), result.output


@pytest.mark.parametrize(
    "command",
    [["check", "LOG", "--null"], ["check", "LOG", "--config"], ["calibrate"], ["simulate"], ["convert-config"]],
)
def test_a_pipe_that_is_named_is_not_waited_for(run, tmp_path, command):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    arguments = [str(run) if text == "LOG" else text for text in command]

    # A command that opens the pipe waits for a writer. One comes later, so that such a command ends.
    opened = []

    def write():
        with suppress(OSError):  # nobody reads
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            opened.append(descriptor)
            os.close(descriptor)

    writer = threading.Timer(5.0, write)
    writer.start()
    result = CliRunner().invoke(app, [*arguments, str(pipe)], env={"COLUMNS": "500"})
    writer.cancel()
    assert not opened, "the command waited for a writer"
    assert result.exit_code == 2, result.output
    assert f"{pipe} is a named pipe" in result.output


def test_a_pipe_of_the_shell_is_read(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"algorithm: {rollout_is_threshold: 2.0, rollout_is: true, rollout_is_level: token}\n")
    os.close(writing)
    try:
        result = CliRunner().invoke(app, ["convert-config", f"/dev/fd/{reading}"])
    finally:
        os.close(reading)
    assert result.exit_code == 0, result.output
    assert "rollout_is: token" in result.output
