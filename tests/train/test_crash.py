"""SIGKILL at any file event, and the same command again: a sample of `make test-crash`, and a test of its tool."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
OLD, NEW = "old " * 10, "new " * 10


def run(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def killed_writers(tmp_path_factory):
    program = run(Path(__file__).with_name("killed_writers.py"), tmp_path_factory.mktemp("writers"))
    if "cannot run here" in program.stderr:
        pytest.skip(program.stderr)
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout)


def test_a_durable_write_leaves_the_old_text_or_the_new_one_at_every_event(killed_writers):
    found = killed_writers["write_text_durably"]
    assert found["events"] == 5  # open, write, fsync, rename, fsync of the folder
    assert set(found["texts"]) == {OLD, NEW}
    assert found["files"] == [".file.txt.partial", "file.txt"]
    assert found["exit code on a full disk"] == errno.ENOSPC


def test_a_plain_write_is_caught_empty_and_torn(killed_writers):
    """Whoever writes in place loses the old text: the tool that kills sees it, so it would see it in a run."""
    found = killed_writers["plainly"]
    assert found["events"] == 2
    assert found["texts"] == [OLD, OLD, "", NEW[: len(NEW) // 2]]
    assert found["exit code on a full disk"] == errno.ENOSPC


def test_runs_that_were_killed_or_had_a_full_disk_end_as_if_nothing_had_happened():
    """The first, the middle and the last event of each recipe, a random time, and a disk of half the size."""
    program = run(
        PROJECT / "tools" / "crash" / "crash_runs.py",
        *("--runs", "grpo", "flow_grpo", "--points", 3, "--times", 1, "--levels", 1),
    )
    if program.returncode == 77:
        pytest.skip(program.stdout)
    assert program.returncode == 0, program.stdout + program.stderr
    assert "10 of 10 runs equal an uninterrupted one" in program.stdout
