"""What a Monitor costs beside the correction: processor time of a step on 1 M tokens, transfers, and the longest step.

    python benchmarks/monitor.py
    python benchmarks/monitor.py --tokens 100000 --steps 300

The time is that of the thread, so that other programs on the machine count little. A step has a reward for each
sequence and five numbers. The longest `step` is by the clock; a second run
measures it while a sink hangs, and with it the thread that writes.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch

from rollcorr import Monitor, RolloutSample, correct

WIDTH = 1024
HANGING_STEPS = 20


def main() -> None:
    """Print the median and the least time of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="tokens of a step (default 1 M)")
    parser.add_argument("--steps", type=int, default=200, help="steps (default 200)")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    train = -torch.rand(arguments.tokens // WIDTH, WIDTH, generator=generator)
    rollout = train + 0.02 * torch.randn(train.shape, generator=generator)
    mask = torch.ones(train.shape, dtype=torch.bool)
    rewards = torch.rand(len(train), generator=generator)
    out = (torch.empty_like(train), torch.empty_like(mask))

    alone, corrected, stepped, clock = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, Monitor(Path(folder) / "run", "decoupled_token_is") as monitor:
        for step in range(arguments.steps):
            start = time.thread_time()
            correct(train, rollout, mask, "decoupled_token_is", out=out)
            alone.append(time.thread_time() - start)

            start = time.thread_time()
            monitor.correct(train, rollout, mask, out=out)
            corrected.append(time.thread_time() - start)

            start, now = time.thread_time(), time.perf_counter()
            monitor.step(reward=rewards, loss=0.1, lr=1e-4, grad_norm=0.5, entropy=0.3, epoch=step)
            stepped.append(time.thread_time() - start)
            clock.append(time.perf_counter() - now)
        transfers = monitor._exchange.transfers

    print(f"{train.numel():,} tokens, {arguments.steps} steps, {transfers / arguments.steps:g} transfers a step")
    print(f"{'ms of processor time':24s} {'median':>8s} {'least':>8s}")
    for name, times in (("correct", alone), ("monitor.correct", corrected), ("monitor.step", stepped)):
        print(f"{name:24s} {1e3 * median(times):8.2f} {1e3 * min(times):8.2f}")
    hanging = longest_hanging()
    print(f"longest monitor.step: {1e3 * max(clock):.1f} ms; while the writing thread hangs: {1e3 * hanging:.1f} ms")


class Hanging:
    """A tracker whose server does not answer."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def write(self, step: int, metrics: object) -> None:
        """Wait for the answer."""
        self.answers.wait()

    def close(self) -> None:
        """Nothing to do."""


def longest_hanging() -> float:
    """Seconds of the longest step by the clock while the writing thread hangs, with small rollout logs."""
    hanging, longest = Hanging(), 0.0
    train = -torch.rand(8, 64)
    with (
        tempfile.TemporaryDirectory() as folder,
        Monitor(Path(folder) / "run", sinks=[hanging], rollouts=RolloutSample()) as monitor,
    ):
        for _ in range(HANGING_STEPS):
            monitor.correct(train, train, torch.ones(8, 64))
            now = time.perf_counter()
            monitor.step(reward=1.0)
            longest = max(longest, time.perf_counter() - now)
        hanging.answers.set()
    return longest


if __name__ == "__main__":
    main()
