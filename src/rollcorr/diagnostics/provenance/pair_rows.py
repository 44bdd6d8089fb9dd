"""The pairs of a log, row by row: the form in which the causes are looked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY, MOST_ROUNDED_UP

ROW_TOKENS = 8
"""A row with fewer pairs is not judged on its own."""
LONG_ROW = 64
"""A row of so many pairs may be the only one that shows a cause."""
CONTRADICTION = -1.0
"""Where one side is exactly 0.0 (probability 1) and the other below this, in nats, one of them was not computed."""
LEAST_SHARE = 0.01
"""Share of the rows that must show a cause where all of these are shorter: of thousands, some look like anything."""
CHANCE, ERROR = 0.25, 0.01
"""Probability that a token of noise matches a cause, and that any rows of a log show any cause by noise alone."""


@dataclass(frozen=True, eq=False)
class PairRows:
    """Two log-probs of the same tokens, packed.

    Attributes:
        train: log π, (N,) float64; as the log has it until a cause is undone.
        rollout: log μ, (N,) float64.
        keep: true on tokens that the policy sampled, (N,).
        row: row of each token, (N,) and not decreasing.
        position: index of each token in its row, masked ones counted, (N,).
        rows: number of rows, also those without a token.
        step: training step of each row, (rows,); None where not known.
        vocabulary: its size, at least; None where not known.
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
        """Tokens that have a log-prob on both sides, (N,)."""
        return self.keep & is_known(self.train) & is_known(self.rollout)

    @property
    def contradicted_zeros(self) -> Tensor:
        """Tokens to which one side gives probability 1 and the other less than 1/e, (N,)."""
        return self.valid & ((self.train == 0) | (self.rollout == 0)) & (self.train + self.rollout < CONTRADICTION)

    @property
    def judged(self) -> Tensor:
        """Rows that have a token that counts, (rows,)."""
        return self.count(self.keep) > 0

    def count(self, tokens: Tensor) -> Tensor:
        """How many of these tokens each row has, (rows,) float64."""
        return self.total(tokens.double())

    def total(self, values: Tensor) -> Tensor:
        """The sum of a value over each row, (rows,) float64."""
        return torch.bincount(self.row, values.double(), self.rows).double()  # integers without any token

    def mean(self, values: Tensor, tokens: Tensor) -> Tensor:
        """The mean of a value over these tokens of each row, (rows,); 0 where a row has none."""
        return self.total(values.masked_fill(~tokens, 0.0)) / self.count(tokens).clamp(min=1)

    def moved(self, lag: int, values: Tensor) -> Tensor:
        """Values moved so that entry t is that of t + lag in the same row; NaN where there is none."""
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
        """Pearson's between the two sides' `doubt` over these tokens of each row, (rows,); 0 where one is constant."""
        train = self.train if train is None else train
        x, y = doubt(train).masked_fill(~tokens, 0.0), doubt(rollout).masked_fill(~tokens, 0.0)
        n, mean_x, mean_y = self.count(tokens).clamp(min=1), self.mean(x, tokens), self.mean(y, tokens)
        covariance = self.total(x * y) / n - mean_x * mean_y
        variance = (self.total(x * x) / n - mean_x.square()) * (self.total(y * y) / n - mean_y.square())
        return torch.where(variance > 1e-16, covariance / variance.clamp(min=1e-16).sqrt(), 0.0)

    def enough(self, rows: Tensor) -> bool:
        """Whether some rows show more than chance shows among so many."""
        long_rows = self.count(self.valid) >= LONG_ROW
        return bool((rows & long_rows).any()) or int(rows.sum()) >= max(1.0, LEAST_SHARE * float(self.judged.sum()))

    def beyond_chance(self, rows: Tensor, telling: Tensor, matching: Tensor, *, causes: int) -> bool:
        """Return whether these rows match a cause better than noise makes the best rows of a log match the best cause.

        Chernoff's bound on the probability of this share of matches, n KL(share‖CHANCE), over every choice of rows and
        every cause.

        Args:
            rows: that show the cause, (rows,).
            telling: their tokens that tell causes apart, (N,).
            matching: the tokens that match it, (N,).
            causes: the number of causes that are looked for.
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
        """The same rows without some tokens."""
        return replace(self, keep=self.keep & ~tokens)

    def of_rows(self, rows: Tensor) -> Tensor:
        """The tokens of some rows: (rows,) bool → (N,)."""
        return rows[self.row]


@dataclass
class RepairedPairs:
    """The rows once a cause is undone, and what was found."""

    pairs: PairRows
    findings: list[Finding] = field(default_factory=list)


class Extent(TypedDict):
    """How far a cause reaches, as fields of a finding."""

    rows: int
    tokens: int
    row_share: float
    first_row: int | None
    first_step: int | None
    steps: int | None


def extent(pairs: PairRows, rows: Tensor, tokens: Tensor) -> Extent:
    """The rows and tokens that show a cause, the share of the rows that have a token at all, and the first of them.

    The first row is counted among the rows of `pairs`.
    """
    which = rows.nonzero().squeeze(-1)
    steps = which.new_zeros(0) if pairs.step is None else pairs.step[which].unique()
    return Extent(
        rows=len(which),
        tokens=int(tokens.sum()),
        row_share=len(which) / max(int(pairs.judged.sum()), 1),
        first_row=int(which[0]) if len(which) else None,
        first_step=int(steps[0]) if len(steps) else None,
        steps=len(steps) or None,
    )


def doubt(log_prob: Tensor) -> Tensor:
    """|log p| / (1 + |log p|), between 0 and 1: no single surprising token decides a sum of it."""
    size = log_prob.abs()
    return size / (1 + size)


def is_recorded(log_prob: Tensor) -> Tensor:
    """Where there is a number at all."""
    return log_prob.isfinite() & (log_prob != JSON_MINUS_INFINITY)


def is_known(log_prob: Tensor) -> Tensor:
    """Where a log-prob is a log-prob: not missing, and not above 0 but for rounding."""
    return is_recorded(log_prob) & (log_prob <= MOST_ROUNDED_UP)


def runs(tokens: Tensor, keep: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous runs of tokens among the kept ones of a row.

    Returns:
        The length of the run that each token is in, (N,), 0 outside; and the runs' number of tokens, (runs,).
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
