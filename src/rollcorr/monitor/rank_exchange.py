"""One vector per rank and step, exchanged and brought to the host: one transfer, whatever it holds.

Ranks may have measured different things in a step: a rank without sequences has no statistics, and a number may be
known to one rank only. So each vector begins with the number of its layout. Layouts are exchanged, as objects, only
when one of them is new, which is in the first step of nearly every run.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE
from rollcorr.monitor.step_totals import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

HEADER = 1


class RankExchange:
    """The ranks whose steps are one step.

    Args:
        group: the data-parallel ranks. None: this process alone.

    Attributes:
        rank: this one's number.
        transfers: how often something was brought to the host.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.rank = 0 if group is None else group.rank()
        self.transfers = 0
        self._group = group
        self._layouts: dict[int, Layout] = {}
        self._capacity = 0

    def read(self, layout: Layout, vector: Tensor) -> list[tuple[Layout, Tensor]]:
        """The layouts and vectors of all ranks, on the host: one transfer, and another one where a layout is new."""
        if self._group is None:
            return [(layout, self._to_host(vector))]

        number = _number_of(layout)
        if not self._layouts:
            self._learn(layout)
        headers, parts = self._gathered(number, vector)
        if any(other not in self._layouts for other in headers):
            # Every rank sees the same headers, so every rank takes part in this.
            grown = self._learn(layout)
            if grown:
                headers, parts = self._gathered(number, vector)
        layouts = [self._layouts[other] for other in headers]
        sizes = [sum(entry.size for entry in found) for found in layouts]
        return [(found, part[HEADER : HEADER + size]) for found, part, size in zip(layouts, parts, sizes, strict=True)]

    def _gathered(self, number: int, vector: Tensor) -> tuple[list[int], Tensor]:
        """The number of each rank's layout, and the vectors, (P, capacity + header)."""
        assert self._group is not None
        sent = torch.zeros(HEADER + self._capacity, dtype=STATISTICS_DTYPE, device=vector.device)
        sent[0] = number
        if vector.numel() <= self._capacity:
            sent[HEADER : HEADER + vector.numel()] = vector

        # Gloo moves host memory: there the transfer comes first, and the exchange after it.
        uses_nccl = "nccl" in str(torch.distributed.get_backend(self._group))
        if uses_nccl:
            sent = sent if sent.is_cuda else sent.to(torch.device("cuda", torch.cuda.current_device()))
        else:
            sent = self._to_host(sent)
        parts = [torch.empty_like(sent) for _ in range(self._group.size())]
        torch.distributed.all_gather(parts, sent, group=self._group)
        whole = torch.stack(parts)
        if uses_nccl:
            whole = self._to_host(whole)
        return [int(other) for other in whole[:, 0].tolist()], whole

    def _learn(self, layout: Layout) -> bool:
        """Exchange the layouts; returns whether the vectors need more room than before."""
        for found in objects_of_ranks(self._group, layout):
            self._layouts[_number_of(found)] = found
        before = self._capacity
        self._capacity = max(sum(entry.size for entry in found) for found in self._layouts.values())
        return self._capacity > before

    def _to_host(self, vector: Tensor) -> Tensor:
        self.transfers += 1
        return vector.to("cpu")


def objects_of_ranks(group: ProcessGroup | None, own: object) -> list[Any]:
    """What every rank of a group says, in rank order; all of them must call this together. None: what this one says."""
    if group is None:
        return [own]
    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, own, group=group)
    return found


def _number_of(layout: Layout) -> int:
    """A number that tells a layout from every other, small enough to be exact in float64."""
    digest = hashlib.blake2b(repr(layout).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
