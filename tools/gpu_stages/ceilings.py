"""Stage 0: what the device can do at best. Everything else is held against this."""

from __future__ import annotations

import torch

from gpu_stages import Plan
from gpu_stages.recorder import Rows
from gpu_stages.timing import measured

BYTES_PER_TOKEN = 14
"""Two float32 log-probs and a bool in; a float32 weight and a bool out."""


def run(plan: Plan, rows: Rows) -> None:
    """Copies of the bytes of a correction, a matrix product, and launches of nothing."""
    sizes = [65_536, 1 << 20] if plan.quick else [65_536, 1 << 20, 1 << 22, 1 << 23, 1 << 25, 1 << 27]
    for tokens in sizes:
        source = torch.ones(BYTES_PER_TOKEN * tokens // 2, dtype=torch.uint8, device=plan.device)
        target = torch.empty_like(source)
        found = measured(lambda target=target, source=source: target.copy_(source), plan.device)
        rows.add(
            f"copy, {tokens:,} tokens", tokens=tokens, **found, bytes_per_second=2 * len(source) / float(found["min"])
        )

    size, dtype = (256, torch.float32) if plan.device == "cpu" else (8192, torch.bfloat16)
    left, right = (torch.randn(size, size, device=plan.device, dtype=dtype) for _ in range(2))
    found = measured(lambda: left @ right, plan.device)
    rows.add(f"matrix product of {size}³, {dtype}", **found, flop_per_second=2 * size**3 / float(found["min"]))

    one = torch.zeros(1, device=plan.device)

    def launches() -> None:
        for _ in range(100):
            one.add_(1)

    found = measured(launches, plan.device)
    rows.add(
        "launch of one addition, one of 100",
        **{name: value / 100 if name != "runs" else value for name, value in found.items()},
    )  # type: ignore[operator]
