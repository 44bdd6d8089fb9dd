"""Count false alarms of a Monitor by the pace at which a policy becomes sharper.

    python experiments/fresh_nulls/sharpening_pace.py [--seeds 10]

The synthetic policies of `tests/monitor/test_own_null.py`: the trainer's logits grow by a factor over the run, the
sampler rounds them to bfloat16, and a Monitor gets 8 rows of 40 tokens as a new null after every 10 or 20 steps. All
weights are equal, so each alarm is false.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "monitor")]

from test_own_null import HEAD, run_with_fresh_nulls  # noqa: E402

PACES = (
    (10, 10, 3.0),
    (20, 10, 3.0),
    (40, 10, 3.0),
    (80, 10, 3.0),
    (20, 20, 3.0),
    (40, 20, 3.0),
    (80, 20, 3.0),
    (40, 10, 5.0),
    (80, 10, 5.0),
)
"""Steps, steps between measurements, and the factor of the logits."""


def entropy_share(sharper: float) -> float:
    """Entropy of the last policy over that of the first."""
    context = torch.randn(999, len(HEAD), generator=torch.Generator().manual_seed(0))
    of_factor = [torch.distributions.Categorical(logits=context @ HEAD * x).entropy().mean() for x in (1.0, sharper)]
    return float(of_factor[1] / of_factor[0])


def main() -> None:
    """Print a line per pace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each pace (default 10)")
    arguments = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    sys.stdout.write(f"{'steps':>5s} {'null every':>10s} {'entropy left':>12s} {'false alarms':>12s}\n")
    for steps, every, sharper in PACES:
        alarms = 0
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                alarms += bool(run_with_fresh_nulls(folder, seed, steps=steps, every=every, sharper=sharper)[0])
        sys.stdout.write(f"{steps:5d} {every:10d} {entropy_share(sharper):12.0%} {alarms:5d} of {arguments.seeds}\n")


if __name__ == "__main__":
    main()
