"""A bounded, evenly spread sample of a log's sequences, for the estimate of provenance."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollcorr.diagnostics.labels import Provenance
from rollcorr.diagnostics.provenance import estimate_provenance

TOKENS = 1 << 16
"""About how many tokens the sample holds: twice as many at most, and at least one sequence."""

Row = tuple[Tensor, Tensor, Tensor]


@dataclass
class PairSample:
    """Every k-th sequence of a log, with k doubled whenever too many tokens are held; the batching does not matter."""

    stride: int = 1
    seen: int = 0
    held: int = 0
    rows: dict[int, Row] = field(default_factory=dict)

    def add(self, train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor) -> None:
        """Take in a packed batch: log-probs and mask (N,), and the length of each sequence (B,)."""
        parts = zip(*(x.split(lengths.tolist()) for x in (train, rollout, mask)), strict=True)
        for index, row in enumerate(parts, start=self.seen):
            if index % self.stride == 0 and bool(row[2].any()):
                self.rows[index] = (row[0].clone(), row[1].clone(), row[2].clone())
                self.held += len(row[0])
                self._thin()
        self.seen += len(lengths)

    def estimate(self) -> Provenance:
        """What the sample implies."""
        rows = [self.rows[index] for index in sorted(self.rows)]
        sizes = torch.tensor([0, *(len(row[0]) for row in rows)])
        train, rollout, mask = (torch.cat([torch.zeros(0), *(row[i] for row in rows)]) for i in range(3))
        return estimate_provenance(train, rollout, mask, cu_seqlens=sizes.cumsum(0))

    def _thin(self) -> None:
        while self.held > 2 * TOKENS and len(self.rows) > 1:
            self.stride *= 2
            self.rows = {index: row for index, row in self.rows.items() if index % self.stride == 0}
            self.held = sum(len(row[0]) for row in self.rows.values())
