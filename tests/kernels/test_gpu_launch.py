"""A launch asks the GPU at hand for no more registers than were measured for its generation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rollcorr.kernels.gpu_launch import Launch


class Recorder:
    """Replace a Triton kernel and record its launch arguments."""

    def __getitem__(self, grid):
        return lambda **options: self.__dict__.update(options)


def launched_on(device, monkeypatch, capability=(9, 0), **fields):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    kernel = Recorder()
    with FakeTensorMode():
        x = torch.empty(4, device=device)
    Launch(kernel, (1,), {"x": x}, {"SIZE": 4}, warps=1, **fields).run(enable_fp_fusion=True)
    assert kernel.x is x
    assert (kernel.SIZE, kernel.num_warps, kernel.enable_fp_fusion) == (4, 1, True)
    return getattr(kernel, "maxnreg", None)


@pytest.mark.parametrize(("capability", "most"), [((8, 9), 128), ((9, 0), 136), ((10, 0), None)])
def test_registers_are_limited_by_generation(monkeypatch, capability, most):
    assert launched_on("cuda", monkeypatch, capability, registers={8: 128, 9: 136}) == most


def test_a_launch_without_limits_leaves_registers_to_the_assembler(monkeypatch):
    assert launched_on("cuda", monkeypatch) is None


def test_only_nvidia_hardware_is_told_of_registers(monkeypatch):
    assert launched_on("cpu", monkeypatch, registers={9: 136}) is None
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert launched_on("cuda", monkeypatch, registers={9: 136}) is None
