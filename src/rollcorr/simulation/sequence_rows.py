"""Sequences as rows: sampled from μ, or all of them with their exact probability.

Three functions create the same type of rows, so every measurement accepts all three:

    sample_rows      n draws from μ; any length
    every_sequence   each sequence that μ can sample, V^T of them at most; any policy, short
    every_count      one sequence for each vector of token counts, where tokens are independent (S = 1); V small, long

`every_count` is exact because with one state the order of tokens does not matter: d's sum, mean and maximum, the reward
and the score are invariant.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollcorr.simulation.mismatches import PolicyPair

MOST_ROWS = 300_000
"""Maximum number of rows for exact sums, which limits memory and time; above it, sample."""


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Rows of tokens with all inputs of a trainer, and the probability of each row under μ.

    Attributes:
        pair: the pair of policies behind the rows.
        tokens: (n, T) int64.
        states: (n, T) int64, the state in which each token was sampled.
        train_log_prob: log π, (n, T) float64, nats.
        rollout_log_prob: log μ as reported by the sampler, same shape and unit.
        rewards: (n,) float64.
        probability: (n,) float64, sums to 1: μ(y), or 1/n for sampled rows.
        exact: True if the rows are all sequences, so that sums over them are expectations.
    """

    pair: PolicyPair
    tokens: Tensor
    states: Tensor
    train_log_prob: Tensor
    rollout_log_prob: Tensor
    rewards: Tensor
    probability: Tensor
    exact: bool

    def __len__(self) -> int:
        """n."""
        return self.tokens.shape[0]

    @property
    def mask(self) -> Tensor:
        """All-ones mask, (n, T) bool: every token was sampled."""
        return torch.ones_like(self.tokens, dtype=torch.bool)

    @property
    def advantages(self) -> Tensor:
        """A = R − E_μ[R] + the pair's offset, (n,). The mean is exact, so it adds no noise."""
        return self.rewards - self.pair.baseline + self.pair.advantage_offset

    def pick(self, index: slice | Tensor) -> SequenceRows:
        """Return a subset of the rows. The probabilities do not change, so they may no longer sum to 1.

        Args:
            index: rows to return, in order: a slice, or 1-D int64 or bool.
        """
        return replace(self, **{name: getattr(self, name)[index] for name in _TENSOR_FIELDS})

    def score_sums(self, coefficients: Tensor) -> Tensor:
        """Compute Σ_t c_t ∇_θ log π(y_t | s_t) of each row. (n, S, V) float64.

        ∇ log π(a | s) is e_a − π(· | s) in row s, else 0.

        Args:
            coefficients: c, of shape (n, T).
        """
        states, vocabulary = self.pair.trainer.logits.shape
        rows = torch.arange(len(self), device=self.tokens.device)[:, None]
        index = (rows * states + self.states) * vocabulary + self.tokens
        size = len(self) * states * vocabulary
        sums = torch.bincount(index.flatten(), weights=coefficients.flatten(), minlength=size)
        sums = sums.view(len(self), states, vocabulary)
        return sums - sums.sum(-1, keepdim=True) * self.pair.trainer.log_probs.exp()

    def score_squares(self) -> Tensor:
        """|∇_θ log π(y_t | s_t)|² = 1 − 2 π(y_t | s_t) + Σ_a π(a | s_t)², (n, T)."""
        probabilities = self.pair.trainer.log_probs.exp()
        table = 1 - 2 * probabilities + probabilities.square().sum(-1, keepdim=True)
        return table[self.states, self.tokens]


_TENSOR_FIELDS = ("tokens", "states", "train_log_prob", "rollout_log_prob", "rewards", "probability")


def sample_rows(pair: PolicyPair, count: int, generator: torch.Generator) -> SequenceRows:
    """Sample `count` sequences from μ.

    Args:
        pair: sampler and trainer.
        count: B, number of sequences.
        generator: random generator for the tokens.

    Returns:
        B rows, each with probability 1/B.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"count must be >= 1; got {count}")
    cumulative = pair.rollout.log_probs.exp().cumsum(-1)
    tokens = torch.zeros(count, pair.length, dtype=torch.int64, device="cpu")
    state = torch.zeros(count, dtype=torch.int64, device="cpu")
    for t in range(pair.length):
        # Rounding can make the last sum less than 1. Scale by it, so that no draw is beyond the last possible token.
        thresholds = cumulative[state]
        draw = torch.rand(count, 1, dtype=torch.float64, generator=generator, device="cpu") * thresholds[:, -1:]
        tokens[:, t] = (thresholds <= draw).sum(-1)
        state = pair.rollout.next_state[state, tokens[:, t]]
    probability = torch.full((count,), 1 / count, dtype=torch.float64, device="cpu")
    return _build_rows(pair, tokens, probability, exact=False)


def mixed_rows(rows: SequenceRows, others: SequenceRows, share: float) -> SequenceRows:
    """Replace a share of sampled rows, in [0, 1], by rows of a second sampler with the same trainer: a policy mixture.

    Each sequence reports the log-probs of the policy that sampled it, as when some workers are broken or stale. The
    mixture keeps the pair of `rows`, and so its baseline.
    """
    count = round(share * len(rows))
    joined: dict[str, Any] = {
        name: torch.cat([getattr(rows, name)[count:], getattr(others, name)[:count]]) for name in _TENSOR_FIELDS
    }

    # The jackknife groups rows by position, so interleave both parts.
    places = torch.randperm(len(rows), generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")
    return replace(rows, **joined).pick(places)


def exact_rows(pair: PolicyPair) -> SequenceRows | None:
    """Return the rows of `every_count` or `every_sequence`, whichever fits into `MOST_ROWS`; None if neither does."""
    vocabulary = pair.trainer.vocabulary
    count_vectors = math.comb(pair.length + vocabulary - 1, vocabulary - 1)
    if pair.trainer.states == 1 and count_vectors <= MOST_ROWS:
        return every_count(pair)
    if vocabulary**pair.length <= MOST_ROWS:
        return every_sequence(pair)
    return None


def every_sequence(pair: PolicyPair) -> SequenceRows:
    """Return each of the V^T sequences that μ can sample, with its probability μ(y)."""
    token = torch.arange(pair.trainer.vocabulary, device="cpu")
    tokens = torch.cartesian_prod(*[token] * pair.length).view(-1, pair.length)
    rows = _build_rows(pair, tokens, torch.ones(len(tokens), dtype=torch.float64, device="cpu"), exact=True)
    log_probability = pair.rollout.log_probs[rows.states, rows.tokens].sum(-1)
    return _drop_impossible(replace(rows, probability=log_probability.exp()))


def every_count(pair: PolicyPair) -> SequenceRows:
    """Return one sequence for each vector of token counts, with the total probability of all its orders.

    Counts are only sufficient for independent tokens: S = 1.
    """
    counts = _compositions(pair.length, pair.trainer.vocabulary)
    log_mu = pair.rollout.log_probs[0]
    log_probability = (counts * log_mu).masked_fill(counts == 0, 0.0).sum(-1)
    log_probability = log_probability + math.lgamma(pair.length + 1) - torch.lgamma(counts.double() + 1).sum(-1)

    # The token at position t is the first with a cumulative count above t.
    position = torch.arange(pair.length, device="cpu").expand(len(counts), -1).contiguous()
    tokens = torch.searchsorted(counts.cumsum(-1), position, right=True)
    return _drop_impossible(_build_rows(pair, tokens, log_probability.exp(), exact=True))


def _build_rows(pair: PolicyPair, tokens: Tensor, probability: Tensor, *, exact: bool) -> SequenceRows:
    """Compute the states of the tokens, and look up all remaining values."""
    states = torch.zeros_like(tokens)
    for t in range(1, pair.length):
        states[:, t] = pair.trainer.next_state[states[:, t - 1], tokens[:, t - 1]]
    return SequenceRows(
        pair,
        tokens,
        states,
        pair.trainer.log_probs[states, tokens],
        pair.reported_log_probs[states, tokens],
        pair.rule.of_totals(pair.rule.points[states, tokens].sum(-1), pair.length),
        probability,
        exact,
    )


def _drop_impossible(rows: SequenceRows) -> SequenceRows:
    """Drop rows of probability 0: their log μ is −inf, and no sampler reports that."""
    return rows.pick(rows.probability > 0)


def _compositions(total: int, parts: int) -> Tensor:
    """Return every vector of `parts` counts ≥ 0 that sum to `total`, (n, parts) int64."""
    # Stars and bars: parts − 1 bars among total + parts − 1 places, and the counts are the stars between them.
    places = total + parts - 1
    bars = itertools.combinations(range(places), parts - 1)
    edges = torch.tensor([(-1, *chosen, places) for chosen in bars], device="cpu")
    return edges.diff(dim=1) - 1
