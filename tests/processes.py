"""Helpers for tests of real processes: start ranks, check whether a process runs, and wait for a condition."""

import multiprocessing
import os
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
