"""A killed engine leaves no process: the worker exits when its input ends, with the processes of vLLM."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from processes import eventually, is_gone

HANGING_VLLM = """
    import os, pathlib, subprocess, time

    class LLM:
        def __init__(self, **_):
            child = subprocess.Popen(["sleep", "600"])
            place = pathlib.Path(os.environ["PIDS"])
            place.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
            place.with_suffix(".part").rename(place)
            time.sleep(600)
"""
ENGINE = """
    import sys
    from rollcorr.engines.transport.pipes import WorkerProcess

    worker = WorkerProcess([sys.executable, "-m", "rollcorr.engines.vllm.worker_program"])
    worker.ask("start", timeout=600, engine_args={}, version=0)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_killed_engine_leaves_no_program(number, tmp_path):
    """Not even a worker that hangs and has started a child."""
    (tmp_path / "vllm.py").write_text(textwrap.dedent(HANGING_VLLM), encoding="utf-8")
    places = [str(tmp_path), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PIDS": str(tmp_path / "pids")}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(ENGINE)], env=env)
    while not (tmp_path / "pids").exists():
        assert process.poll() is None
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text(encoding="utf-8").split()]
    assert not any(map(is_gone, pids))

    process.send_signal(number)
    assert process.wait() == -number
    assert eventually(lambda: all(map(is_gone, pids)))
