"""Count the package files that one call goes through.

    python tools/trace_files.py

A reader who wants to know what a call does opens the files that execute code in it, so their number says how hard the
package is to follow. Two calls are measured, each after a first one that imports, compiles and caches:

    correct    one call of `correct` with a configuration object, on a padded batch on the CPU
    step       one step of `GrpoTrainer` on the tiny policy

Imports do not count. The script prints the files of each call, and exits with code 1 if there are more than the limit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import rollcorr

PACKAGE = Path(rollcorr.__file__).parent
LIMITS = {"correct": 8, "step": 40}


def files_of(call: Callable[[], object]) -> list[str]:
    """The package files that execute code during a call, sorted, relative to the package."""
    names: set[str] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        # The body of a module runs when it is imported; that is no step of the call.
        if event == "call" and frame.f_code.co_name != "<module>":
            names.add(frame.f_code.co_filename)

    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(previous)

    prefix = str(PACKAGE) + os.sep
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def correct_call() -> Callable[[], object]:
    """A call of `correct` on two padded sequences."""
    from rollcorr import RolloutCorrectionConfig, correct

    generator = torch.Generator().manual_seed(0)
    old_log_prob = -torch.rand(2, 5, generator=generator)
    rollout_log_prob = old_log_prob + 0.1 * torch.randn(2, 5, generator=generator)
    response_mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0")
    return lambda: correct(old_log_prob, rollout_log_prob, response_mask, config)


def step_call() -> Callable[[], object]:
    """A step of `GrpoTrainer` with token weights, on a randomly initialized policy."""
    from rollcorr.train import GrpoTrainer, load_config
    from rollcorr.train.grpo import make_engine, make_task, make_tiny_policy

    overrides = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4"]
    config = load_config(None, [*overrides, "algorithm.rollout_correction=decoupled_token_is"])
    policy = make_tiny_policy(seed=0)
    trainer = GrpoTrainer(config, policy, make_engine(config, policy), make_task(config.task))
    steps = iter(range(1, 10))
    return lambda: trainer.step(next(steps))


CALLS = {"correct": correct_call, "step": step_call}


def measure(name: str) -> list[str]:
    """The files of the second call of one kind."""
    call = CALLS[name]()
    call()
    return files_of(call)


def main() -> int:
    """Print the files of every call; 1 when one of them goes through too many."""
    failed = False
    for name, limit in LIMITS.items():
        files = measure(name)
        failed |= len(files) > limit
        print(f"{name}: {len(files)} files, at most {limit} are allowed")
        print("".join(f"    {file}\n" for file in files))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
