"""Bands on the weights: the one that exceedance shares are counted against, and the one that IcePop keeps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rollcorr.core.bounds import log_band

if TYPE_CHECKING:
    from rollcorr.config import RolloutCorrectionConfig

_MATCHING_SCOPE = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}


def exceedance_band(config: RolloutCorrectionConfig) -> tuple[float | None, float | None]:
    """(lower, upper) on the ratio: (1/C, C) when truncating, the band of IcePop, else that of the level's k1 criterion.

    A floor stands in place of 1/C. (None, None) when nothing bounds the weights: the shares are then absent.
    """
    if config.is_mode == "truncate":
        floor, ceiling = config.rollout_is_floor, config.is_upper
        return (1.0 / ceiling if floor is None and ceiling is not None else floor), ceiling
    if config.is_mode == "icepop":
        return config.is_lower, config.is_upper
    for criterion in config.criteria:
        if criterion.kind == "k1" and criterion.scope == _MATCHING_SCOPE.get(config.rollout_is or ""):
            return criterion.lower, criterion.upper
    return None, None


def zeroing_band(config: RolloutCorrectionConfig) -> tuple[float, float]:
    """The log weights to which IcePop gives a weight, ends included, nats; infinite ends for another mode.

    The safety bound acts first and IcePop judges the clamped log weight. So an end of the band that the clamp does not
    let a weight reach cuts nothing, and a band that no clamped weight reaches is empty: (inf, −inf).
    """
    if config.is_mode != "icepop":
        return -math.inf, math.inf
    low, high = log_band(config.is_lower, config.is_upper)
    bound = config.safety_bound
    if low > bound or high < -bound:
        return math.inf, -math.inf
    return (low if low > -bound else -math.inf), (high if high < bound else math.inf)
