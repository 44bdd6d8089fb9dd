"""One seed per row: the random numbers of a response depend on the run's seed, the step and the row's index.

The row's index is its place in the global batch, so neither the size of a batch nor the number of ranks changes a draw.
An engine whose library has one seed per process cannot do so; it sets `row_seeds` to false.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

import torch
from torch import Tensor


def row_seed(seed: int, *names: int | str) -> int:
    """Compute a 63-bit seed from a seed and any names: the upper 63 bits of the 8-byte BLAKE2b of "seed/name/…".

    Args:
        seed: seed of the run, or of a step.
        names: the index of a row, so that equal prompts get different draws; or a purpose and a step.
    """
    digest = hashlib.blake2b("/".join(map(str, (seed, *names))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw_tokens(scores: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row with the inverse distribution function: the first v with Σ_{i ≤ v} p_i > u.

    Args:
        scores: log-probs up to a constant per row, (B, V); −inf for tokens that must not be drawn.
        uniform: u in [0, 1), (B,) float64.

    Returns:
        (B,) int64. V − 1 where a score is NaN.

    Source: Devroye (1986), "Non-Uniform Random Variate Generation", section III.2.
    """
    # In float64, because u in float32 never reaches tokens with probability below 6e-8.
    cumulative = scores.double().softmax(-1).cumsum(-1)

    # The last sum differs from 1 by rounding. `right` skips tokens with probability 0.
    threshold = (uniform * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp(max=scores.shape[1] - 1)


class RowSampler:
    """Logits processor of `transformers` that draws each row's token with a generator of its own.

    Use it as the last processor with `do_sample=False`: the drawn token is the only one left, so `generate` chooses it.

    Args:
        seed: of the step.
        rows: indices of the rows in the global batch.

    Attributes:
        scores: log-probs up to a constant from which each position was drawn, (B, V) each.
    """

    def __init__(self, seed: int, rows: Iterable[int]) -> None:
        self._generators = [random.Random(row_seed(seed, row)) for row in rows]
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw one number per row, also for rows that have ended, and return 0 for the drawn token, −inf for others."""
        self.scores.append(scores)
        numbers = [generator.random() for generator in self._generators]
        tokens = draw_tokens(scores, torch.tensor(numbers, dtype=torch.float64, device=scores.device))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)
