"""Stage 3: the correction, from 65 thousand to 134 million tokens, in each layout, against its peers and a copy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

from gpu_stages import Plan
from gpu_stages.batches import STANDARD, Batch, make_batch
from gpu_stages.ceilings import BYTES_PER_TOKEN
from gpu_stages.recorder import Rows
from gpu_stages.timing import measured

SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 23, 1 << 25, 1 << 27)
QUICK_SIZES = (1 << 12, 1 << 14)
LAST_SECONDS = 100
"""After so long only the contender of this library goes on: the others were seen on the smaller sizes."""


def run(plan: Plan, rows: Rows) -> None:
    """Token weights and one sequence criterion, metrics left on the device unless a name says otherwise."""
    warnings.simplefilter("ignore")
    started = time.monotonic()
    for tokens in QUICK_SIZES if plan.quick else SIZES:
        for layout in ("dense", "padded", "packed"):
            batch = make_batch(tokens, layout, plan.device)
            for name, prepare in contenders(plan).items():
                if name not in ("triton", "copy") and time.monotonic() - started > LAST_SECONDS:
                    continue
                # Tracing takes seconds for each new shape, and a dry run asks only whether it works.
                if plan.quick and name == "compiled" and (tokens, layout) != (QUICK_SIZES[0], "dense"):
                    continue
                shape = {"tokens": tokens, "layout": layout, "contender": name}
                rows.attempt(
                    f"{tokens:,} tokens, {layout}, {name}",
                    lambda prepare=prepare, batch=batch, shape=shape: (
                        shape | measured(prepare(batch), plan.device, seconds=0.05 if plan.quick else 0.25)
                    ),
                    required=name in ("triton", "torch", "cpu"),
                )


def contenders(plan: Plan) -> dict[str, Callable[[Batch], Callable[[], object]]]:
    """What is timed, by name: each makes a call of a batch."""
    own = "triton" if plan.device == "cuda" else "cpu"
    return {
        "copy": _copy,
        own: lambda batch: _own(batch, own),
        f"{own}, metrics read": lambda batch: _own(batch, own, read=True),
        "torch": lambda batch: _own(batch, "torch"),
        "compiled": lambda batch: _compiled(batch, plan),
        "verl 0.9.1": _verl,
    }


def _copy(batch: Batch) -> Callable[[], object]:
    source = torch.ones(BYTES_PER_TOKEN * batch.tokens // 2, dtype=torch.uint8, device=batch.train.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _own(batch: Batch, impl: str, *, read: bool = False) -> Callable[[], object]:
    from rollcorr import RolloutCorrectionConfig, correct

    config = RolloutCorrectionConfig(**STANDARD)
    out = torch.empty_like(batch.train), torch.empty_like(batch.mask)

    def call() -> object:
        correction = correct(
            batch.train, batch.rollout, batch.mask, config, cu_seqlens=batch.cu_seqlens, out=out, impl=impl
        )
        return correction.metrics() if read else correction

    return call


def _compiled(batch: Batch, plan: Plan) -> Callable[[], object]:
    """The torch path under torch.compile; in a quick run its tracing alone, without the code generator."""
    from rollcorr import RolloutCorrectionConfig, correct

    config = RolloutCorrectionConfig(**STANDARD)

    def call(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return correct(train, rollout, mask, config, cu_seqlens=batch.cu_seqlens, impl="torch").weights

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager" if plan.quick else "inductor")
    return lambda: compiled(batch.train, batch.rollout, batch.mask)


def _verl(batch: Batch) -> Callable[[], object]:
    """verl takes padded tensors, so it gets those also where the others take the same tokens packed."""
    from gpu_stages.carried import verl_helper

    helper = verl_helper()
    return lambda: helper(*batch.padded, rollout_is_threshold=2.0, **STANDARD)
