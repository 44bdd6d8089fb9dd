"""Pools of log-ratios of healthy sequences, and the nulls that they make.

A pool is (rows, T). The synthetic one has rows of different noise, heavy tails and a shift of each row, so that tokens
of a row depend on each other. The laboratory's is two Markov policies that differ by noise.
"""

from __future__ import annotations

import numpy as np
import torch

from rollcorr.diagnostics import MismatchNull, MismatchProfile
from rollcorr.simulation import sample_rows
from rollcorr.simulation.mismatches import pair_at_kl

SAMPLED_TOKENS = 1 << 17


def synthetic_pool(rows, length, seed, sigma=0.02, group=1, shift=0.05):
    """d of healthy rows: a Student t with 5 degrees of freedom, times a σ of the group, plus a shift of the group."""
    random = np.random.default_rng(seed)
    own = np.repeat(sigma * np.exp(0.5 * random.normal(size=(rows // group, 1))), group, axis=0)
    d = own * random.standard_t(5, size=(rows, length)) * np.sqrt(3 / 5)
    return d - own**2 / 2 + sigma * shift * np.repeat(random.normal(size=(rows // group, 1)), group, axis=0)


def laboratory_pool(rows, length, seed):
    """d of sequences of a Markov policy that differs from the trainer's by noise; prompts do not exist there."""
    pair = pair_at_kl("noise", 2e-4, length=length)
    drawn = sample_rows(pair, rows, torch.Generator().manual_seed(seed))
    return (drawn.train_log_prob - drawn.rollout_log_prob).numpy()


def null_of(pool, *, sampled=SAMPLED_TOKENS, group=0):
    """The null of a pool, with tokens of as many rows as a log's sample would keep; `group` rows have one prompt."""
    rows, length = pool.shape
    rollout = np.full(rows * length, -1.0, dtype=np.float32)
    train = (rollout + pool.ravel()).astype(np.float32)
    prompts = np.arange(rows) // group if group else None
    profile = MismatchProfile.of(
        train, rollout, np.ones(len(train), dtype=bool), np.full(rows, length), prompts=prompts
    )
    kept = pool[: sampled // length]
    return MismatchNull(name="pool", kind="log", profile=profile, share=profile.share, sample=tuple(kept))


def spliced(pool, length):
    """Rows put end to end to sequences of a length, each row used once."""
    parts = length // pool.shape[1]
    return pool[: len(pool) // parts * parts].reshape(-1, length)


def statistics_of(pool):
    """What criteria look at, for each sequence: ratios for k1 and the veto, nats for k2 and k3."""
    total, square, k3 = pool.sum(1), pool**2 / 2, np.expm1(pool) - pool
    return {
        "seq_sum_k1": np.exp(total),
        "sequence band": np.exp(total),
        "sequence ceiling": np.exp(total),
        "seq_mean_k1": np.exp(total / pool.shape[1]),
        "seq_sum_k2": square.sum(1),
        "seq_mean_k2": square.mean(1),
        "seq_max_k2": square.max(1),
        "seq_sum_k3": k3.sum(1),
        "seq_mean_k3": k3.mean(1),
        "seq_max_k3": k3.max(1),
        "veto": np.exp(pool.min(1)),
    }


def rejected_share(limit, values):
    """The share of values outside a threshold, which is known to float32."""
    outside = np.zeros(len(values), dtype=bool)
    if limit.upper is not None:
        outside |= values > limit.upper.value * (1 + 1e-5)
    if limit.lower is not None:
        outside |= values < limit.lower.value * (1 - 1e-5)
    return float(outside.mean())
