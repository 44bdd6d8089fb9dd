"""One process at a time in a run directory, for exactly as long as that process lives."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from processes import eventually

from rollcorr.run_directory.run_lock import RunInUseError, run_lock

HOLD = """
import os, signal, subprocess, sys
from pathlib import Path
from rollcorr.run_directory.run_lock import run_lock

with run_lock(Path(sys.argv[1])):
    child = {child}
    print(child, flush=True)
    signal.pause()
"""
NO_CHILD = "0"
FORKED = "os.fork() or signal.pause()"
EXECUTED = "subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid"


@pytest.fixture
def holder(tmp_path):
    """Start a process that locks `tmp_path / "run"`; return it, and the id of its child."""
    started, children = [], []

    def start(child=NO_CHILD):
        code = HOLD.format(child=child)
        process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
        started.append(process)
        children.append(int(process.stdout.readline()))
        return process, children[-1]

    yield start
    for process, child in zip(started, children, strict=True):
        process.kill()
        process.wait()
        process.stdout.close()
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_second_process_is_refused_and_told_who_has_the_lock(tmp_path, holder):
    process, _ = holder()
    with pytest.raises(RunInUseError) as refused, run_lock(tmp_path / "run"):
        pass
    assert f"in use by process {process.pid} on {socket.gethostname()}, which started at 20" in str(refused.value)
    assert json.loads((tmp_path / "run" / "run.lock").read_text(encoding="utf-8"))["pid"] == process.pid


def _can_be_taken(directory):
    try:
        with run_lock(directory):
            return True
    except RunInUseError:
        return False


@pytest.mark.parametrize("child", [NO_CHILD, FORKED, EXECUTED], ids=["alone", "forked child", "executed child"])
def test_the_lock_ends_with_a_killed_process_whatever_it_started(tmp_path, holder, child):
    process, _ = holder(child)
    process.kill()
    process.wait()
    assert (tmp_path / "run" / "run.lock").is_file()

    # A freshly forked child closes its copy with its first action.
    assert eventually(lambda: _can_be_taken(tmp_path / "run"))
    with run_lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / "run.lock").read_text(encoding="utf-8"))["pid"] == os.getpid()


def test_a_forked_child_does_not_end_the_lock_of_its_parent(tmp_path):
    with run_lock(tmp_path):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(RunInUseError), run_lock(tmp_path):
            pass


def test_the_same_process_cannot_hold_it_twice_and_may_take_it_again(tmp_path):
    for _ in range(2):
        with (
            run_lock(tmp_path),
            pytest.raises(RunInUseError, match="by this process: close the earlier"),
            run_lock(tmp_path),
        ):
            pass


def test_nothing_is_left_of_a_directory_that_was_made_for_the_lock_alone(tmp_path):
    with run_lock(tmp_path / "runs" / "new"):
        assert (tmp_path / "runs" / "new").is_dir()
    assert not (tmp_path / "runs" / "new").exists()
    with run_lock(tmp_path / "runs" / "used"):
        (tmp_path / "runs" / "used" / "file").touch()
    assert [path.name for path in (tmp_path / "runs" / "used").iterdir()] == ["file"]
    with run_lock(tmp_path / "runs"):
        pass
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_stale_file_never_blocks_whatever_it_says(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    with run_lock(tmp_path):
        (tmp_path / "run.lock").write_text(text)  # a holder that has not written its name yet
        with pytest.raises(RunInUseError), run_lock(tmp_path):
            pass
    assert not (tmp_path / "run.lock").exists()


def test_a_file_that_its_holder_removed_meanwhile_is_not_mistaken_for_the_lock(tmp_path, monkeypatch):
    real, calls = fcntl.flock, []

    def removed_before(handle, operation):
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / "run.lock").unlink()
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with run_lock(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / "run.lock").is_file()


def test_a_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with (
        pytest.warns(RuntimeWarning, match="cannot lock files .* nothing prevents a second process"),
        run_lock(tmp_path),
    ):
        pass


def test_a_name_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with run_lock(tmp_path), pytest.raises(RunInUseError, match="another process"), run_lock(tmp_path):
        pass
