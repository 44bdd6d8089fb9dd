"""The log-ratios of sampled rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.provenance.pair_sample import SampleRow


def log_ratios(rows: Iterable[SampleRow]) -> list[NDArray[np.float64]]:
    """d of the valid tokens of each row, where both log-probs are known."""
    found = []
    for row in rows:
        log_ratio = (row.train.double() - row.rollout)[row.mask]
        found.append(log_ratio[log_ratio.isfinite() & (log_ratio.abs() < 100)].numpy())
    return found
