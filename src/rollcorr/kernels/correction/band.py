"""The band that the weights' exceedance shares are counted against."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollcorr.config import RolloutCorrectionConfig

_MATCHING_SCOPE = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}


def exceedance_band(config: RolloutCorrectionConfig) -> tuple[float | None, float | None]:
    """(lower, upper) on the ratio: (1/C, C) when truncating, the band of IcePop, else that of the level's k1 criterion.

    (None, None) when nothing bounds the weights: the shares are then absent.
    """
    if config.is_mode == "truncate" and config.is_upper is not None:
        return 1.0 / config.is_upper, config.is_upper
    if config.is_mode == "icepop":
        return config.is_lower, config.is_upper
    for criterion in config.criteria:
        if criterion.kind == "k1" and criterion.scope == _MATCHING_SCOPE.get(config.rollout_is or ""):
            return criterion.lower, criterion.upper
    return None, None
