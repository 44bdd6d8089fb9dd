"""Tokens of a log's row sample, with their value on each axis and the noise that a null predicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.health.evidence import FIRST_STEP
from rollcorr.diagnostics.null.excess import k3_by_surprise
from rollcorr.diagnostics.null.mismatch_profile import SURPRISE_BINS, MismatchProfile, surprise_bins
from rollcorr.diagnostics.null.token_ratios import k3_of, turns_of
from rollcorr.diagnostics.null.token_share import TokenShare, TokenSums
from rollcorr.diagnostics.provenance.pair_sample import PairSample, SampleRow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


STARTED, FEWEST = 2.0, 200
"""Ratio of a step's k3 to the null's from which the mismatch has started, and the fewest tokens of a comparison."""
CUT, SPARED = 0.99, 0.39
"""Quantile of |d| at which d is clipped, so that outliers do not dominate. And the ratio of |d| beside an equal token
to |d| elsewhere, below which such tokens are spared: up to 0.24 where one side is displaced, else 0.63 or more."""


@dataclass(frozen=True, eq=False)
class ExcessTokens:
    """Sampled tokens with both log-probs, packed; each array is (n,).

    Attributes:
        train: log π, nats.
        rollout: log μ, nats.
        k3: exp(d) − 1 − d with d = log π − log μ, nats.
        noise: k3 predicted by the null at this probability, nats.
        places: axis name → value of each token; axes that the log does not record are absent.
    """

    train: Floats
    rollout: Floats
    k3: Floats
    noise: Floats
    places: dict[str, Ints]

    @classmethod
    def of(
        cls, sample: PairSample, null: MismatchProfile, *, leave_out: tuple[int, int] | None = None
    ) -> ExcessTokens | None:
        """Collect the tokens of a row sample.

        Args:
            sample: rows of the log.
            null: profile that predicts the noise.
            leave_out: first and last step of the null, whose rows are skipped; defaults to no steps.

        Returns:
            The tokens, or None if no row contains a token with both log-probs.
        """
        kept = [(i, row) for i, row in sorted(sample.rows.items()) if leave_out is None or not row.within(leave_out)]
        rows = {i: row.located() for i, row in kept}
        known = [row.known for row in rows.values()]
        if not any(len(where) for where in known):
            return None

        # Shares need a value for every token: drop an axis that any row lacks.
        columns = {}
        for axis, value in _AXES.items():
            parts = [value(index, row, where) for (index, row), where in zip(rows.items(), known, strict=True)]
            present = [part for part in parts if part is not None]
            if len(present) == len(parts):
                columns[axis] = np.concatenate(present).astype(np.int64)
        train, rollout = (
            np.concatenate([side.double().numpy()[where] for side, where in zip(sides, known, strict=True)])
            for sides in zip(*((row.train, row.rollout) for row in rows.values()), strict=True)
        )
        noise = k3_by_surprise(null)[surprise_bins(-rollout.astype(np.float32))]
        return cls(train, rollout, k3_of(train - rollout), noise, columns)

    @property
    def d(self) -> Floats:
        """Return log π − log μ, nats."""
        return self.train - self.rollout

    def chosen(self, which: NDArray[np.bool_]) -> ExcessTokens:
        """Return the tokens where `which`, (n,), is True."""
        places = {axis: values[which] for axis, values in self.places.items()}
        return ExcessTokens(self.train[which], self.rollout[which], self.k3[which], self.noise[which], places)

    @property
    def ratio(self) -> float:
        """Return Σ k3 over the Σ k3 that the null predicts."""
        return float(self.k3.sum() / max(self.noise.sum(), 1e-12))

    @property
    def first_step(self) -> float:
        """Return `ratio` before any update; NaN if the log starts later or has few tokens in that step."""
        step = self.places.get("step")
        is_first = np.zeros(0, dtype=np.bool_) if step is None or step.min() > FIRST_STEP else step == step.min()
        return self.chosen(is_first).ratio if is_first.sum() >= FEWEST else math.nan

    @property
    def since_start(self) -> ExcessTokens:
        """Return the tokens from the first step above the null on: a sampler may start with correct weights."""
        if "step" not in self.places:
            return self
        _, step = np.unique(self.places["step"], return_inverse=True)
        step = step.reshape(-1)
        is_hit = np.bincount(step, self.k3) >= STARTED * np.maximum(np.bincount(step, self.noise), 1e-12)
        return self.chosen(step >= is_hit.argmax())

    @cached_property
    def clipped(self) -> Floats:
        """Return d, clipped at its quantile `CUT`, nats."""
        cut = float(np.quantile(np.abs(self.d), CUT))
        return np.clip(self.d, -cut, cut)

    def share(self, axis: str) -> TokenShare:
        """Compute the share of Var(d) explained by the value on an axis; without tokens if the axis is not recorded."""
        values = self.places.get(axis)
        if values is None or not len(self):
            return TokenSums.empty().share()
        _, number = np.unique(values, return_inverse=True)
        return TokenSums.of(number.reshape(-1), self.clipped, limit=1 << 30).share()

    def of_seen(self, *, as_likely: bool = False) -> float:
        """Compute the share of Var(d) that "seen before" explains among tokens of one id; 0 if not recorded.

        Args:
            as_likely: compare tokens of one id whose probability is of one power of 2.
        """
        if "seen" not in self.places:
            return 0.0
        kind = self.places["ids"]
        if as_likely:
            kind = kind * SURPRISE_BINS + surprise_bins(-self.rollout.astype(np.float32))
        return abs(self._share_within(kind, self.places["seen"]))

    def share_of_equal_neighbors(self) -> float:
        """Compute the share of Var(d), at equal positions, that equality with the previous or next id explains.

        The larger of both; 0 unless such tokens are spared (`SPARED`); negative if their d is lower.
        """
        repeats, size = self.places.get("repeats", np.zeros(len(self), dtype=np.int64)), np.abs(self.clipped)
        equal = [(repeats & side) > 0 for side in (1, 2)]  # bit 1: equals the previous id, bit 2: the next
        spared = [x for x in equal if x.any() and size[x].mean() < SPARED * size[~x].mean()]
        return max((self._share_within(self.places["positions"], x) for x in spared), default=0.0)

    def _share_within(self, kind: Ints, which: NDArray[np.generic]) -> float:
        """Compute the share of Var(d) that `which`, (n,), explains within a kind; negative if it lowers d."""
        d, flag = self.clipped, which.astype(np.float64)
        _, number, count = np.unique(kind, return_inverse=True, return_counts=True)
        number = number.reshape(-1)
        own_d, own_flag = (x - (np.bincount(number, x) / count)[number] for x in (d, flag))
        spread = float(own_flag @ own_flag) * float(np.square(d - d.mean()).sum())
        along = float(own_d @ own_flag)
        return along * abs(along) / spread if spread > 0 else 0.0

    def __len__(self) -> int:
        return len(self.k3)


def _bigrams(ids: NDArray[np.generic]) -> Ints:
    """Return each bigram, a token and its predecessor, as one number; the first token of a row has predecessor −1."""
    own = ids.astype(np.int64)
    return (np.append(-1, own[:-1]) << 32) | own


def _equal_neighbors(ids: NDArray[np.generic]) -> Ints:
    """Return 1 where a token equals its predecessor, plus 2 where it equals its successor."""
    equal = ids[1:] == ids[:-1]
    return np.append(False, equal) + 2 * np.append(equal, False)


_Axis = Callable[[int, SampleRow, Ints], NDArray[np.generic] | None]
_AXES: dict[str, _Axis] = {
    "rows": lambda index, row, where: np.full(len(where), index),
    "positions": lambda index, row, where: where,
    "from_end": lambda index, row, where: where[-1:] - where if len(where) else where,
    "ids": lambda index, row, where: None if row.response_ids is None else row.response_ids.numpy()[where],
    "seen": lambda index, row, where: None if row.context is None else row.context.seen.numpy()[where],
    "prefix": lambda index, row, where: None if row.context is None else row.context.prefix.numpy()[where],
    "prompt_length": lambda index, row, where: None if row.context is None else np.full(len(where), row.context.length),
    "context_length": lambda index, row, where: None if row.context is None else row.context.length + where,
    "pair": lambda index, row, where: None if row.response_ids is None else _bigrams(row.response_ids.numpy())[where],
    "context": lambda index, row, where: None if row.response_ids is None else row.contexts[where],
    "pair_at": lambda index, row, where: (
        None if row.response_ids is None else _bigrams(row.response_ids.numpy())[where] * 1_000_003 + where
    ),
    "repeats": lambda index, row, where: (
        None if row.response_ids is None else _equal_neighbors(row.response_ids.numpy())[where]
    ),
    "turn": lambda index, row, where: turns_of(row.mask.numpy().astype(np.bool_), np.array([len(row.mask)]))[where],
    "version": lambda index, row, where: None if row.versions is None else row.versions.numpy()[where],
    "step": lambda index, row, where: None if row.step is None else np.full(len(where), row.step),
}
