"""Helpers for tests of real processes: run programs, start ranks, check whether one runs, wait for a condition."""

import atexit
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.multiprocessing as mp

PATIENCE = 120.0
"""Seconds until a test stops waiting for what must happen: a busy machine may take that long to start Python."""


PRELOADED = ["torch.distributed.fsdp", "rollcorr.monitor", "rollcorr.diffusion", "rollcorr.train.grpo.grpo_trainer"]
PRELOADED += ["rollcorr.engines.transformers", "transformers.models.llama"]


def start_ranks(run, path, size, *rest):
    """Run run(rank, path, *rest) in this many processes. They fork from a server that has imported torch once."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(run, args=(str(path), *rest), nprocs=size, start_method="forkserver")


@functools.cache
def _forking_server():
    command = [sys.executable, Path(__file__).with_name("forking_server.py")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, server)
    return server


def _end(server):
    server.kill()
    server.communicate()


def run_python(program, *arguments, cwd=".", env=None, strict=False, timeout=600):
    """Run a file, or the text of `python -c`, in a child of a server that has imported torch once, and nothing of ours.

    For programs that do not read stdin, and whose start is not what the test is about: importing torch takes two
    seconds, longer than most of them run.

    Args:
        program: path of a file, or code.
        env: the variables of the child; None for those of this process.
        strict: make warnings errors, as `python -W error` does.
        timeout: seconds until the child is ended, by SIGALRM.
    """
    file = isinstance(program, Path)
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        request = {
            "code": program.read_text(encoding="utf-8") if file else program,
            "arguments": [str(program) if file else "-c", *map(str, arguments)],
            "folder": str(program.parent) if file else "",
            "cwd": str(Path(cwd).absolute()),
            "environment": dict(os.environ if env is None else env),
            "stdout": stdout.name,
            "stderr": stderr.name,
            "strict": strict,
            "timeout": timeout,
        }
        server = _forking_server()
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        shown = [Path(file.name).read_text(encoding="utf-8") for file in (stdout, stderr)]
    return subprocess.CompletedProcess(request["arguments"], code, *shown)


def environment_of_package():
    """Return this process's variables without src/: leftovers of an older build there would hide our entry points."""
    source = str(Path(__file__).parents[1] / "src")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != source]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def is_gone(pid):
    """Return whether a process has ended; zombies have ended."""
    status = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def eventually(holds):
    """Wait for a condition and return its last value."""
    limit = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < limit:
        time.sleep(0.02)
    return holds()
