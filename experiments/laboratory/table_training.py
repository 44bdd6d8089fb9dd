"""Short trainings of table policies far from their sampler, T × KL ≥ 20: the document's regime, which no cell has.

    python experiments/laboratory/table_training.py           every training (a few minutes on a core), then the table

A policy is a table of logits (16 states and tokens, T = 128, the reward is a mean over tokens), so its mean reward is
an exact sum. Columns: the sampler rounds the logits, both at temperature 1.0 (warm) or both at 0.4 (cold); or it cuts
its distribution (0.7, top-p 0.8, top-k 12 of 16) and the trainer does not. At each step rounding is as coarse as
T × KL = 25 needs; the cut has what it has.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollcorr import RolloutCorrectionConfig, correct
from rollcorr.core.sampling import top_k_support, top_p_support
from rollcorr.simulation import PolicyPair, make_pair, sample_rows
from rollcorr.simulation.markov_policies import expected_reward

TABLE = Path(__file__).resolve().parent / "table_training.csv"

COLUMNS = {"warm": 1.0, "cold": 0.4, "cut": 1.0}
"""Column → temperature of the trainer."""
CORRECTIONS = {
    "none": None,
    "token_tis": RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0),
    "seq_tis": RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=4.0),
}
SEEDS = range(8)
LENGTH, VOCABULARY, BATCH, STEPS, RATE = 128, 16, 256, 80, 0.05
T_TIMES_KL = 25.0
MEASURE = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=4.0)
"""What the metrics of every training are measured with, whatever corrects it."""

Row = dict[str, Any]


def pair_of(column: str, equal: PolicyPair, logits: torch.Tensor, grid: float) -> PolicyPair:
    """Return trainer and sampler of a column, for the logits of a step."""
    temperature = COLUMNS[column]
    if column == "cut":
        cold = logits / 0.7
        cold = cold.masked_fill(~top_k_support(cold, 12), -torch.inf)
        sampled = cold.masked_fill(~top_p_support(cold, 0.8), -torch.inf)
    else:
        sampled = (logits / grid).round() * grid / temperature if grid else logits / temperature
    trainer = equal.trainer.with_logits(logits / temperature)
    return replace(equal, trainer=trainer, rollout=trainer.with_logits(sampled))


def grid_of(column: str, equal: PolicyPair, logits: torch.Tensor) -> float:
    """Return a grid with which T × KL is `T_TIMES_KL` or more, by bisection; 0 where the sampler does not round."""
    low, high = 0.0, 0.0 if column == "cut" else 16.0
    for _ in range(12 if high else 0):
        middle = (low + high) / 2
        far = pair_of(column, equal, logits, middle).sequence_kl >= T_TIMES_KL
        low, high = (low, middle) if far else (middle, high)
    return high


def train(column: str, correction: str, seed: int) -> Row:
    """Train one policy with Adam, and return its exact reward before and after, and the metrics of its steps."""
    equal = make_pair("noise", 0.0, length=LENGTH, vocabulary=VOCABULARY, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    logits = equal.trainer.logits.clone()
    optimizer = torch.optim.Adam([logits], lr=RATE)
    rewards, steps = [], []
    for _ in range(STEPS):
        pair = pair_of(column, equal, logits, grid_of(column, equal, logits))
        rewards.append(float(expected_reward(pair.trainer, pair.rule, LENGTH)))
        rows = sample_rows(pair, BATCH, generator)
        logs = rows.train_log_prob, rows.rollout_log_prob, rows.mask
        steps.append(correct(*logs, MEASURE).metrics(prefix=""))

        # The loss is the mean over sequences of the sum over tokens; advantages have a standard deviation of 1.
        config, weight = CORRECTIONS[correction], 1.0
        if config is not None:
            weight = correct(*logs, config).weights.double()
        advantage = (rows.rewards - rows.rewards.mean()) / rows.rewards.std().clamp(min=1e-9)
        coefficients = (weight * advantage[:, None]).expand(-1, LENGTH)
        logits.grad = -rows.score_sums(coefficients).mean(0) / COLUMNS[column]
        optimizer.step()
    final = float(expected_reward(pair_of(column, equal, logits, 0.0).trainer, equal.rule, LENGTH))

    kl = [step["t_times_kl"] for step in steps]
    chi2 = [step["chi2_seq"] for step in steps]
    return {
        "column": column,
        "correction": correction,
        "seed": seed,
        "start": rewards[0],
        "final": final,
        "t_times_kl": sum(kl) / STEPS,
        "t_times_kl_first": sum(kl[:5]) / 5,
        "t_times_kl_last": sum(kl[-10:]) / 10,
        "chi2_above_1000": sum(value > 1e3 for value in chi2) / STEPS,
        "chi2_largest": max(chi2),
        "ess": sum(step["rollout_is_eff_sample_size"] for step in steps) / STEPS,
        "low_weight": sum(step["rollout_is_low_weight_fraction"] for step in steps) / STEPS,
    }


def main() -> None:
    """Train everything, and write the table."""
    torch.set_num_threads(1)
    rows = []
    for column in COLUMNS:
        for seed in SEEDS:
            rows += [train(column, correction, seed) for correction in CORRECTIONS]
            sys.stdout.write(f"{column}, seed {seed}: " + ", ".join(f"{row['final']:.3f}" for row in rows[-3:]) + "\n")
            sys.stdout.flush()
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )


if __name__ == "__main__":
    main()
