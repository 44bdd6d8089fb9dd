"""What several tests share."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; 0 runs its kernels on a GPU

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(int(os.environ.get("ROLLCORR_TEST_THREADS", "1")))

settings.register_profile("rollcorr", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI")))
settings.register_profile("slow", settings.get_profile("rollcorr"), max_examples=10_000)  # make test-slow
settings.load_profile("rollcorr")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden() -> dict:
    """Numbers from verl 0.9.1 and two older versions; tests/golden/README.md has their provenance."""
    return json.loads((GOLDEN / "golden.json").read_text())
