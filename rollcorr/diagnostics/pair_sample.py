"""A bounded, evenly spread sample of a log's sequences, for the estimate of provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollcorr.diagnostics.labels import Provenance
from rollcorr.diagnostics.provenance import estimate_provenance

TOKENS = 1 << 16
"""About how many tokens the sample holds: twice as many at most, and at least one sequence."""

Row = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class PairSample:
    """Every k-th sequence of a log, k being the smallest power of 2 for which they are few enough.

    So the sample of a whole is the merged samples of its parts, however it was cut.

    Attributes:
        stride: k.
        rows: index of a sequence in the log → its log-probs π and μ and its mask, each (c,); without those that have
            no valid token.
    """

    stride: int = 1
    rows: Mapping[int, Row] = field(default_factory=dict)

    @classmethod
    def of(cls, train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor, *, first: int) -> PairSample:
        """The sample of a packed batch: log-probs and mask (N,), lengths (B,), and the index of its first sequence."""
        parts = zip(*(x.split(lengths.tolist()) for x in (train, rollout, mask)), strict=True)
        valid = {index: row for index, row in enumerate(parts, start=first) if bool(row[2].any())}
        thin = _thinned(1, valid)
        return cls(thin.stride, {index: (a.clone(), b.clone(), c.clone()) for index, (a, b, c) in thin.rows.items()})

    @property
    def held(self) -> int:
        """Tokens in the sample."""
        return _tokens(self.rows)

    def merge(self, other: PairSample) -> PairSample:
        """The sample of both stretches of the log together."""
        return _thinned(max(self.stride, other.stride), {**self.rows, **other.rows})

    def estimate(self) -> Provenance:
        """What the sample implies."""
        rows = [self.rows[index] for index in sorted(self.rows)]
        sizes = torch.tensor([0, *(len(row[0]) for row in rows)])
        train, rollout, mask = (torch.cat([torch.zeros(0), *(row[i] for row in rows)]) for i in range(3))
        return estimate_provenance(train, rollout, mask, cu_seqlens=sizes.cumsum(0))


def _thinned(stride: int, rows: Mapping[int, Row]) -> PairSample:
    """Rows at multiples of the stride, doubled until few enough tokens, or one row, are left."""
    while True:
        rows = {index: row for index, row in rows.items() if index % stride == 0}
        if _tokens(rows) <= 2 * TOKENS or len(rows) <= 1:
            return PairSample(stride, rows)
        stride *= 2


def _tokens(rows: Mapping[int, Row]) -> int:
    return sum(len(row[0]) for row in rows.values())
