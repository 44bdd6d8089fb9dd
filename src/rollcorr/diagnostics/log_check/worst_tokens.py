"""The tokens with the largest k3 of a log: a few of them may carry most of a mismatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.token_ratios import TokenRatios

MOST = 10
"""Tokens that are kept."""
EACH, CARRY = 0.05, 0.5
"""Share of k3 of one token from which it stands out, and of all such tokens from which they carry the mismatch."""
FEW = 1e-3
"""Share of the tokens up to which they are few."""


class HeavyToken(NamedTuple):
    """One token.

    Attributes:
        row: of the log, counted from 0.
        position: in the response, counted from 0.
        token_id: of the token; −1 where the log records none.
        rollout_log_prob: log μ, nats.
        train_log_prob: log π, nats.
        share: of the k3 of all tokens.
    """

    row: int
    position: int
    token_id: int
    rollout_log_prob: float
    train_log_prob: float
    share: float


@dataclass(frozen=True, eq=False)
class WorstTokens:
    """The tokens with the largest k3, which merge.

    Attributes:
        values: (6, n): k3, then the fields of `HeavyToken` up to log π, by falling k3; equal ones in the log's order.
    """

    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros((6, 0)))

    @classmethod
    def of(cls, ratios: TokenRatios) -> WorstTokens:
        """Return those of a packed batch."""
        k3 = ratios.k3
        least = 0.0 if len(k3) <= MOST else float(np.partition(k3, -MOST)[-MOST])
        token = np.flatnonzero((k3 >= least) & ratios.valid & (k3 > 0))
        token = token[np.argsort(-k3[token], kind="stable")[:MOST]]
        ends = ratios.lengths.cumsum()
        row = np.searchsorted(ends, token, side="right")
        position = token - (ends - ratios.lengths)[row]
        rollout = -ratios.surprise[token].astype(np.float64)
        own = np.full(len(token), -1) if ratios.ids is None else ratios.ids[token]
        return cls(np.stack([k3[token], ratios.index[row], position, own, rollout, rollout + ratios.d[token]]))

    def merge(self, later: WorstTokens) -> WorstTokens:
        """Return those of both stretches of the log together; `later` comes after."""
        both = np.concatenate([self.values, later.values], axis=1)
        return WorstTokens(both[:, np.argsort(-both[0], kind="stable")[:MOST]])

    def carriers(self, total: float, tokens: int) -> tuple[HeavyToken, ...]:
        """Return the few tokens that carry the log's k3, the worst first; empty if no few do.

        Args:
            total: Σ k3 of the log, nats.
            tokens: its valid tokens.
        """
        share = self.values[0] / total if total > 0 else self.values[0]
        number = int((share >= EACH).sum())
        if share[:number].sum() < CARRY or number > FEW * tokens:
            return ()
        columns = zip(*self.values[1:, :number].tolist(), share[:number].tolist(), strict=True)
        return tuple(
            HeavyToken(int(row), int(place), int(own), mu, pi, part) for row, place, own, mu, pi, part in columns
        )
