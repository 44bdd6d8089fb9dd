"""Train the picture demo with several seeds, in both modes, and judge each run.

    python experiments/training_runs/flow_grpo_seeds.py [--seeds 0,1,2] [--modes decoupled,bypass] [name=value…]

A run passes when its reward rises by at least 0.05 and by three standard errors (mean of the last ten steps against
the first ten), and the mismatch between the bfloat16 sampler and the float32 trainer is measured and small. Three
columns show what bypass mode saves: forward passes of the trainer per step, seconds of the recompute pass, seconds of a
step. Exit code 0 when every run passes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollcorr.run_directory import read_metrics
from rollcorr.train import load_config, train

DEMO = Path(__file__).parents[2] / "examples" / "train" / "flow_grpo.yaml"
WINDOW = 10
GAIN = 0.05
STANDARD_ERRORS = 3.0
EXACT_KL = (1e-6, 1.0)
MODES = {"decoupled": (), "bypass": ("algorithm.rollout_correction.bypass_mode=True",)}


@dataclass(frozen=True)
class Verdict:
    """What a run showed: mean reward of its first and last steps, and the mean exact KL of a step in nats."""

    first: float
    last: float
    standard_error: float
    exact_kl: float

    @property
    def gain(self) -> float:
        """Reward of the last steps minus reward of the first ones."""
        return self.last - self.first

    @property
    def failures(self) -> list[str]:
        """What is not as it should be; empty when the run passes."""
        checks = {
            f"gain {self.gain:.3f} below {GAIN}": self.gain >= GAIN,
            f"gain {self.gain:.3f} below {STANDARD_ERRORS:g} standard errors of {self.standard_error:.3f}": (
                self.gain >= STANDARD_ERRORS * self.standard_error
            ),
            f"exact KL {self.exact_kl:.1e} outside {EXACT_KL[0]:.0e}–{EXACT_KL[1]:.0e}": (
                EXACT_KL[0] <= self.exact_kl <= EXACT_KL[1]
            ),
        }
        return [failure for failure, passed in checks.items() if not passed]


def judge(rewards: Sequence[float], exact_kl: Sequence[float]) -> Verdict:
    """Compare the first and last ten steps; the standard error is that of the difference of their means."""
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    error = sum(statistics.variance(window) / len(window) for window in (first, last)) ** 0.5
    return Verdict(statistics.fmean(first), statistics.fmean(last), error, statistics.fmean(exact_kl))


def accuracy(before: Mapping[str, float], after: Mapping[str, float], kind: str) -> str:
    """Shares that are right before and after: of trained prompts, then of held-out ones."""
    names = (f"{kind}_accuracy", f"held_out_{kind}_accuracy")
    return ", ".join(f"{before[name]:.2f} → {after[name]:.2f}" for name in names)


def main() -> int:
    """Train, judge, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="seeds, with commas")
    parser.add_argument("--modes", default="decoupled,bypass", help="decoupled, bypass, or both with a comma")
    parser.add_argument("--root", type=Path, default=Path("runs/flow-grpo-seeds"), help="where the runs go")
    parser.add_argument("overrides", nargs="*", help="changes to examples/train/flow_grpo.yaml")
    options = parser.parse_args()

    console = Console()
    columns = (
        "mode",
        "seed",
        "reward",
        "gain ± se",
        "without noise",
        "color, held out",
        "shape, held out",
        "exact KL",
        "passes",
        "recompute s",
        "step s",
        "run s",
    )
    table = Table(*columns, "verdict", box=None, padding=(0, 2, 0, 0))
    failures = []
    for mode in options.modes.split(","):
        for seed in map(int, options.seeds.split(",")):
            run_dir = options.root / f"{mode}_{seed}"
            config = load_config(DEMO, [*MODES[mode], *options.overrides, f"seed={seed}", f"run_dir={run_dir}"])
            start = time.perf_counter()
            summary = train(config, console=console)
            seconds = time.perf_counter() - start
            if summary.interrupted or summary.before is None or summary.after is None:
                return 1
            rows = read_metrics(run_dir / "metrics.jsonl")
            prefix = "actor/rollout_corr/" if mode == "bypass" else "rollout_corr/"
            verdict = judge([row["reward/mean"] for row in rows], [row[f"{prefix}exact_kl_mean"] for row in rows])
            failures += [f"{mode}, seed {seed}: {failure}" for failure in verdict.failures]
            table.add_row(
                mode,
                str(seed),
                f"{verdict.first:.2f} → {verdict.last:.2f}",
                f"{verdict.gain:.2f} ± {verdict.standard_error:.2f}",
                f"{summary.before['reward']:.2f} → {summary.after['reward']:.2f}",
                *(accuracy(summary.before, summary.after, kind) for kind in ("color", "shape")),
                f"{verdict.exact_kl:.1e}",
                f"{statistics.fmean(row['perf/forward_passes'] for row in rows):.0f}",
                f"{statistics.fmean(row['perf/old_log_prob_seconds'] for row in rows):.3f}",
                f"{statistics.fmean(row['perf/step_seconds'] for row in rows):.3f}",
                f"{seconds:.0f}",
                "failed" if verdict.failures else "passed",
            )
    Console(width=max(console.width, 190)).print(table)
    for failure in failures:
        console.print(failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
