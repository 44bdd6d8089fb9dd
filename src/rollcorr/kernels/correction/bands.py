"""What bounds do: to weights, which they limit or set to 0, and to statistics, which they accept or reject.

Each criterion is decided on the valid tokens alone, and the decisions are AND-ed, so their order never matters. Bounds
are inclusive (`rollcorr.core.weights`). `reference` and `torch` decide here; C and Triton repeat it in their languages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.core.weights import between, divergence_bound, exceeds, log_band, masked_weights, ratio_above, ratio_below

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


def accepted_band(criterion: Criterion) -> tuple[float, float]:
    """What a criterion accepts, ends included, nats: log-ratios (k1) or divergences (k2, k3)."""
    if criterion.kind == "k1":
        return log_band(criterion.lower, criterion.upper)
    return -math.inf, divergence_bound(criterion.upper)


def applied_weights(raw: Tensor, log_weight: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """The weights inside the bounds that the threshold sets; without a threshold they are `raw`, the bounded ones."""
    if config.is_mode == "icepop":
        lower, upper = config.is_lower, config.is_upper
        return masked_weights(log_weight, lower=lower, upper=upper, safety_bound=config.safety_bound)
    return between(raw, config.rollout_is_floor, config.is_upper)


def beyond_bounds(statistic: Tensor, criterion: Criterion) -> tuple[Tensor, Tensor]:
    """Where a criterion's statistic is beyond its upper and beyond its lower bound: (too high, too low).

    Args:
        statistic: −log ρ (k1), with ρ the ratio of the token, the product of the sequence or its geometric mean; or the
            divergence (k2, k3), nats. Any shape.
        criterion: what is judged, and the bounds.
    """
    # The band of a k1 criterion is on the ratio itself. On −log ρ, a band that is not reciprocal would be inverted.
    if criterion.kind == "k1":
        return ratio_above(-statistic, criterion.upper), ratio_below(-statistic, criterion.lower)
    return exceeds(statistic, criterion.upper), torch.zeros_like(statistic, dtype=torch.bool)
