"""A run directory that may not be read is named itself, and a pipe in one is not waited for."""

import os
from contextlib import contextmanager

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
    for command in ("compare", "check"):
        result = CliRunner().invoke(app, [command, str(run)])
        assert isinstance(result.exception, SystemExit | None), result.output
