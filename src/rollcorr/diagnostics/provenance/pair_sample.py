"""A bounded, evenly spread sample of a log's sequences, for the estimate of provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rollcorr.diagnostics.provenance.estimate import estimate_provenance
from rollcorr.diagnostics.provenance.labels import Provenance

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
        held: their tokens.
    """

    stride: int = 1
    rows: Mapping[int, Row] = field(default_factory=dict)
    held: int = 0

    @classmethod
    def of(
        cls, train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor, *, first: int, stride: int = 1
    ) -> PairSample:
        """The sample of a packed batch: log-probs and mask (N,), lengths (B,), and the index of its first sequence.

        A stride that the sample will have in the end, at least, saves the work for other rows.
        """
        parts = zip(*(x.split(lengths.tolist()) for x in (train, rollout, mask)), strict=True)
        rows = {i: row for i, row in enumerate(parts, start=first) if i % stride == 0 and bool(row[2].any())}
        thin = _thinned(stride, rows)
        return replace(thin, rows={i: (a.clone(), b.clone(), c.clone()) for i, (a, b, c) in thin.rows.items()})

    def merge(self, other: PairSample) -> PairSample:
        """The sample of both stretches of the log together."""
        stride = max(self.stride, other.stride)
        one, two = (x if x.stride == stride else _thinned(stride, x.rows) for x in (self, other))
        both = PairSample(stride, {**one.rows, **two.rows}, one.held + two.held)
        return both if both.few else _thinned(2 * stride, both.rows)

    def estimate(self) -> Provenance:
        """What the sample implies."""
        rows = [self.rows[index] for index in sorted(self.rows)]
        sizes = torch.tensor([0, *(len(row[0]) for row in rows)], device="cpu")
        train, rollout, mask = (torch.cat([torch.zeros(0, device="cpu"), *(row[i] for row in rows)]) for i in range(3))
        return estimate_provenance(train, rollout, mask, cu_seqlens=sizes.cumsum(0))

    @property
    def few(self) -> bool:
        """Whether no more has to be left out."""
        return self.held <= 2 * TOKENS or len(self.rows) <= 1


def _thinned(stride: int, rows: Mapping[int, Row]) -> PairSample:
    """Rows at multiples of the stride, which is doubled until few enough are left."""
    while True:
        rows = {index: row for index, row in rows.items() if index % stride == 0}
        sample = PairSample(stride, rows, sum(len(row[0]) for row in rows.values()))
        if sample.few:
            return sample
        stride *= 2
