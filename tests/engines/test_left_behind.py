"""What an engine's process leaves when it is killed: no program, and no folder after the next start."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from processes import eventually, is_gone

from rollcorr.engines.transport import owned_folders
from rollcorr.engines.transport.owned_folders import OwnedFolder, remove_abandoned_folders

# A program that ignores the end of its input, and what it has started.
STUBBORN = """
    import json, os, subprocess, sys, time
    child = subprocess.Popen(["sleep", "600"])
    question = json.loads(sys.stdin.readline())
    print(json.dumps({"id": question["id"], "pids": [os.getpid(), child.pid]}), flush=True)
    time.sleep(600)
"""
ENGINE = """
    import sys, time
    from rollcorr.engines.transport.owned_folders import OwnedFolder
    from rollcorr.engines.transport.pipes import WorkerProcess

    folder = OwnedFolder("vllm")
    (folder.path / "model.safetensors").write_bytes(bytes(1000))
    program = [sys.executable, "-S", "-c", sys.argv[1]]
    workers = [WorkerProcess(program, folder=folder.path if "guarded" in sys.argv else None) for _ in range(2)]
    pids = [pid for worker in workers for pid in worker.ask("start", timeout=600)["pids"]]
    pids += [worker.pid for worker in workers]
    print(folder.path, *pids, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary directory of this test's own, for the programs that it starts too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start_engine(*arguments):
    """A process with two workers: the process, its folder, and every process that it has started."""
    program = [sys.executable, "-c", textwrap.dedent(ENGINE), textwrap.dedent(STUBBORN), *arguments]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    folder, *pids = process.stdout.readline().split()
    process.stdout.close()
    assert len(pids) == 6
    assert not any(is_gone(int(pid)) for pid in pids)
    return process, Path(folder), [int(pid) for pid in pids]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_killed_engine_leaves_no_program_even_one_that_hangs_and_has_started_another(temporary, number):
    process, folder, pids = start_engine()
    process.send_signal(number)
    assert process.wait() == -number
    assert eventually(lambda: all(map(is_gone, pids)))

    # The next start finds the folder, whose owner is dead.
    assert (folder / "model.safetensors").is_file()
    with OwnedFolder("weights") as mine:
        assert [path.name for path in temporary.iterdir()] == [mine.name]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_the_guard_removes_the_folder_of_a_killed_engine_at_once(temporary, number):
    process, folder, pids = start_engine("guarded")
    process.send_signal(number)
    process.wait()
    assert eventually(lambda: not folder.exists())
    assert eventually(lambda: all(map(is_gone, pids)))
    assert not list(temporary.iterdir())


def test_a_killed_guard_takes_its_program_along(temporary):
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux ends a process when its parent dies")
    process, _, pids = start_engine()
    os.kill(pids[-1], signal.SIGKILL)
    assert eventually(lambda: is_gone(pids[2]))
    process.kill()
    process.wait()
    os.kill(pids[3], signal.SIGKILL)  # what the program had started is nobody's now
    assert eventually(lambda: all(map(is_gone, pids)))


def test_a_folder_goes_with_its_block_its_object_or_its_process(temporary):
    with OwnedFolder("weights") as path:
        assert path.is_dir()
    assert not path.exists()

    folder = OwnedFolder("weights")
    path = folder.path
    del folder
    assert not path.exists()

    code = "from rollcorr.engines.transport.owned_folders import OwnedFolder as F; f = F('weights'); print(f.path)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == temporary
    assert not list(temporary.iterdir())


def test_the_next_start_leaves_alone_what_is_not_abandoned(temporary, monkeypatch):
    """A living process's folder, another host's, one that is no folder, a link, and names that only look similar."""
    held = OwnedFolder("vllm")
    host = owned_folders._host()
    (temporary / "rollcorr-vllm_another-host_1_abc").mkdir()
    (temporary / f"rollcorr-vllm_{host}_1_file").write_text("text", encoding="utf-8")
    (temporary / "kept").mkdir()
    (temporary / f"rollcorr-vllm_{host}_1_link").symlink_to(temporary / "kept")
    (temporary / "rollcorr-vllm-1_2_3").mkdir()
    before = sorted(temporary.iterdir())

    abandoned = temporary / f"rollcorr-vllm_{host}_{os.getpid()}_abc"  # its number was used again
    abandoned.mkdir()
    assert remove_abandoned_folders() == [abandoned]
    assert sorted(temporary.iterdir()) == before

    abandoned.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: abandoned.stat().st_uid + 1)
    assert remove_abandoned_folders() == []
    assert held.path.is_dir()


def test_an_owner_whose_folder_was_removed_before_it_was_locked_makes_another(temporary, monkeypatch):
    made = []

    def make(prefix):
        path = temporary / f"{prefix}{len(made)}"
        path.mkdir()
        made.append(path)
        if len(made) == 1:
            assert remove_abandoned_folders() == [path]
            path.mkdir()
            descriptor = os.open(path, os.O_RDONLY)
            path.rmdir()
            monkeypatch.setattr(os, "open", lambda *_: descriptor)
        else:
            monkeypatch.undo()
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    with OwnedFolder("vllm") as path:
        assert path == made[1]


def test_an_owner_whose_folder_was_removed_before_it_was_opened_makes_another(temporary, monkeypatch):
    made = []

    def make(prefix):
        path = temporary / f"{prefix}{len(made)}"
        path.mkdir()
        made.append(path)
        if len(made) == 1:
            assert remove_abandoned_folders() == [path]
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    with OwnedFolder("vllm") as path:
        assert path == made[1]


def test_a_forked_child_does_not_remove_its_parents_folder(temporary):
    folder = OwnedFolder("vllm")
    child = os.fork()
    if not child:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()


def test_a_kind_that_would_change_the_name_is_refused(temporary):
    with pytest.raises(ValueError, match="lower-case letters and digits, got 'a/b'"):
        OwnedFolder("a/b")
