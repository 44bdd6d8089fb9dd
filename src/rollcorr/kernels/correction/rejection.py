"""What a criterion rejects: the statistics that lie beyond its bounds.

Each criterion is decided on the valid tokens alone, and the decisions are AND-ed, so their order never matters. Bounds
are inclusive (`rollcorr.core.bounds`). `reference` and `torch` decide here; C and Triton repeat it in their languages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollcorr.core.bounds import exceeds, ratio_above, ratio_below

if TYPE_CHECKING:
    from rollcorr.config import Criterion


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
