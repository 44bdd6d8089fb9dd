"""Pairs of log-probs in rows: the data structure in which provenance tests search for causes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY, MOST_ROUNDED_UP

ROW_TOKENS = 8
"""Fewest pairs of a row that is judged by itself."""
LONG_ROW = 64
"""Pairs of a row above which this single row is enough evidence of a cause."""
CONTRADICTION = -1.0
"""Log-prob, nats, below which a side contradicts an exact 0.0 (probability 1) on the other: one was not computed."""
LEAST_SHARE = 0.01
"""Smallest share of rows with a cause if all of these are shorter: among thousands of rows some match by chance."""
CHANCE, ERROR = 0.25, 0.01
"""Probability that a token of noise matches a cause, and the probability of a false finding per log."""


@dataclass(frozen=True, eq=False)
class PairRows:
    """Two log-probs of the same tokens, packed.

    Attributes:
        train: log π, (N,) float64, nats; as logged, until a cause is undone.
        rollout: log μ, (N,) float64, nats; as logged, until a cause is undone.
        keep: true on tokens that the policy sampled, (N,) bool.
        row: row of each token, (N,) int, nondecreasing.
        position: index of each token in its row, masked tokens included, (N,) int.
        rows: number of rows, rows without tokens included.
        step: training step of each row, (rows,) int; defaults to `None`: not known.
        vocabulary: lower bound on the vocabulary's size; defaults to `None`: not known.
    """

    train: Tensor
    rollout: Tensor
    keep: Tensor
    row: Tensor
    position: Tensor
    rows: int
    step: Tensor | None = None
    vocabulary: int | None = None

    @property
    def valid(self) -> Tensor:
        """Return the kept tokens that have a log-prob on both sides, (N,) bool."""
        return self.keep & is_known(self.train) & is_known(self.rollout)

    @property
    def contradicted_zeros(self) -> Tensor:
        """Return the tokens with probability 1 on one side and less than 1/e on the other, (N,) bool."""
        return self.valid & ((self.train == 0) | (self.rollout == 0)) & (self.train + self.rollout < CONTRADICTION)

    @property
    def judged(self) -> Tensor:
        """Return the rows with at least one kept token, (rows,) bool."""
        return self.count(self.keep) > 0

    def count(self, tokens: Tensor) -> Tensor:
        """Return the number of these tokens, (N,) bool, in each row, (rows,) float64."""
        return self.total(tokens.double())

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of the values, (N,), over each row, (rows,) float64."""
        return torch.bincount(self.row, values.double(), self.rows).double()  # bincount returns integers for no token

    def mean(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Compute the mean of the values, (N,), over these tokens of each row, (rows,); 0 for a row without tokens."""
        return self.total(values.masked_fill(~tokens, 0.0)) / self.count(tokens).clamp(min=1)

    def moved(self, lag: int, values: Tensor) -> Tensor:
        """Return the values, (N,), shifted so that entry t contains entry t + lag of its row; NaN outside the row."""
        if lag == 0:
            return values
        moved = values.roll(-lag)
        same = (self.row.roll(-lag) == self.row) & self.keep.roll(-lag)
        if lag > 0:
            same[-lag:] = False
        else:
            same[:-lag] = False
        return moved.masked_fill(~same, torch.nan)

    def correlation(self, rollout: Tensor, tokens: Tensor, train: Tensor | None = None) -> Tensor:
        """Compute Pearson's correlation of the two sides' `doubt` over these tokens of each row.

        Args:
            rollout: log μ, (N,) nats.
            tokens: the tokens to correlate, (N,) bool.
            train: log π, (N,) nats; defaults to `self.train`.

        Returns:
            (rows,) float64 in [−1, 1]; 0 for a row with a constant side.
        """
        train = self.train if train is None else train
        x, y = doubt(train).masked_fill(~tokens, 0.0), doubt(rollout).masked_fill(~tokens, 0.0)
        n, mean_x, mean_y = self.count(tokens).clamp(min=1), self.mean(x, tokens), self.mean(y, tokens)
        covariance = self.total(x * y) / n - mean_x * mean_y
        variance = (self.total(x * x) / n - mean_x.square()) * (self.total(y * y) / n - mean_y.square())
        return torch.where(variance > 1e-16, covariance / variance.clamp(min=1e-16).sqrt(), 0.0)

    def enough(self, rows: Tensor) -> bool:
        """Return whether these rows, (rows,) bool, are a large enough share of the log, or contain a long row."""
        long_rows = self.count(self.valid) >= LONG_ROW
        return bool((rows & long_rows).any()) or int(rows.sum()) >= max(1.0, LEAST_SHARE * float(self.judged.sum()))

    def beyond_chance(self, rows: Tensor, telling: Tensor, matching: Tensor, *, causes: int) -> bool:
        """Return whether these rows match a cause more often than noise explains.

        The test compares Chernoff's bound on the probability of this share of matches, exp(−n KL(share‖CHANCE)), with
        `ERROR`, corrected for every choice of rows and every cause that could have been selected.

        Args:
            rows: the rows that show the cause, (rows,) bool.
            telling: tokens that distinguish causes, (N,) bool.
            matching: tokens that match the cause, (N,) bool.
            causes: number of causes that are tested.
        """
        tokens = self.of_rows(rows) & telling
        count, share = int(tokens.sum()), float(matching[tokens].double().mean()) if tokens.any() else 0.0
        if share <= CHANCE:
            return False
        against = (1 - share) * math.log((1 - share) / (1 - CHANCE)) if share < 1 else 0.0
        among, chosen = int((self.count(self.valid) >= ROW_TOKENS).sum()), int(rows.sum())
        choices = math.lgamma(among + 1) - math.lgamma(chosen + 1) - math.lgamma(max(among - chosen, 0) + 1)
        return count * (share * math.log(share / CHANCE) + against) >= choices + math.log(causes / ERROR)

    def without(self, tokens: Tensor) -> PairRows:
        """Return the same rows without these tokens, (N,) bool."""
        return replace(self, keep=self.keep & ~tokens)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return the tokens of these rows: (rows,) bool → (N,) bool."""
        return rows[self.row]


@dataclass
class RepairedPairs:
    """The pairs after a cause was undone, and the findings.

    Attributes:
        pairs: the pairs with repaired values; tokens that cannot be repaired are removed.
        findings: a finding per cause; empty by default.
    """

    pairs: PairRows
    findings: list[Finding] = field(default_factory=list)


def extent(pairs: PairRows, rows: Tensor, tokens: Tensor) -> dict[str, Any]:
    """Count the rows and tokens that show a cause.

    Args:
        pairs: the pairs that contain them.
        rows: rows that show the cause, (rows,) bool.
        tokens: tokens that show the cause, (N,) bool.

    Returns:
        Fields of a `Finding`: the counts, the share of the rows with at least one kept token, the index of the first
        row in `pairs`, and the steps if known.
    """
    which = rows.nonzero().squeeze(-1)
    steps = which.new_zeros(0) if pairs.step is None else pairs.step[which].unique()
    return {
        "rows": len(which),
        "tokens": int(tokens.sum()),
        "row_share": len(which) / max(int(pairs.judged.sum()), 1),
        "first_row": int(which[0]) if len(which) else None,
        "first_step": int(steps[0]) if len(steps) else None,
        "steps": len(steps) or None,
    }


def doubt(log_prob: Tensor) -> Tensor:
    """Compute |log p| / (1 + |log p|), in [0, 1), same shape: bounded, so no surprising token dominates a sum."""
    size = log_prob.abs()
    return size / (1 + size)


def is_recorded(log_prob: Tensor) -> Tensor:
    """Return where a log-prob is recorded: finite, and not JSON's placeholder of −inf. Same shape, bool."""
    return log_prob.isfinite() & (log_prob != JSON_MINUS_INFINITY)


def is_known(log_prob: Tensor) -> Tensor:
    """Return where a recorded value can be a log-prob: at most 0, up to rounding. Same shape, bool."""
    return is_recorded(log_prob) & (log_prob <= MOST_ROUNDED_UP)


def runs(tokens: Tensor, keep: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Find contiguous runs of tokens among the kept tokens of a row.

    Args:
        tokens: tokens of the runs, (N,) bool.
        keep: tokens to look at; masked tokens do not interrupt a run, (N,) bool.
        row: row of each token, (N,) int.

    Returns:
        The length of each token's run, (N,) int, 0 outside of runs; and the length of each run, (runs,) int.
    """
    index = keep.nonzero().squeeze(-1)
    inside, rows = tokens[index], row[index]
    starts = inside.clone()
    starts[1:] &= ~(inside[:-1] & (rows[1:] == rows[:-1]))
    run = starts.cumsum(0) - 1
    sizes = torch.zeros(int(starts.sum()), dtype=torch.long, device="cpu")
    sizes.index_add_(0, run[inside], torch.ones_like(run[inside]))
    length = torch.zeros(len(tokens), dtype=torch.long, device="cpu")
    length[index[inside]] = sizes[run[inside]]
    return length, sizes
