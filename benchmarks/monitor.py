"""What a Monitor costs beside the correction: processor time of a step on 1 M tokens, and its transfers.

    python benchmarks/monitor.py
    python benchmarks/monitor.py --tokens 100000 --steps 300

The time is that of the thread, so that other programs on the machine count little. A step has a reward for each
sequence and five numbers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from rollcorr import Monitor, correct

WIDTH = 1024


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

    alone, corrected, stepped = [], [], []
    with tempfile.TemporaryDirectory() as folder, Monitor(Path(folder) / "run", "decoupled_token_is") as monitor:
        for step in range(arguments.steps):
            start = time.thread_time()
            correct(train, rollout, mask, "decoupled_token_is", out=out)
            alone.append(time.thread_time() - start)

            start = time.thread_time()
            monitor.correct(train, rollout, mask, out=out)
            corrected.append(time.thread_time() - start)

            start = time.thread_time()
            monitor.step(reward=rewards, loss=0.1, lr=1e-4, grad_norm=0.5, entropy=0.3, epoch=step)
            stepped.append(time.thread_time() - start)
        transfers = monitor.transfers

    print(f"{train.numel():,} tokens, {arguments.steps} steps, {transfers / arguments.steps:g} transfers a step")
    print(f"{'ms of processor time':24s} {'median':>8s} {'least':>8s}")
    for name, times in (("correct", alone), ("monitor.correct", corrected), ("monitor.step", stepped)):
        print(f"{name:24s} {1e3 * median(times):8.2f} {1e3 * min(times):8.2f}")


if __name__ == "__main__":
    main()
