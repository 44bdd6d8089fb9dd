"""One launch of a Triton kernel, as data: run it on a device, or compile it without one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Launch(NamedTuple):
    """One kernel launch.

    Attributes:
        kernel: the Triton function.
        grid: programs in each dimension.
        arguments: run-time arguments, by name.
        constants: compile-time constants, by name.
        warps: warps of a program.
        registers: optional; the maximum per thread on NVIDIA's hardware, by the first number of the compute capability.
            By default, and for a number that is not listed, the assembler decides.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int = 4
    registers: Mapping[int, int] | None = None

    def limits(self, generation: int) -> dict[str, int]:
        """Return options that only NVIDIA's compiler has, for GPUs of compute capability `generation`.x."""
        most = (self.registers or {}).get(generation)
        return {} if most is None else {"maxnreg": most}

    def run(self, **options: Any) -> None:  # noqa: ANN401 (Triton's own options)
        """Launch the kernel on the device of its arguments; returns at once without programs."""
        if 0 in self.grid:
            return
        device = next(x.device for x in self.arguments.values() if isinstance(x, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            limits = {}
            if self.registers and device.type == "cuda" and torch.version.hip is None:
                limits = self.limits(torch.cuda.get_device_capability(device)[0])
            self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.warps, **limits, **options)
