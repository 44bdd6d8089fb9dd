"""Count the package files, functions and calls that one call goes through.

    python tools/trace_files.py

A reader who wants to know what a call does opens the files that execute code in it, and follows its functions. So
their numbers say how hard the package is to follow. Each call is measured after a first one that imports, compiles and
caches:

    correct    one call of `correct` with a configuration object, on a padded batch, by the compiled kernel
    torch      the same with impl="torch"
    summary    the text of that correction's summary
    step       one step of `GrpoTrainer` on the tiny policy
    check      `check_logs` on a healthy log of twelve steps

A function is a code object of the package: lambdas and comprehensions count, imports do not. The depth is how many of
them are open at once. The script prints the figures and the files of each call, and exits with code 1 if one is above
its limit. Without the compiled library it leaves `correct` out.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

import rollcorr
from rollcorr import RolloutCorrectionConfig, correct
from rollcorr.kernels.correction import implementations

PACKAGE = str(Path(rollcorr.__file__).parent) + os.sep
LIMITS = {
    "correct": {"files": 8, "functions": 28, "calls": 40},
    "torch": {"functions": 110},
    "summary": {"calls": 200},
    "step": {"files": 41},
    "check": {"files": 68},
}


@dataclass(frozen=True)
class Trace:
    """The package's part in a call: its files, relative to the package, and how many functions, calls and levels."""

    names: list[str]
    functions: int
    calls: int
    depth: int

    @property
    def files(self) -> int:
        """Return how many files execute code."""
        return len(self.names)

    def above(self, limits: dict[str, int]) -> list[str]:
        """List the figures that are above their limits."""
        return [f"{getattr(self, what)} {what}, at most {n}" for what, n in limits.items() if getattr(self, what) > n]


def trace(call: Callable[[], object]) -> Trace:
    """Run a call, and count the package's functions in it."""
    calls: Counter[CodeType] = Counter()
    depth = deepest = 0

    def record(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, deepest
        code = frame.f_code

        # The body of a module runs when it is imported; that is no step of the call.
        if not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
            return
        if event == "call":
            calls[code] += 1
            depth += 1
            deepest = max(deepest, depth)
        elif event == "return":
            depth -= 1

    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(previous)
    names = sorted({code.co_filename.removeprefix(PACKAGE) for code in calls})
    return Trace(names, len(calls), calls.total(), deepest)


def correct_call(impl: str = "auto") -> Callable[[], rollcorr.Correction]:
    """Return a call of `correct` on two padded sequences."""
    generator = torch.Generator().manual_seed(0)
    old_log_prob = -torch.rand(2, 5, generator=generator)
    rollout_log_prob = old_log_prob + 0.1 * torch.randn(2, 5, generator=generator)
    response_mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0")
    return lambda: correct(old_log_prob, rollout_log_prob, response_mask, config, impl=impl)


def summary_call() -> Callable[[], str]:
    """Return a call that writes the summary of a correction."""
    correction = correct_call()()
    return lambda: str(correction.summary())


def step_call() -> Callable[[], object]:
    """Return a step of `GrpoTrainer` with token weights, on a randomly initialized policy."""
    from rollcorr.train import GrpoTrainer, load_config
    from rollcorr.train.grpo import make_engine, make_task, make_tiny_policy

    overrides = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4"]
    config = load_config(None, [*overrides, "algorithm.rollout_correction=decoupled_token_is"])
    policy = make_tiny_policy(seed=0)
    trainer = GrpoTrainer(config, policy, make_engine(config, policy), make_task(config.task))
    steps = iter(range(1, 10))
    return lambda: trainer.step(next(steps))


def check_call() -> Callable[[], object]:
    """Return a check of a log with ids and steps, whose first steps are its null."""
    from rollcorr.diagnostics import check_logs
    from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

    generator = torch.Generator().manual_seed(0)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    log = Path(folder) / "log.parquet"
    with RolloutLogWriter(log) as writer:
        for step in range(1, 13):
            rollout = -torch.rand(16, 40, generator=generator)
            train = rollout + 0.01 * torch.randn(16, 40, generator=generator)
            ids = torch.randint(500, (16, 40), generator=generator)
            columns = {"response_ids": ids, "rollout_log_prob": rollout, "old_log_prob": train, "step": step}
            writer.write(RolloutBatch.from_padded(torch.ones(16, 40), **columns))
    return lambda: check_logs([log])


CALLS = {
    "correct": correct_call,
    "torch": lambda: correct_call("torch"),
    "summary": summary_call,
    "step": step_call,
    "check": check_call,
}


def measure(name: str) -> Trace:
    """Trace the second call of one kind."""
    call = CALLS[name]()
    call()
    return trace(call)


def main() -> int:
    """Print the figures of every call; 1 when one of them is above its limit."""
    failed = False
    compiled, reason = implementations()["cpu"]
    for name, limits in LIMITS.items():
        if name == "correct" and not compiled:
            print(f"correct: not measured, {reason}")
            continue
        found = measure(name)
        failed |= bool(found.above(limits))
        print(f"{name}: {found.files} files, {found.functions} functions, {found.calls} calls, {found.depth} deep")
        print("".join(f"    {line}\n" for line in found.above(limits) or found.names))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
