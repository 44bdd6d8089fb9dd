"""Fixtures and hooks of all tests."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; 0 runs its kernels on a GPU

# Before anything imports numpy or torch, here and in the programs that tests start: on cores that are taken already,
# the threads of a matrix product spend most of their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from implementations import IMPLEMENTATIONS, Runs, under_test
from pairwise import parametrize_covering

from rollcorr.config import secrets

# Variables of a terminal, shell profile, CI runner or cluster launcher change what Rich, Typer and torch print or
# do. Typer reads some of it when a test imports it; the programs that tests start inherit the rest.
DISPLAY = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS", "TERMINAL_WIDTH")
DISPLAY += ("GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "_TYPER_FORCE_DISABLE_TERMINAL")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER += ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
for name in (*DISPLAY, *LAUNCHER):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm-256color"

# A job that a script starts with &, or under nohup, ignores Ctrl-C or hang-ups, and so would the programs of the tests.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# CTranslate2 multiplies int16 with Intel's MKL only, and needs this variable on other processors.
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


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets the number of torch threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


RAN_ON_TORCH = "ran on torch"
"""Property of a test: why "torch" ran where the test's id names another implementation."""

if "triton" in IMPLEMENTATIONS:
    # The interpreter computes with numpy, which reports infinities that a selection afterwards drops.
    np.seterr(all="ignore")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch) -> None:
    """Forget the secrets of earlier tests."""
    monkeypatch.setattr(secrets, "_hidden_values", {})


@pytest.fixture(scope="session")
def golden() -> dict:
    """Numbers from verl 0.9.1 and two older versions; tests/golden/README.md has their provenance."""
    return json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def ctrl_c_at_start(request):
    """Restore the default Ctrl-C handler: background jobs and their children ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Run the test on one implementation of the correction (tests/implementations.py: `per_implementation`)."""
    with under_test(request.param) as runs:
        yield runs
    assert runs.own or runs.others, "this test calls no correction, so it need not run once per implementation"
    for reason in runs.others:
        request.node.user_properties.append((RAN_ON_TORCH, f"{runs.name}: {reason}"))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the cases of tests with the mark `covering`."""
    parametrize_covering(metafunc)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give a worker whole files, and all files of a group: their fixtures are made once, and their imports paid once.

    xdist 3.8 hands out ten thousand tests one by one, which keeps a third process busy, and with pytest 9.2 it sees no
    groups: it appends them to an attribute that test ids no longer come from.
    """
    if config.getvalue("dist") != "loadgroup":
        return None

    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def group_of(path: str) -> str:
        found = re.search(r'xdist_group\("(\w+)"\)', (config.rootpath / path).read_text(encoding="utf-8"))
        return found[1] if found else path

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return FileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    """Look for no garbage meanwhile: nearly everything that is made, tests and modules, lives until the end."""
    gc.disable()
    result = yield
    gc.enable()
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Let Triton's interpreter do what numpy warns of, and a GPU does not: extremes of NaN; up to Triton 3.6, numbers
    from arrays of one element, which numpy refuses from 2.4 on (`make test-triton` has an older one for these)."""
    config.addinivalue_line("filterwarnings", "ignore:All-NaN (slice|axis) encountered:RuntimeWarning:triton")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning:triton")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report tests that ran on a different implementation than their id names."""
    instead: Counter[str] = Counter()
    # pytest files the reports of successful teardowns under no category.
    for report in terminalreporter.stats.get("", []):
        for key, value in report.user_properties if report.when == "teardown" else ():
            instead[value] += key == RAN_ON_TORCH
    if instead:
        terminalreporter.section("implementations")
    for reason, tests in sorted(instead.items()):
        terminalreporter.line(f"{tests} tests ran on 'torch' and not on {reason}")
