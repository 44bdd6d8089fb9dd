"""Corrections by reward shape and batch size on table policies, and how their order agrees with that in training.

    python experiments/laboratory/reward_shapes.py           measures, then writes the tables and reward_shapes.md
    python experiments/laboratory/reward_shapes.py --page    the page and its rank correlations, from the tables

The corrections are those of the training bench (experiments/bench). Rewards: the mean over tokens; an outcome (1 if
enough tokens are right); one mistake ends it (1 if no token is wrong, which half of the sequences achieve).
"""

from __future__ import annotations

import csv
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent / "bench"
sys.path[:0] = [str(BENCH), str(HERE.parent / "mismatch_in_practice")]

import torch  # noqa: E402
from trained_cell import CORRECTIONS, Cell, read_cells  # noqa: E402
from trained_page import COLUMN_TITLES, CORRECTION_TITLES, mean, select, table  # noqa: E402

from rollcorr import RolloutCorrectionConfig  # noqa: E402
from rollcorr.simulation import PolicyPair, make_pair, measure, sample_rows  # noqa: E402
from rollcorr.simulation.markov_policies import RewardRule  # noqa: E402
from rollcorr.simulation.mismatches import with_mismatch  # noqa: E402

TABLE, PAGE = HERE / "rewards.csv", HERE / "reward_shapes.md"
COLUMNS = ("reward", "regime", "kind", "seed", "t_times_kl", "estimator", "batch_size", "direction", "direction_error")

REWARDS = {"mean": "mean over tokens", "outcome": "outcome", "mistake": "one mistake ends it"}
T_TIMES_KL = (1.0, 10.0)
KINDS = ("noise", "quantized")
SEEDS = (0, 1)
SHOWN = (256, 1024, 16_384)
BATCH_SIZES = tuple(2**power for power in range(4, 21))
LENGTH, VOCABULARY, ROWS = 128, 16, 2048
NAMES = ("none", "token_tis", "token_tis_20", "seq_tis", "horizon")
TOKEN, SEQUENCE = "token_tis", "seq_tis"

IN_TRAINING = {"stale": 1.0, "stale_quantized": 10.0}
"""Sampler of the bench → the T × KL here that is nearest to that of its first rollouts."""
TRAINING_BATCH = 32
"""Responses of an optimizer step in the bench."""
BOOTSTRAPS = 2000

INTRODUCTION = """# Rewards and batch sizes

<!-- Written by `reward_shapes.py --page` from rewards.csv. -->

The corrections of [the training bench](../bench/results.md) on table policies: vocabulary 16, T = 128, 2,048 sequences
per pair; kinds `noise` and `quantized` with two seeds each. The reward is a mean over tokens; an outcome (1 if enough
tokens are right); or 1 if no token of the sequence is the wrong one, which half of the trainer's sequences achieve.
Numbers are direction errors: 0 is the direction of the exact gradient, 1 is noise."""
CROSSING = """The batch size at which the mean direction error of Seq-TIS 4 falls below that of Token-TIS 2; not
resolved where the difference stays within two standard errors."""
RANKS = """Spearman's correlation between the order by direction error (B = 32, the responses of an optimizer step)
and that by final accuracy, over the five corrections. The interval draws the seeds of the bench anew, and the errors
within their standard errors. An interval that contains 0 shows nothing, and a negative correlation means that training
has the reverse order: one gradient of a table does not say which correction trains best."""

Row = dict[str, Any]


def configuration(name: str) -> RolloutCorrectionConfig | None:
    """Return the correction of the bench; None for no correction."""
    return Cell("clean", name, 0).config().algorithm.correction if CORRECTIONS[name] else None


def equal_pair(reward: str, seed: int) -> PolicyPair:
    """Return a trainer and its reward, with a sampler that is equal to it."""
    pair = make_pair("noise", 0.0, length=LENGTH, vocabulary=VOCABULARY, seed=seed, outcome=reward == "outcome")
    if reward != "mistake":
        return pair

    # Token 0 is the mistake: every state has it with probability p, and (1 − p)^T = 1/2.
    chance = 1 - 0.5 ** (1 / LENGTH)
    logits = pair.trainer.logits.clone()
    logits[:, 0] = logits[:, 1:].logsumexp(-1) + math.log(chance / (1 - chance))
    points = torch.ones_like(logits)
    points[:, 0] = 0.0
    trainer = pair.trainer.with_logits(logits)
    return replace(pair, trainer=trainer, rollout=trainer, rule=RewardRule(points, goal=LENGTH))


def pair_with(reward: str, kind: str, t_times_kl: float, seed: int) -> PolicyPair:
    """Return the pair whose T × KL is nearest to a wanted one, by bisection on the severity."""
    equal, low, high = equal_pair(reward, seed), 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        found = with_mismatch(equal, kind, middle, seed=seed + 2)
        low, high = (middle, high) if found.sequence_kl < t_times_kl else (low, middle)
    return found


def measure_all() -> list[Row]:
    """Measure every reward, distance and kind: direction errors by batch size."""
    configs = {name: configuration(name) for name in NAMES}
    errors: list[Row] = []
    for reward in REWARDS:
        for distance in T_TIMES_KL:
            for kind in KINDS:
                for seed in SEEDS:
                    pair = pair_with(reward, kind, distance, seed)
                    rows = sample_rows(pair, ROWS, torch.Generator().manual_seed(seed))
                    labels = {"reward": reward, "regime": distance, "kind": kind, "seed": seed}
                    found = measure(rows, configs, BATCH_SIZES, **labels)
                    errors += [{name: row[name] for name in COLUMNS} for row in found]
            sys.stdout.write(f"{reward}, T x KL = {distance:g}\n")
            sys.stdout.flush()
    return errors


def mean_error(rows: Sequence[Row], reward: str, distance: float, name: str, batch_size: int) -> tuple[float, float]:
    """Return the mean direction error over pairs, and its standard error from those of the pairs."""
    wanted = (reward, distance, name, batch_size)
    chosen = [row for row in rows if (row["reward"], row["regime"], row["estimator"], row["batch_size"]) == wanted]
    spread = math.sqrt(sum(row["direction_error"] ** 2 for row in chosen)) / len(chosen)
    return mean([row["direction"] for row in chosen]), spread


def crossing(rows: Sequence[Row], reward: str, distance: float) -> str:
    """Return the batch size from which sequence weights have the smaller error, by interpolation on a log axis.

    It counts only if the difference is two standard errors at that or a larger batch size.
    """
    gaps, is_sure = [], []
    for batch_size in BATCH_SIZES:
        (token, error), (sequence, spread) = (
            mean_error(rows, reward, distance, name, batch_size) for name in (TOKEN, SEQUENCE)
        )
        gaps.append(sequence - token)
        is_sure.append(sequence - token < -2 * math.hypot(error, spread))
    for place, (before, after) in enumerate(pairwise(gaps)):
        if before >= 0 > after and any(is_sure[place:]):
            return f"{2 ** (math.log2(BATCH_SIZES[place]) + before / (before - after)):,.0f}"
    return f"not resolved up to {BATCH_SIZES[-1]:,}"


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation; ties share their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(x < y for x in values) + sum(x == y for x in values) / 2 for y in values]

    a, b = ranks(one), ranks(other)
    center = mean(a)
    covariance = sum((x - center) * (y - center) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - center) ** 2 for x in a) * sum((y - center) ** 2 for y in b))
    return covariance / spread if spread else 0.0


def rank_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rank correlation of -error with final accuracy in training, and its 95 % interval over seeds."""
    cells = read_cells([Cell(c, n, s) for c in IN_TRAINING for n in NAMES for s in range(8)], BENCH / "cells")
    draw, found = random.Random(0), []
    for column, distance in IN_TRAINING.items():
        finals = [[cell["held_out"][-1]["accuracy"] for cell in select(cells, column, name)] for name in NAMES]
        for reward in REWARDS:
            errors = [mean_error(rows, reward, distance, name, TRAINING_BATCH) for name in NAMES]
            drawn = []
            for _ in range(BOOTSTRAPS):
                # Both sides err: seeds are drawn anew, and direction errors have their standard errors.
                seeds = [draw.randrange(8) for _ in range(8)]
                trained = [mean([values[seed] for seed in seeds]) for values in finals]
                drawn.append(spearman([-draw.gauss(*error) for error in errors], trained))
            drawn.sort()
            value = spearman([-error for error, _ in errors], [mean(values) for values in finals])
            low, high = drawn[round(0.025 * BOOTSTRAPS)], drawn[round(0.975 * BOOTSTRAPS) - 1]
            found.append(
                {"sampler": column, "reward": reward, "regime": distance, "rank": value, "low": low, "high": high}
            )
    return found


def page_text(rows: Sequence[Row]) -> str:
    """Return the page."""
    header = ("reward", "T × KL", *(CORRECTION_TITLES[name] for name in NAMES))
    parts = [INTRODUCTION]
    for batch_size in SHOWN:
        lines = []
        for reward, title in REWARDS.items():
            for distance in T_TIMES_KL:
                cells = [mean_error(rows, reward, distance, name, batch_size) for name in NAMES]
                lines.append((title, f"{distance:g}", *(f"{value:.3f} ± {error:.3f}" for value, error in cells)))
        parts += [f"## B = {batch_size:,}", table(header, lines)]
    crossings = [(title, f"{d:g}", crossing(rows, reward, d)) for reward, title in REWARDS.items() for d in T_TIMES_KL]
    parts += ["## Where sequence weights become better", CROSSING, table(("reward", "T × KL", "batch size"), crossings)]
    ranks = [
        (
            COLUMN_TITLES[row["sampler"]],
            f"{row['regime']:g}",
            REWARDS[row["reward"]],
            f"{row['rank']:+.2f}",
            f"{row['low']:+.2f} to {row['high']:+.2f}",
        )
        for row in rank_rows(rows)
    ]
    header = ("sampler in training", "T × KL here", "reward here", "rank correlation", "95 % interval")
    parts += ["## Against the order in training", RANKS, table(header, ranks)]
    return "\n\n".join(parts) + "\n"


def read_rows() -> list[Row]:
    """Return the committed table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        numbers = {"regime", "batch_size", "direction", "direction_error", "t_times_kl"}
        return [
            {key: float(text) if key in numbers else text for key, text in row.items()} for row in csv.DictReader(file)
        ]


def main() -> None:
    """Measure unless only the page is asked for, and write the page."""
    if "--page" not in sys.argv[1:]:
        torch.set_num_threads(1)
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for row in measure_all():
                short = {key: f"{value:.5g}" for key, value in row.items() if isinstance(value, float)}
                writer.writerow(row | short)
    PAGE.write_text(page_text(read_rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
