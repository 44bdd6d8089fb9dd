"""Measure the corrections that `advise` chooses from: mergeable sums over a log, and metrics computed from them.

The gradient of the loss is Σ w A ∇log π over tokens. A log contains its coefficients w A, summed here by token id. This
equals the gradient of the last layer's bias, except for the probabilities of the unsampled tokens. Prompts are assigned
to folds, and the spread over folds estimates the variance of the total (half-samples). Only sequence weights use the
ratios of the entire history, so the bias of a candidate is its difference from sequence weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.presets import preset_fields
from rollcorr.correction.rollout_correction import correct
from rollcorr.rollout_log import RolloutBatch

Sums = NDArray[np.float64]

FOLDS = 16
"""Number of folds of the prompts."""
BUCKETS = 256
"""Number of buckets for token ids, by modulo; positions replace ids if a log has no ids."""
FLIPS, LEVEL = 999, 0.05
"""Number of random sign flips of the folds, and the share of equally large sums below which a bias is significant."""
OF_A_CANDIDATE = ("kept", "weight", "weight_square", "row_weight", "row_weight_square", "signal")
"""Sums: tokens of weight above 0; Σ w, Σ w² over tokens; Σ u, Σ u² over sequences of mean weight u; Σ w A²."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A correction that `advise` can recommend.

    Attributes:
        preset: name of the preset.
        options: configuration field → value that differs from the preset's default.
    """

    preset: str
    options: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, object]:
        """Return every configuration field that the preset or the candidate sets."""
        return preset_fields(self.preset, {}) | dict(self.options)

    @property
    def config(self) -> RolloutCorrectionConfig:
        """Return the configuration."""
        return RolloutCorrectionConfig(**self.fields)  # type: ignore[arg-type]


CANDIDATES: dict[str, Candidate] = {
    "none": Candidate(preset="measure"),
    "Token-TIS 2": Candidate(preset="decoupled_token_is"),
    "Token-TIS 20": Candidate(preset="decoupled_token_is", options={"rollout_is_threshold": 20.0}),
    "horizon 0.9": Candidate(
        preset="decoupled_token_is",
        options={"rollout_is": "horizon", "rollout_is_horizon": 0.9, "rollout_is_threshold": 4.0},
    ),
    "Seq-TIS 4": Candidate(preset="decoupled_seq_is", options={"rollout_is_threshold": 4.0}),
    "Seq-MIS": Candidate(preset="decoupled_seq_is_rs"),
    "geometric band": Candidate(preset="decoupled_geo_rs"),
    "geometric + token": Candidate(preset="decoupled_geo_rs_token_tis"),
    "k3 + token": Candidate(preset="decoupled_k3_rs_token_tis"),
}
"""Name → correction: from no ratio to ratios of the entire sequence, then corrections that reject."""
WHOLE_HISTORY = "Seq-TIS 4"
"""Reference candidate for noise and bias."""


@dataclass(frozen=True, kw_only=True)
class CandidateRow:
    """Effect of a candidate on a log.

    Attributes:
        name: key of `CANDIDATES`.
        kept: share of the tokens with a weight above 0.
        mean_weight: Σ w / N.
        token_ess: (Σ w)² / (N Σ w²) over all N tokens.
        sequence_ess: the same over sequences, each with the mean weight of its tokens.
        signal: Σ w A² / Σ A²; None without advantages.
        noise: standard error of the coefficients per mean weight, relative to the norm of `WHOLE_HISTORY`'s
            coefficients; None without advantages, or if noise hides that norm.
        bias: norm of the difference from `WHOLE_HISTORY`, relative to the same norm; 0 if not significant.
    """

    name: str
    kept: float
    mean_weight: float
    token_ess: float
    sequence_ess: float
    signal: float | None
    noise: float | None
    bias: float | None


@dataclass(frozen=True, eq=False)
class CandidateTotals:
    """Sums over part of a log.

    Attributes:
        rows: number of sequences with a valid token.
        tokens: number of valid tokens.
        square: Σ A².
        sums: name → `OF_A_CANDIDATE`; empty if candidates are not measured.
        coefficients: name → Σ w A by fold and token id, (FOLDS, BUCKETS).
        advantages: True if every valid token so far has an advantage.
    """

    rows: int = 0
    tokens: int = 0
    square: float = 0.0
    sums: Mapping[str, Sums] = field(default_factory=dict)
    coefficients: Mapping[str, Sums] = field(default_factory=dict)
    advantages: bool = True

    @classmethod
    def of(
        cls,
        batch: RolloutBatch,
        train: Tensor,
        rollout: Tensor,
        mask: Tensor,
        *,
        ids: Tensor | None,
        prompts: Sequence[Tensor] | None,
        first: int = 0,
    ) -> CandidateTotals:
        """Compute the sums of a packed batch, (N,) each.

        Args:
            batch: rows of the log.
            train: log π, nats.
            rollout: log μ, nats.
            mask: True on response tokens.
            ids: ids of the response tokens, if recorded.
            prompts: token ids of each prompt, if recorded.
            first: position of the first row in the log; default 0.
        """
        rows, lengths = len(batch), batch.lengths
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        row = np.repeat(np.arange(rows), lengths.numpy())
        valid = (mask & (train.double() - rollout).isfinite()).numpy()
        row_tokens = np.bincount(row, valid, rows)

        # Responses to a prompt share their baseline, so they must stay in one fold.
        keys = np.arange(first, first + rows)
        if prompts is not None:
            keys = np.array([zlib.crc32(prompt.numpy().tobytes()) for prompt in prompts])
        place = np.arange(len(row)) - cu_seqlens.numpy()[row] if ids is None else ids.numpy()
        cell = (keys % FOLDS)[row] * BUCKETS + place % BUCKETS
        advantage, known = advantages_of(batch, valid)

        sums: dict[str, Sums] = {}
        coefficients: dict[str, Sums] = {}
        for name, candidate in CANDIDATES.items():
            weight = np.where(valid, applied_weights(candidate.config, train, rollout, mask, cu_seqlens), 0.0)
            mean = np.bincount(row, weight, rows) / np.maximum(row_tokens, 1)
            sums[name] = np.array(
                [
                    (weight > 0).sum(),
                    weight.sum(),
                    (weight * weight).sum(),
                    mean.sum(),
                    (mean * mean).sum(),
                    (weight * advantage * advantage).sum(),
                ],
                dtype=np.float64,
            )
            total: Sums = np.bincount(cell, weight * advantage, FOLDS * BUCKETS).astype(np.float64)
            coefficients[name] = total.reshape(FOLDS, BUCKETS)
        square = float((advantage * advantage).sum())
        return cls(int((row_tokens > 0).sum()), int(valid.sum()), square, sums, coefficients, known)

    def merge(self, later: CandidateTotals) -> CandidateTotals:
        """Return the sums over both parts of the log."""
        return CandidateTotals(
            self.rows + later.rows,
            self.tokens + later.tokens,
            self.square + later.square,
            added(self.sums, later.sums),
            added(self.coefficients, later.coefficients),
            self.advantages and later.advantages,
        )

    def table(self) -> tuple[CandidateRow, ...]:
        """Compute the effect of each candidate; empty without a valid token."""
        return tuple(self._row(name) for name in self.sums) if self.tokens else ()

    def _row(self, name: str) -> CandidateRow:
        kept, weight, square, mean, mean_square, signal = self.sums[name].tolist()
        noise = bias = None
        has_advantages = self.advantages and self.square > 0

        # Divide by the mean weight: a common factor does not change the direction. Report errors relative to the
        # gradient's norm, if it is known.
        whole, own = self._normalize_by_mean_weight(WHOLE_HISTORY), self._normalize_by_mean_weight(name)
        size, _ = squared_size(whole)
        if has_advantages and size > 0:
            noise = math.sqrt(squared_size(own)[1] / size)
            beyond, _ = squared_size(own - whole)
            bias = math.sqrt(beyond / size) if beyond > 0 and is_resolved(own - whole) else 0.0
        return CandidateRow(
            name=name,
            kept=kept / self.tokens,
            mean_weight=weight / self.tokens,
            token_ess=weight**2 / (self.tokens * square) if square else 0.0,
            sequence_ess=mean**2 / (self.rows * mean_square) if mean_square else 0.0,
            signal=signal / self.square if has_advantages else None,
            noise=noise,
            bias=bias,
        )

    def _normalize_by_mean_weight(self, name: str) -> Sums:
        """Return the coefficients of a candidate, divided by its mean weight."""
        weight = float(self.sums[name][OF_A_CANDIDATE.index("weight")])
        return np.asarray(self.coefficients[name] * (self.tokens / weight if weight else 0.0))


def squared_size(folds: Sums) -> tuple[float, float]:
    """Compute |E Σ|² of a sum over folds without its noise, and the variance of the sum.

    The variance is Σ_f |g_f − ḡ|² F / (F − 1): the mean of |one half − other half|² over all splits of the folds.

    Args:
        folds: g, (F, K).

    Returns:
        Squared norm, which is negative if noise dominates, and variance.
    """
    count = len(folds)
    variance = float(((folds - folds.mean(0)) ** 2).sum()) * count / (count - 1)
    return float((folds.sum(0) ** 2).sum()) - variance, variance


def is_resolved(folds: Sums) -> bool:
    """Return whether the sum over folds is significantly larger than with random signs (Fisher's randomization)."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (FLIPS, len(folds)))
    sizes = ((signs @ folds) ** 2).sum(1)
    return bool((sizes >= (folds.sum(0) ** 2).sum()).mean() < LEVEL)


def applied_weights(
    config: RolloutCorrectionConfig, train: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> Sums:
    """Return the factor on each token's loss: its weight if weights reach the loss, else 1; 0 if rejected."""
    correction = correct(train, rollout, mask, config, cu_seqlens=cu_seqlens, densities=True)
    weight: Sums = correction.loss_mask.numpy().astype(np.float64)
    if config.weights_reach_loss and correction.weights is not None:
        weight = np.where(weight > 0, correction.weights.double().numpy(), 0.0)
    return weight


def advantages_of(batch: RolloutBatch, valid: NDArray[np.bool_]) -> tuple[Sums, bool]:
    """Return the advantages of a batch, 0 if missing, and whether every valid token has one."""
    if not batch.has("advantages"):
        return np.zeros(len(valid)), False
    recorded = batch.packed("advantages").double().numpy()
    finite = np.isfinite(recorded)
    return np.where(valid & finite, recorded, 0.0), bool(finite[valid].all())


def added(one: Mapping[str, Sums], other: Mapping[str, Sums]) -> dict[str, Sums]:
    """Add arrays by name; a name may be absent from one mapping."""
    both = one.keys() & other.keys()
    return {**one, **other, **{name: one[name] + other[name] for name in both}}
