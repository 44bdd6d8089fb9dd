"""What several tests share."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; 0 runs its kernels on a GPU

import numpy as np
import pytest
import torch
from hypothesis import settings
from implementations import IMPLEMENTATIONS, Runs, under_test

torch.set_num_threads(int(os.environ.get("ROLLCORR_TEST_THREADS", "1")))

settings.register_profile("rollcorr", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI")))
settings.register_profile("slow", settings.get_profile("rollcorr"), max_examples=10_000)  # make test-slow
settings.load_profile("rollcorr")

RAN_ON_TORCH = "ran on torch"
"""Property of a test: why "torch" ran where the test's id names another implementation."""

if "triton" in IMPLEMENTATIONS:
    # The interpreter computes with numpy, which reports infinities that a selection afterwards drops.
    np.seterr(all="ignore")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden() -> dict:
    """Numbers from verl 0.9.1 and two older versions; tests/golden/README.md has their provenance."""
    return json.loads((GOLDEN / "golden.json").read_text())


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Run the test on one implementation of the correction (tests/implementations.py: `per_implementation`)."""
    with under_test(request.param) as runs:
        yield runs
    assert runs.own or runs.others, "this test calls no correction, so it need not run once per implementation"
    for reason in runs.others:
        request.node.user_properties.append((RAN_ON_TORCH, f"{runs.name}: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where another implementation ran than the one that the test's id names."""
    instead: Counter[str] = Counter()
    # pytest files the reports of successful teardowns under no category.
    for report in terminalreporter.stats.get("", []):
        for key, value in report.user_properties if report.when == "teardown" else ():
            instead[value] += key == RAN_ON_TORCH
    if instead:
        terminalreporter.section("implementations")
    for reason, tests in sorted(instead.items()):
        terminalreporter.line(f"{tests} tests ran on 'torch' and not on {reason}")
