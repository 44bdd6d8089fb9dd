"""SIGKILL or a power loss at any file event, and the same command again: a sample of `make test-crash`; its tools."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "tools" / "crash"))

from planted_bugs import BUGS, PACKAGE  # noqa: E402

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
    """Writing in place loses the old text: the kill tool finds it, so it would find it in a run."""
    found = killed_writers["plainly"]
    assert found["events"] == 2
    assert found["texts"] == [OLD, OLD, "", NEW[: len(NEW) // 2]]
    assert found["exit code on a full disk"] == errno.ENOSPC


def test_a_power_loss_keeps_what_was_flushed(killed_writers):
    """Before the rename is flushed the old text comes back; the five events and the end."""
    assert killed_writers["write_text_durably"]["without power"] == [OLD] * 5 + [NEW]


@pytest.mark.parametrize(
    ("bug", "left"),
    [
        ("no_fsync_file", [*[OLD] * 4, ""]),  # a name without its content
        ("no_fsync_folder", [OLD] * 5),  # a text that was saved, and is not there
        ("text_in_place", [OLD, *[""] * 2, NEW, NEW, NEW]),
    ],
)
def test_a_power_loss_finds_what_was_not_flushed(killed_writers, bug, left):
    assert killed_writers[bug]["without power"] == left


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_still_apply(name):
    """`make test-crash-bugs` plants them in runs; a change of the code that they edit must write them anew."""
    bug = BUGS[name]
    compile(bug.planted((PACKAGE / bug.file).read_text(encoding="utf-8"), name), bug.file, "exec")


def test_a_planted_bug_without_its_text_is_reported():
    with pytest.raises(ValueError, match="this planted bug no longer applies: no_fsync_file"):
        BUGS["no_fsync_file"].planted("pass", "no_fsync_file")


def test_killed_and_full_disk_runs_end_like_others():
    """The first, the middle and the last event, a power loss, a random time, and a disk of half the size."""
    program = run(
        PROJECT / "tools" / "crash" / "crash_runs.py",
        *("--runs", "grpo_skipping", "flow_grpo", "--kinds", "kill", "power", "time", "disk"),
        *("--points", 3, "--times", 1, "--levels", 1),
    )
    if program.returncode == 77:
        pytest.skip(program.stdout)
    assert program.returncode == 0, program.stdout + program.stderr
    assert "12 of 12 runs equal an uninterrupted one" in program.stdout
