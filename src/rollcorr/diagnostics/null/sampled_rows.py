"""What needs whole rows, from the spread sample of a log: how far the context decides d.

Two fixed policies differ by a function of the context: d of the same token after the same token is alike. A policy that
draws anew for each forward pass, as dropout does, differs by noise: nothing is alike, however large it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.token_share import TokenShare, TokenSums
from rollcorr.diagnostics.provenance.pair_sample import PairSample, SampleRow

CUT = 0.99
"""Quantile of |d| at which d is cut, so that no few tokens decide."""


def log_ratios(rows: Iterable[SampleRow]) -> list[NDArray[np.float64]]:
    """d of the valid tokens of each row, where both log-probs are known."""
    found = []
    for row in rows:
        log_ratio = (row.train.double() - row.rollout)[row.mask]
        found.append(log_ratio[log_ratio.isfinite() & (log_ratio.abs() < 100)].numpy())
    return found


def context_share(sample: PairSample, *, leave_out: tuple[int, int] | None = None) -> TokenShare:
    """How much of Var(d) a token and the one before it explain together.

    Args:
        sample: rows of the log; without ids the answer has no tokens.
        leave_out: first and last step whose rows are left out.
    """
    pairs: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float64]] = []
    for row in sample.rows.values():
        outside = leave_out is None or row.step is None or not leave_out[0] <= row.step <= leave_out[1]
        if row.response_ids is None or not outside or len(row.train) < 2:
            continue
        log_ratio = (row.train.double() - row.rollout).numpy()[1:]
        known = row.mask.numpy()[1:] & np.isfinite(log_ratio) & (np.abs(log_ratio) < 100)
        ids = row.response_ids.numpy().astype(np.int64)
        pairs.append(((ids[:-1] << 32) | ids[1:])[known])
        values.append(log_ratio[known])
    if not pairs or not sum(map(len, values)):
        return TokenSums.empty().share()

    log_ratio = np.concatenate(values)
    cut = float(np.quantile(np.abs(log_ratio), CUT))
    _, number = np.unique(np.concatenate(pairs), return_inverse=True)
    return TokenSums.of(number.reshape(-1), np.clip(log_ratio, -cut, cut), limit=1 << 30).share()
