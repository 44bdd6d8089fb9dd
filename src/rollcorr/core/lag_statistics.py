"""The mismatch by lag, the age in versions of the weights that sampled: the engine's own, and what staleness adds.

Tokens of lag 0 were sampled and scored with the same weights, so their k3 is the engine's. What the other tokens have
above it is staleness. The sums merge over micro-batches, ranks and logs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollcorr.core.divergence import k3
from rollcorr.core.host_statistics import HostStatistics
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics
from rollcorr.core.metric_registry import PREFIX, finalize
from rollcorr.core.metric_tables import LAG_METRICS

LAG_ROWS: dict[str, tuple[str, ...]] = {
    "sums": ("lag/tokens", "lag/k3", "lag/versions", "lag/fresh_tokens", "lag/fresh_k3"),
    "moments": (),
    "extremes": (),
    "histograms": (),
    "tops": (),
}
"""Tokens of known lag, their Σ k3 and Σ lag; those of lag 0, and their Σ k3."""

SLOW = 0.75
"""Versions per step below which versions count something rarer than steps, such as weight syncs."""
_NEVER = -(1 << 60)


class PolicyClock:
    """The version of the policy at each step, which logs do not record.

    It is step − o with the offset o = min(1, smallest step − version seen): the policy of step s has version s − 1, or
    s where a token of version s was seen. Versions that rise, but always by less than `SLOW` per step or by 1, count
    weight syncs: then it is the newest version seen. Steps before the first rise do not count, as a queue may fill in
    them. A sampler that gets new weights every k steps jumps by k instead, and a version that never rises counts as old
    weights. No value is read on the host.

    Attributes:
        newest: the newest version seen, 0-d.
    """

    def __init__(self) -> None:
        self.newest = torch.tensor(_NEVER, device="cpu")
        self._offset = torch.tensor(1, device="cpu")
        self._slow = torch.tensor(False, device="cpu")
        self._steady = torch.tensor(True, device="cpu")
        self._first, self._before_rise = self.newest, self._offset  # the first version, and its last step
        self._seen: list[tuple[int, Tensor]] = []  # the previous and the current step

    def see(self, step: int, newest: Tensor) -> None:
        """Add the newest version that sampled in a part of a step, 0-d int64."""
        device = newest.device
        self.newest = torch.maximum(self.newest.to(device), newest)
        self._offset = torch.minimum(self._offset.to(device), step - newest)
        if not self._seen or step != self._seen[-1][0]:
            self._seen = [*self._seen[-1:], (step, self.newest)]
        self._seen[-1] = (step, self.newest)

        # Parts of the first step show no rise yet.
        before_step, before = self._seen[0]
        before = before.to(device)
        self._first = before if len(self._seen) == 1 else self._first.to(device)
        self._before_rise = torch.where(before == self._first, before_step, self._before_rise.to(device))
        rise, jump = self.newest - self._first, self.newest - before
        self._steady = self._steady.to(device) & (jump <= max(1, SLOW * (step - before_step)))
        self._slow = self._steady & (rise > 0) & (rise < SLOW * (step - self._before_rise))

    def version(self, step: int, newest: Tensor) -> Tensor:
        """Return the policy's version at a step, 0-d, by the newest version seen until then."""
        return torch.where(self._slow, newest, step - self._offset)


def newest_version(versions: Tensor, mask: Tensor) -> Tensor:
    """Return the newest version of the valid tokens, 0-d int64."""
    # Padding has no version, and a batch may have no token.
    return torch.where(mask, versions, _NEVER).amax() if versions.numel() else torch.full_like(versions.sum(), _NEVER)


def lag_statistics(log_ratio: Tensor, mask: Tensor, lag: Tensor) -> Statistics:
    """Compute the sums of `LAG_ROWS`: k3 = expm1(d) − d by whether the lag is 0.

    Args:
        log_ratio: d = log π − log μ, nats, any shape.
        mask: non-zero on valid tokens, the same shape. Tokens without a finite d do not count.
        lag: version of the policy minus version of the token, the same shape; below 0 counts as 0.
    """
    measured = (mask != 0) & log_ratio.isfinite()
    of_token = k3(torch.where(measured, log_ratio, 0.0).double())
    fresh = measured & (lag <= 0)
    age = torch.where(measured, lag, 0).clamp(min=0)
    rows = (measured.sum(), of_token.sum(), age.sum(), fresh.sum(), torch.where(fresh, of_token, 0.0).sum())
    return Statistics.from_vector(LAG_ROWS, torch.stack([row.to(STATISTICS_DTYPE) for row in rows]))


def lag_sums(tokens: float, k3_sum: float, versions: float, fresh_tokens: float, fresh_k3: float) -> Statistics:
    """Return statistics from their sums, in the order of `LAG_ROWS`."""
    row = (tokens, k3_sum, versions, fresh_tokens, fresh_k3)
    return Statistics.from_vector(LAG_ROWS, torch.tensor(row, dtype=STATISTICS_DTYPE, device="cpu"))


def known_metrics(statistics: HostStatistics) -> dict[str, float]:
    """Return all metrics, prefixed. Without tokens of lag 0 the split is unknown, and left out."""
    metrics = finalize(statistics)
    unknown = {PREFIX + name for name in LAG_METRICS if math.isnan(metrics.get(PREFIX + name, 0.0))}
    return {name: value for name, value in metrics.items() if name not in unknown}
