"""Batches of the suite: rows of tokens in plain Python, so that a counterexample prints and shrinks.

A token is (log π, log μ, valid), in nats. Rows may differ in length: the tensors of a call are padded with zeros.
Log-probs are rounded to float32, so the expected numbers and the function start from the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import torch
from torch import Tensor

Token = tuple[float, float, bool]
Rows = tuple[tuple[Token, ...], ...]

OUTSIDE: Token = (0.0, 0.0, False)
FINEST = 6  # digits of a drawn log-ratio


def make_token(log_ratio: float, log_mu: float = -1.0) -> Token:
    """Return a valid token with this log-ratio; both log-probs are at most 0. A NaN makes log π NaN."""
    log_mu = log_mu - max(0.0, log_ratio)
    return float(np.float32(log_mu + log_ratio)), float(np.float32(log_mu)), True


def log_ratio(token: Token) -> float:
    """Return d = log π − log μ, nats."""
    return token[0] - token[1]


def draw_rows(random: Random, *, scale: float | None = None, special: tuple[float, ...] = ()) -> Rows:
    """Draw up to 4 rows of up to 9 tokens, with holes; each row has a valid token.

    Args:
        random: generator.
        scale: standard deviation of the log-ratios, nats; by default one of 0.05, 0.5 and 1.5 per batch.
        special: log-ratios that replace a fifth of the drawn ones.
    """
    scale = random.choice([0.05, 0.5, 1.5]) if scale is None else scale

    def token() -> Token:
        d = random.choice(special) if special and random.random() < 0.2 else round(random.gauss(0.0, scale), FINEST)
        return make_token(d, -round(random.expovariate(1.0), 2)) if random.random() < 0.85 else OUTSIDE

    lengths = [random.randint(1, 8) for _ in range(random.randint(1, 4))]
    return tuple((make_token(0.0), *(token() for _ in range(length))) for length in lengths)


def padded(rows: Rows, *, columns: int, value: float) -> Rows:
    """Return rows of one length with more columns, whose log-probs outside the mask are (value, 2 value)."""
    length, outside = max(map(len, rows)) + columns, (value, 2 * value, False)
    filled = (tuple(token if token[2] else outside for token in row) for row in rows)
    return tuple(row + (outside,) * (length - len(row)) for row in filled)


def tensors_of(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return (train_log_prob, rollout_log_prob, response_mask): (B, T) float32, float32 and bool."""
    full = [[*row, *[OUTSIDE] * (max(map(len, rows)) - len(row))] for row in rows]
    values = torch.tensor(full, dtype=torch.float64, device="cpu")
    return values[..., 0].float(), values[..., 1].float(), values[..., 2].bool()


def smallest(rows: Rows, fails: Callable[[Rows], bool]) -> Rows:
    """Make a failing batch smaller until no step of `_simpler` keeps the failure."""
    smaller = next(filter(fails, _simpler(rows)), None)
    return rows if smaller is None else smallest(smaller, fails)


def _simpler(rows: Rows) -> Iterator[Rows]:
    # One row or token less, one valid token less, or shorter numbers in one token.
    for i, row in enumerate(rows):
        yield from [rows[:i] + rows[i + 1 :]] if len(rows) > 1 else []
        for t, token in enumerate(row):
            yield from [(*rows[:i], row[:t] + row[t + 1 :], *rows[i + 1 :])] if len(row) > 1 else []
            for other in _simpler_tokens(token):
                yield (*rows[:i], (*row[:t], other, *row[t + 1 :]), *rows[i + 1 :])


def _simpler_tokens(token: Token) -> Iterator[Token]:
    # Outside the mask, or with log μ = −1 and a rounded log-ratio if that prints shorter.
    digits = range(FINEST + 1) if math.isfinite(log_ratio(token)) else []
    others = [OUTSIDE, *(make_token(round(log_ratio(token), n)) for n in digits)]
    # Each step prints fewer characters, so `smallest` ends.
    sizes = [len(f"{np.float32(x[0])}{np.float32(x[1])}") + 9 * x[2] for x in (token, *others)]
    yield from (other for other, size in zip(others, sizes[1:], strict=True) if size < sizes[0])
