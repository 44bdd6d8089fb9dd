"""Train the demo with several seeds and judge each run.

    python experiments/training_runs/demo_seeds.py [--seeds 0,1,2] [name=value…]

A run passes when the policy starts at 20–60 % right answers, its reward rises by at least 0.15 and by three standard
errors (mean of the last ten steps against the first ten), and the mismatch between the bfloat16 sampler and the float32
trainer is measured and small. Exit code 0 when every seed passes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollcorr.run_directory import read_metrics
from rollcorr.train import load_config, train

DEMO = Path(__file__).parents[2] / "examples" / "train" / "demo.yaml"
WINDOW = 10
ACCURACY = (0.20, 0.60)
GAIN = 0.15
STANDARD_ERRORS = 3.0
K3 = (1e-6, 1e-3)


@dataclass(frozen=True)
class Verdict:
    """What a run showed: accuracy before, mean reward of the first and last steps, and the mean k3 in nats."""

    accuracy: float
    first: float
    last: float
    standard_error: float
    k3: float

    @property
    def gain(self) -> float:
        """Reward of the last steps minus reward of the first ones."""
        return self.last - self.first

    @property
    def failures(self) -> list[str]:
        """What is not as it should be; empty when the run passes."""
        checks = {
            f"accuracy {self.accuracy:.1%} outside {ACCURACY[0]:.0%}–{ACCURACY[1]:.0%}": (
                ACCURACY[0] <= self.accuracy <= ACCURACY[1]
            ),
            f"gain {self.gain:.3f} below {GAIN}": self.gain >= GAIN,
            f"gain {self.gain:.3f} below {STANDARD_ERRORS:g} standard errors of {self.standard_error:.3f}": (
                self.gain >= STANDARD_ERRORS * self.standard_error
            ),
            f"k3 {self.k3:.1e} outside {K3[0]:.0e}–{K3[1]:.0e}": K3[0] <= self.k3 <= K3[1],
        }
        return [failure for failure, passed in checks.items() if not passed]


def judge(accuracy: float, rewards: Sequence[float], k3: Sequence[float]) -> Verdict:
    """Compare the first and last ten steps; the standard error is that of the difference of their means."""
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    standard_error = sum(statistics.variance(window) / len(window) for window in (first, last)) ** 0.5
    return Verdict(accuracy, statistics.fmean(first), statistics.fmean(last), standard_error, statistics.fmean(k3))


def main() -> int:
    """Train, judge, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="seeds, with commas")
    parser.add_argument("--root", type=Path, default=Path("runs/demo-seeds"), help="where the runs go")
    parser.add_argument("overrides", nargs="*", help="changes to examples/train/demo.yaml")
    options = parser.parse_args()

    console = Console()
    table = Table("seed", "accuracy", "reward", "gain ± se", "k3", "seconds", "verdict", box=None, padding=(0, 2, 0, 0))
    failures = []
    for seed in map(int, options.seeds.split(",")):
        run_dir = options.root / f"seed_{seed}"
        config = load_config(DEMO, [*options.overrides, f"seed={seed}", f"run_dir={run_dir}"])
        start = time.perf_counter()
        summary = train(config, console=console)
        seconds = time.perf_counter() - start
        if summary.interrupted or summary.before is None or summary.after is None:
            return 1
        rows = read_metrics(run_dir / "metrics.jsonl")
        verdict = judge(
            summary.before["accuracy"],
            [row["reward/mean"] for row in rows],
            [row["rollout_corr/k3_kl"] for row in rows],
        )
        failures += [f"seed {seed}: {failure}" for failure in verdict.failures]
        table.add_row(
            str(seed),
            f"{verdict.accuracy:.1%} → {summary.after['accuracy']:.1%}",
            f"{verdict.first:.2f} → {verdict.last:.2f}",
            f"{verdict.gain:.2f} ± {verdict.standard_error:.2f}",
            f"{verdict.k3:.1e}",
            f"{seconds:.0f}",
            "failed" if verdict.failures else "passed",
        )
    console.print(table)
    for failure in failures:
        console.print(failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
