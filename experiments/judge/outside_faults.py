"""The outside faults by name, and the log of one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from outside_lab import Bench, write_log
from outside_numbers import NUMBER_FAULTS
from outside_sampler import SAMPLER_FAULTS, Fault
from outside_trainer import TRAINER_FAULTS

OUTSIDE: dict[str, Fault] = {fault.__name__: fault for fault in (*SAMPLER_FAULTS, *TRAINER_FAULTS, *NUMBER_FAULTS)}
"""15 faults of the review's table, and 30 others."""


@torch.no_grad()
def outside_log(fault: Fault, seed: int, folder: Path) -> float:
    """Write the log of a fault. Returns the share of the excess on the tokens that it planted."""
    bench = Bench(seed)
    spec = bench.spec
    if fault.__name__ == "raw_penalty":
        # Here the user knows and logs the penalty.
        spec = dataclasses.replace(
            spec, repetition_penalty=1.3, logprobs="raw" if bench.temperature == 1 else "tempered"
        )
    return write_log(bench, [fault(bench, prompts) for prompts in bench.prompts], folder, spec)
