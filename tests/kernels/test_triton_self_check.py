"""The check that decides whether `impl="auto"` uses the Triton kernels, on the interpreted kernels themselves."""

from __future__ import annotations

import pytest
import torch

from rollcorr.kernels.correction.triton import self_check, status
from rollcorr.kernels.correction.triton.self_check import Verdict

pytest.importorskip("triton", reason="Triton is not installed; `make test-triton` installs it")
if status() is not None:
    pytest.skip(str(status()), allow_module_level=True)

from rollcorr.kernels.gpu_launch import Launch

# The interpreter computes with numpy, which reports infinities that a selection afterwards drops.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow
def test_the_kernels_agree_with_torch_on_every_probe():
    assert self_check.check_kernels(DEVICE) == Verdict(True)


def run_launches(monkeypatch, change):
    """From now on `change(launch, run)` runs each launch."""
    original = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self, **options: change(self, lambda: original(self, **options)))


def name_of(launch):
    return launch.kernel.fn.__name__


def write_a_wrong_weight(launch, run):
    run()
    if name_of(launch) == "read_tokens":
        launch.arguments["weights"].view(-1)[100] += 0.5


def add_one_sequence_too_few(launch, run):
    if name_of(launch) == "finish":
        launch.arguments["sets"] -= 1
    run()


def fail_to_compile(launch, run):
    raise RuntimeError("Internal Triton PTX codegen error")


@pytest.mark.parametrize(
    ("sabotage", "reason"),
    [
        (write_a_wrong_weight, "weights differ at 1 of"),
        (add_one_sequence_too_few, "by torch"),
        (fail_to_compile, "RuntimeError: Internal Triton PTX codegen error"),
    ],
)
def test_a_sabotaged_kernel_is_found(monkeypatch, sabotage, reason):
    monkeypatch.setattr(self_check, "PROBES", self_check.PROBES[:1])
    run_launches(monkeypatch, sabotage)
    verdict = self_check.check_kernels(DEVICE)
    assert not verdict.agrees
    assert reason in verdict.reason
