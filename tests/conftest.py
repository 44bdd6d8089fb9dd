"""What several tests share."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; 0 runs its kernels on a GPU

import pytest
import torch
from hypothesis import HealthCheck, settings

# What a terminal, a shell profile, a CI runner or a cluster's launcher sets changes what Rich, Typer and torch print or
# do. Typer reads some of it when a test imports it; the programs that tests start inherit the rest.
DISPLAY = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS", "TERMINAL_WIDTH")
DISPLAY += ("GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "_TYPER_FORCE_DISABLE_TERMINAL")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
for name in (*DISPLAY, *LAUNCHER):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm-256color"

# CTranslate2 multiplies int16 with Intel's MKL alone, which it uses on other makers' processors only when asked.
os.environ.setdefault("CT2_USE_MKL", "1")

# pyproject.toml puts src/ before everything else for this process. The programs that tests start must find this
# checkout too, and not a copy that is installed.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))

torch.set_num_threads(int(os.environ.get("ROLLCORR_TEST_THREADS", "1")))

# The same examples everywhere, and no limit that a busy machine can miss. `make test-slow` looks for new ones.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("rollcorr", max_examples=40, derandomize=True, **PATIENT)
settings.register_profile("slow", max_examples=10_000, derandomize=False, **PATIENT)
settings.load_profile("rollcorr")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden() -> dict:
    """Numbers from verl 0.9.1 and two older versions; tests/golden/README.md has their provenance."""
    return json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def ctrl_c_at_start(request):
    """What Ctrl-C does before the test: a job that a script starts with & ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)
