"""The Triton kernels of log-probs without logits compile for GPUs that are not here, without a spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_triton_compile import SPILLS

SCRIPT = Path(__file__).with_name("triton_linear_compilation.py")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def test_no_register_spills(target):
    """Five kernels in float32 and bfloat16, with and without entropy and bias."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, SCRIPT, target], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 5 * 4
    for kernel in kernels:
        assert not any(kernel[name] for name in SPILLS[target.partition(":")[0]]), kernel
        if target.startswith("cuda") and kernel["kernel"] in ("absorb", "to_gradient"):
            assert kernel["vector_loads"] >= 1, kernel
