"""Calls the compiled correction, built with sanitizers, from Python: random shapes, layouts, options and masks.

`test_cpu_build.py` runs it in a process of its own with the folder of the library; a sanitizer ends that process.
Tensors have memory of exactly their size, so a read or write beyond one is noticed. Other tests compare the numbers.
"""

from __future__ import annotations

import sys
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from correction_cases import configuration

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.metric_registry import CRITERIA
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.cpu import kernel, library

ROUNDS = 320
LENGTHS = (0, 1, 3, 15, 16, 17, 33, 511, 512, 513, 1030, 2049, 5003)
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16)
SPECIAL = torch.tensor([float("nan"), float("inf"), float("-inf"), -1e30, 3.4e38, 0.0, 1000.0])


def mask_of(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, bool]:
    """Return a mask with runs of equal values 0 … 255, and whether it contains −1."""

    def draw(below: int, size: tuple[int, ...] = ()) -> torch.Tensor:
        return torch.randint(below, size, generator=generator)

    dtype = MASKS[int(draw(len(MASKS)))]
    values = draw(256, shape)
    if draw(2):  # few values, in runs that make blocks long
        values = draw(256, (3,))[(torch.rand(shape, generator=generator) < 0.002).cumsum(-1) % 3]
    is_negative = bool(values.numel()) and dtype.is_signed and int(draw(3)) == 0
    if dtype == torch.bool:  # as foreign bytes may be
        return values.to(torch.uint8).view(torch.bool), False
    mask = values.clamp(max=127 if dtype == torch.int8 else 255).to(dtype)
    if is_negative:
        mask.view(-1)[int(draw(values.numel()))] = -1
    return mask, is_negative


def configs() -> list[RolloutCorrectionConfig]:
    """Return configurations that differ in level, bounds, criteria and missing values, in every combination."""
    criteria = {"rollout_rs": ",".join(CRITERIA), "rollout_rs_threshold": 2.0, "rollout_token_veto_threshold": 1e-2}
    options = product(
        (None, "token", "sequence", "geometric", "horizon"),
        (None, 2.0, "0.5_2.0"),
        ("reject_token", "reject_sequence", "neutral"),
        ({}, {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.5"}, criteria),
    )
    return [
        configuration(
            rollout_is=level,
            rollout_is_horizon=0.9,
            rollout_is_horizon_per_turn=nonfinite == "neutral",
            rollout_is_threshold=bound,
            nonfinite=nonfinite,
            **rejection,
        )
        for level, bound, nonfinite, rejection in options
    ]


def run(seed: int, config: RolloutCorrectionConfig) -> None:
    """Correct one random batch, and read it in detail."""
    generator = torch.Generator().manual_seed(seed)
    torch.set_num_threads(1 + seed % 3)
    rows, length = int(torch.randint(6, (), generator=generator)), LENGTHS[seed % len(LENGTHS)]
    packed = bool(torch.randint(2, (), generator=generator))
    shape = (rows * length,) if packed else (rows, length)
    train, rollout = (-torch.rand(shape, generator=generator) for _ in range(2))
    if seed % 2:
        rollout = train + 0.01
    odd = torch.rand(shape, generator=generator) < 0.001
    train = train.where(~odd, SPECIAL[torch.randint(len(SPECIAL), shape, generator=generator)])
    mask, is_negative = mask_of(shape, generator)
    offsets = None
    if packed:
        inner = torch.randint(rows * length + 1, (rows,), generator=generator).sort().values
        offsets = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), rows * length)])
    batch = Batch(train.bfloat16() if seed % 3 == 0 else train, rollout, mask, offsets)

    if is_negative:
        with pytest.raises(ValueError, match="response_mask contains -1 "):
            kernel.cpu_correction(batch, config)
        return
    output = kernel.cpu_correction(batch, config)
    kernel.cpu_detail(batch, config, output.weights)
    assert output.loss_mask.view(torch.uint8).le(1).all()
    assert not (output.loss_mask & (mask == 0)).any()


def main(folder: str) -> None:
    """Call the library in a folder."""
    library.FOLDER = Path(folder)
    assert library.library().functions._name.startswith(folder)
    for seed, config in zip(range(ROUNDS), cycle(configs())):
        run(seed, config)


if __name__ == "__main__":
    main(sys.argv[1])
