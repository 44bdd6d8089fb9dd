"""Test that tokens were drawn from the logged log-probs: the mean of −log μ is then the mean entropy of μ.

Log-probs before the sampling settings are applied (raw) agree on both sides for every sampler. But tokens drawn at a
lower temperature, or within top-p, are more probable under μ than its entropy implies. Given the tokens before it,
−log μ − H(μ) of a drawn token has mean 0, so z = Σ (−log μ − H) / √Σ (−log μ − H)² is about standard normal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.null.token_ratios import TokenRatios, slice_sums
from rollcorr.diagnostics.numbers import format_number
from rollcorr.rollout_log import RolloutBatch

Z, LEAST, FEWEST = 5.0, 0.02, 1000
"""Standard errors, and share of the mean entropy, from which the two means differ; and the fewest tokens of a test."""


class DrawSums(NamedTuple):
    """Sums over tokens with a recorded entropy.

    Attributes:
        tokens: number of tokens.
        off: Σ (−log μ − H), nats.
        square: Σ (−log μ − H)², nats².
        entropy: Σ H, nats.
    """

    tokens: float = 0.0
    off: float = 0.0
    square: float = 0.0
    entropy: float = 0.0

    def merge(self, later: DrawSums) -> DrawSums:
        """Return the sums over both parts."""
        return DrawSums(*(own + other for own, other in zip(self, later, strict=True)))

    @property
    def z(self) -> float:
        """Return the distance of the two means in standard errors; 0 if it is too small to matter, or untested."""
        small = self.tokens < FEWEST or abs(self.off) < LEAST * self.entropy
        return 0.0 if small or not self.square else self.off / math.sqrt(self.square)


def draw_sums(batch: RolloutBatch, ratios: TokenRatios) -> dict[int | None, DrawSums]:
    """Compute the sums of a batch by step; without steps, the key is None."""
    entropy = batch.packed("rollout_entropy").double().numpy()
    used = ratios.valid & np.isfinite(entropy)
    excess = np.where(used, ratios.surprise - entropy, 0.0)
    columns = (used, excess, excess * excess, np.where(used, entropy, 0.0))  # in the order of DrawSums
    table = np.stack([slice_sums(column, ratios.lengths) for column in columns])
    if not batch.has("step"):
        return {None: DrawSums(*table.sum(1).tolist())}
    step = batch.values("step").numpy()
    return {int(one): DrawSums(*table[:, step == one].sum(1).tolist()) for one in np.unique(step)}


def tests_draws(draws: Mapping[int | None, DrawSums]) -> bool:
    """Return whether enough entropies are recorded to test the draws."""
    return sum(sums.tokens for sums in draws.values()) >= FEWEST


def judge_draws(draws: Mapping[int | None, DrawSums]) -> list[Finding]:
    """Return the finding that tokens were not drawn from the logged log-probs; empty if the means agree."""
    steps = sorted(step for step, sums in draws.items() if step is not None and abs(sums.z) >= Z)
    off = reduce(DrawSums.merge, (draws[step] for step in steps) if steps else draws.values(), DrawSums())
    if abs(off.z) < Z:
        return []
    finding = replace(
        fault("not_the_sampled_distribution").finding,
        metric="rollout_log_ppl",
        value=(off.off + off.entropy) / off.tokens,
        limit=f"about {format_number(off.entropy / off.tokens)}, the mean entropy",
        confidence=off.z**2 / (1 + off.z**2),
        evidence={"z": off.z, "entropy": off.entropy / off.tokens},
    )
    return [replace(finding, first_step=steps[0], steps=len(steps)) if steps else finding]
