"""Compute mergeable totals of a log: the effect of each preset, and its worst tokens.

Presets with equal effect (they differ only in the loss, or in the name) are measured once.

The gradient of the loss is Σ w m A ∇log π. Recorded advantages determine its coefficients w m A. The vectors ∇log π are
unknown, and are treated as orthogonal with unit length. The gain tests whether a filter finds the tokens that differ
most: it compares the mean k3 after the filter with the mean k3 after an equal number of random rejections.

A few tokens may carry most of a mismatch: keep the tokens with the largest k3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.presets import PRESETS
from rollcorr.diagnostics.advice.candidates import added, advantages_of, applied_weights
from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.rollout_log import RolloutBatch

Sums = NDArray[np.float64]

OF_THE_LOG = (
    "rows",
    "tokens",
    "k3",
    "k3_square",
    "row_tokens_square",
    "row_k3_square",
    "row_product",
    "advantage_square",
)
"""Sums over valid tokens, or rows with one: counts, Σ k3, Σ k3², Σ t_i², Σ (row k3)², Σ t_i (row k3); Σ A²."""
OF_A_PRESET = ("kept_rows", "kept_tokens", "kept_k3", "weight", "weight_square", "change", "change_square")
"""Sums over accepted data: rows, tokens, Σ k3; Σ w and Σ w² over valid tokens, 0 where rejected; Σ A² w and Σ A² w²."""


@dataclass(frozen=True)
class WhatIf:
    """Effect of one preset on a log.

    Attributes:
        preset: name of the preset.
        same_as: names of presets with the same effect on a log.
        rejected_sequences: share of sequences without any accepted token.
        rejected_tokens: share of tokens that are rejected or have weight 0.
        effective_share: (Σ w)² / (N Σ w²) over all N tokens; rejected tokens have weight 0.
        gradient_change: |Σ-coefficients after − before| / |before|, both divided by the number of accepted tokens; None
            without advantages.
        gain: mean k3 of the log minus mean k3 of the accepted tokens, nats; None if no token is rejected.
        gain_error: standard error of the gain under random rejection, nats; None if no token is rejected.
    """

    preset: str
    same_as: tuple[str, ...]
    rejected_sequences: float
    rejected_tokens: float
    effective_share: float
    gradient_change: float | None
    gain: float | None
    gain_error: float | None


@dataclass(frozen=True, eq=False)
class PresetTotals:
    """Sums over part of a log.

    Attributes:
        log: sums `OF_THE_LOG`.
        presets: name → sums `OF_A_PRESET`; empty unless requested.
        advantages: True if every valid token so far has an advantage.
    """

    log: Sums = field(default_factory=lambda: np.zeros(len(OF_THE_LOG)))
    presets: Mapping[str, Sums] = field(default_factory=dict)
    advantages: bool = True

    @classmethod
    def of(cls, batch: RolloutBatch, train: Tensor, rollout: Tensor, mask: Tensor, ratios: TokenRatios) -> PresetTotals:
        """Compute the sums of a packed batch, (N,) each; `ratios` contains the ratios of its log-probs."""
        row, valid, k3 = np.repeat(np.arange(len(batch)), ratios.lengths), ratios.valid, ratios.k3
        advantage, known = advantages_of(batch, valid)
        row_tokens = np.bincount(row, valid, len(batch))
        row_k3 = np.bincount(row, k3, len(batch))
        square = advantage * advantage
        log = (
            (row_tokens > 0).sum(),
            valid.sum(),
            k3.sum(),
            (k3 * k3).sum(),
            (row_tokens * row_tokens).sum(),
            (row_k3 * row_k3).sum(),
            (row_tokens * row_k3).sum(),
            square.sum(),
        )
        presets = {}
        for name, config in PRESETS_ONCE.items():
            weight = np.where(valid, applied_weights(config, train, rollout, mask, batch.cu_seqlens), 0.0)
            kept = weight > 0
            presets[name] = np.array(
                [
                    (np.bincount(row, kept, len(batch)) > 0).sum(),
                    kept.sum(),
                    k3[kept].sum(),
                    weight.sum(),
                    (weight * weight).sum(),
                    (square * weight).sum(),
                    (square * weight * weight).sum(),
                ],
                dtype=np.float64,
            )
        return cls(np.array(log, dtype=np.float64), presets, known)

    def merge(self, later: PresetTotals) -> PresetTotals:
        """Return the sums over both parts of the log; `later` comes after."""
        presets = added(self.presets, later.presets)
        return PresetTotals(self.log + later.log, presets, self.advantages and later.advantages)

    def rows(self) -> tuple[WhatIf, ...]:
        """Return the effect of each preset, in the order of the table of presets; empty without a valid token."""
        return tuple(self._row(name, sums) for name, sums in self.presets.items()) if self.log[1] else ()

    def _row(self, name: str, sums: Sums) -> WhatIf:
        log = dict(zip(OF_THE_LOG, self.log.tolist(), strict=True))
        accepted = dict(zip(OF_A_PRESET, sums.tolist(), strict=True))
        rows, tokens, kept = log["rows"], log["tokens"], accepted["kept_tokens"]

        change = None
        if self.advantages and log["advantage_square"] > 0 and kept:
            scale = tokens / kept
            distance = scale**2 * accepted["change_square"] - 2 * scale * accepted["change"] + log["advantage_square"]
            change = math.sqrt(max(distance, 0.0) / log["advantage_square"])

        gain = error = None
        if 0 < kept < tokens:
            # The random comparison must reject the same unit: tokens or sequences.
            config = PRESETS_ONCE[name]
            by_token = (config.is_mode == "icepop" and config.weighs_tokens) or any(
                criterion.scope == "token" for criterion in config.criteria
            )
            gain = log["k3"] / tokens - accepted["kept_k3"] / kept
            error = _random_error(log, accepted, by_token=by_token)
        return WhatIf(
            preset=name,
            same_as=SAME_AS[name],
            rejected_sequences=1 - accepted["kept_rows"] / rows,
            rejected_tokens=1 - kept / tokens,
            effective_share=accepted["weight"] ** 2 / (tokens * accepted["weight_square"]) if kept else 0.0,
            gradient_change=change,
            gain=gain,
            gain_error=error,
        )


def _random_error(log: Mapping[str, float], accepted: Mapping[str, float], *, by_token: bool) -> float:
    """Compute the standard error of mean k3, nats, after drawing as many tokens or rows without replacement."""
    tokens, kept = log["tokens"], accepted["kept_tokens"]
    mean = log["k3"] / tokens
    if by_token:
        variance = max(log["k3_square"] / tokens - mean**2, 0.0)
        return math.sqrt(variance / kept * (1 - kept / tokens))

    # Variance between rows of Σ k3, after subtracting the log's mean k3 per token.
    rows, chosen = log["rows"], accepted["kept_rows"]
    beyond = log["row_k3_square"] - 2 * mean * log["row_product"] + mean**2 * log["row_tokens_square"]
    if rows < 2 or not chosen:
        return 0.0
    variance = max(beyond, 0.0) / (rows - 1)
    return math.sqrt(variance * (1 - chosen / rows) / chosen) / (tokens / rows)


def _presets_once() -> tuple[dict[str, RolloutCorrectionConfig], dict[str, tuple[str, ...]]]:
    """Return the presets with distinct effects on a log, and for each the names of its duplicates.

    Horizons are left out: they are experimental, and their scan would cost more than all other presets.
    """
    alike: dict[object, list[str]] = {}
    configs = {name: RolloutCorrectionConfig.preset(name) for name in PRESETS if "_horizon_" not in name}
    for name, config in configs.items():
        weights = (config.rollout_is, config.rollout_is_threshold) if config.weights_reach_loss else None
        alike.setdefault((weights, config.criteria, config.rollout_token_veto_threshold), []).append(name)
    same = {first: tuple(others) for first, *others in alike.values()}
    return {name: configs[name] for name in same}, same


PRESETS_ONCE, SAME_AS = _presets_once()


MOST = 10
"""Number of tokens to keep."""
EACH, CARRY = 0.05, 0.5
"""Minimum share of k3 for a single heavy token, and for all heavy tokens together to carry the mismatch."""
FEW = 1e-3
"""Maximum share of tokens that may be heavy."""


class HeavyToken(NamedTuple):
    """A token with a large part of a log's k3.

    Attributes:
        row: row of the log, counted from 0.
        position: position in the response, counted from 0.
        token_id: id of the token; −1 if not recorded.
        rollout_log_prob: log μ, nats.
        train_log_prob: log π, nats.
        share: share of the log's total k3.
    """

    row: int
    position: int
    token_id: int
    rollout_log_prob: float
    train_log_prob: float
    share: float


@dataclass(frozen=True, eq=False)
class WorstTokens:
    """Mergeable list of the tokens with the largest k3.

    Attributes:
        values: (6, n): k3, then the fields of `HeavyToken` up to log π, in descending k3; ties in log order.
    """

    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros((6, 0)))

    @classmethod
    def of(cls, ratios: TokenRatios) -> WorstTokens:
        """Return the worst tokens of a packed batch."""
        k3 = ratios.k3
        filled = ratios.lengths > 0
        largest = np.maximum.reduceat(k3, (ratios.lengths.cumsum() - ratios.lengths)[filled]) if len(k3) else k3
        least = 0.0 if len(largest) <= MOST else float(np.partition(largest, -MOST)[-MOST])
        token = np.flatnonzero((k3 >= least) & ratios.valid & (k3 > 0))
        token = token[np.argsort(-k3[token], kind="stable")[:MOST]]
        ends = ratios.lengths.cumsum()
        row = np.searchsorted(ends, token, side="right")
        position = token - (ends - ratios.lengths)[row]
        rollout = -ratios.surprise[token].astype(np.float64)
        own = np.full(len(token), -1) if ratios.ids is None else ratios.ids[token]
        return cls(np.stack([k3[token], ratios.index[row], position, own, rollout, rollout + ratios.d[token]]))

    def merge(self, later: WorstTokens) -> WorstTokens:
        """Return the worst tokens of both parts of the log; `later` comes after."""
        both = np.concatenate([self.values, later.values], axis=1)
        return WorstTokens(both[:, np.argsort(-both[0], kind="stable")[:MOST]])

    def carriers(self, total: float, tokens: int) -> tuple[HeavyToken, ...]:
        """Return the few tokens that carry the log's k3, largest first; empty unless a few tokens do.

        Args:
            total: Σ k3 of the log, nats.
            tokens: number of valid tokens in the log.

        Returns:
            Tokens with at least `EACH` of k3, if together they have at least `CARRY` and are at most `FEW` of all
            tokens.
        """
        share = self.values[0] / total if total > 0 else self.values[0]
        number = int((share >= EACH).sum())
        if share[:number].sum() < CARRY or number > FEW * tokens:
            return ()
        columns = zip(*self.values[1:, :number].tolist(), share[:number].tolist(), strict=True)
        return tuple(
            HeavyToken(int(row), int(place), int(own), mu, pi, part) for row, place, own, mu, pi, part in columns
        )
