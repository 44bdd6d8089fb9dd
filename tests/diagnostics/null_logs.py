"""Rollout logs of small policies whose two sides differ in a known way.

The policy looks one token back: its logits are a table, (V, V). So a context is the token before, and whatever a test
does to one side (weights, noise, a prompt that fades) is one line.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

VOCABULARY = 64
NOISE = 0.02


def logits(seed=0, vocabulary=VOCABULARY):
    """The table of a policy."""
    return np.random.default_rng(seed).normal(size=(vocabulary, vocabulary)) * 2


def changed_weights(size, seed=7, vocabulary=VOCABULARY):
    """A change of the table, as an update makes: a part for the token itself, a part for the context."""
    random = np.random.default_rng(seed)
    return size * (random.normal(size=vocabulary) + random.normal(size=(vocabulary, vocabulary)))


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def rollouts(
    *,
    rows=48,
    length=120,
    seed=1,
    weights=0.0,
    noise=NOISE,
    dropout=0.0,
    fading=0.0,
    padded=0.0,
    temperature=1.0,
):
    """Rows of a log, as mappings: ids and the log-probs of both sides.

    Args:
        rows: how many.
        length: tokens of each response.
        seed: of prompts, draws and noise.
        weights: size of a fixed change of the trainer's table.
        noise: of the engine, added to its logits anew at each token.
        dropout: of the trainer, added to its logits anew at each token.
        fading: size of a change of the trainer's logits that differs from row to row and fades along the row.
        padded: size of a change in all rows but those with the longest prompt.
        temperature: of the trainer.
    """
    random = np.random.default_rng(seed)
    table, moved = logits(), changed_weights(1.0)
    shape = (rows, VOCABULARY)
    prompts = random.integers(3, 30, size=rows)
    prompts[0] = 31
    current = random.integers(VOCABULARY, size=rows)
    ids, rollout, train = [], [], []
    for place in range(length):
        base = table[current]
        mu = log_softmax(base + noise * random.normal(size=shape))
        cumulated = np.exp(mu).cumsum(-1)
        cumulated /= cumulated[:, -1:]
        drawn = (random.random(rows)[:, None] > cumulated).sum(-1)

        other = base + weights * moved[current] + dropout * random.normal(size=shape)
        other = other + fading * np.exp(-place / 8) * random.normal(size=shape)
        other = other + padded * (prompts < 31)[:, None] * moved[current]
        pi = log_softmax(other / temperature)
        each = np.arange(rows)
        ids.append(drawn)
        rollout.append(mu[each, drawn])
        train.append(pi[each, drawn])
        current = drawn
    ids, rollout, train = (np.stack(x, axis=1) for x in (ids, rollout, train))
    return [
        {
            "prompt_ids": [1] * int(prompts[row]),
            "response_ids": ids[row].tolist(),
            "rollout_log_prob": rollout[row].tolist(),
            "old_log_prob": train[row].tolist(),
        }
        for row in range(rows)
    ]


def write_rows(path: Path, rows, **columns):
    """A log of rows; `columns` are added to each. The rows were drawn from their log-probs, and the log says so."""
    columns = {"sampling": {"temperature": 1.0, "logprobs": "processed"}} | columns
    with RolloutLogWriter(path) as log:
        log.write(RolloutBatch.from_rows([{**row, **columns} for row in rows]))
    return path
