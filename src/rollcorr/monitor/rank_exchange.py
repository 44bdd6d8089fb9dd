"""One vector per rank and step, exchanged and brought to the host: one transfer, whatever it holds.

With a context group the vectors are gathered over it first, and these together over the data-parallel group. So every
rank reads the vectors of all ranks in one order.

Ranks may have measured different things in a step: a rank without sequences has no statistics, and a number may be
known to one rank only. So each vector begins with the number of its layout. Layouts are exchanged, as objects, only
when one of them is new, which is in the first step of nearly every run.

The exchange of `correct` has marks of its own, so a rank that is still there is recognized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.correction.process_groups import (
    BLOCK,
    HEADER,
    check_in_step,
    explained_failure,
    filled_blocks,
    gather,
    gather_marked,
    number_of,
    reads_host_memory,
)
from rollcorr.monitor.step_totals import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankExchange:
    """The ranks whose steps are one step.

    Args:
        group: the data-parallel ranks. None: this process alone.
        context_group: the ranks with other tokens of the same sequences. None: the sequences are whole.

    Attributes:
        rank: this one's number among the data-parallel ranks.
        context_ranks: the number of ranks with the same sequences.
        transfers: how often something was brought to the host.
    """

    def __init__(self, group: ProcessGroup | None, context_group: ProcessGroup | None = None) -> None:
        self.rank = 0 if group is None else group.rank()
        self.context_ranks = 1 if context_group is None else context_group.size()
        self.transfers = 0
        self._groups = [group for group in (context_group, group) if group is not None]
        self._layouts: dict[int, Layout] = {}
        self._room = BLOCK

    def counts_for(self, group: ProcessGroup | None) -> bool:
        """Return whether this rank sends a part that the ranks of a group share: the first that steps here does."""
        if group is None or not self._groups:
            return True
        ranks_of = torch.distributed.get_process_group_ranks
        here = {rank for own in self._groups for rank in ranks_of(own)}
        return next(rank for rank in ranks_of(group) if rank in here) == torch.distributed.get_rank()

    def read(self, layout: Layout, vector: Tensor) -> list[tuple[Layout, Tensor]]:
        """The layouts and vectors of all ranks, on the host: one transfer, and another one if room is lacking.

        Raises:
            RuntimeError: a rank is still in `correct`, or an exchange failed.
        """
        if not self._groups:
            return [(layout, self._to_host(vector))]

        number = number_of(layout)
        marks, parts = self._gathered(number, vector)
        check_in_step(marks)
        if any(other not in self._layouts for other in marks):
            # Every rank sees the same marks, so every rank takes part in this.
            grown = self._learn(layout)
            if grown:
                marks, parts = self._gathered(number, vector)
        layouts = [self._layouts[other] for other in marks]
        sizes = [sum(entry.size for entry in found) for found in layouts]
        return [(found, part[HEADER : HEADER + size]) for found, part, size in zip(layouts, parts, sizes, strict=True)]

    def _gathered(self, number: int, vector: Tensor) -> tuple[list[int], Tensor]:
        """The number of each rank's layout, and the vectors behind them, (P, room)."""
        # Where the groups read host memory, the transfer comes first, and the exchange after it.
        on_host = all(reads_host_memory(group) for group in self._groups)
        if on_host:
            vector = self._to_host(vector)
        first, *further = self._groups
        parts = gather_marked(vector, number, first, room=self._room)
        for group in further:
            parts = gather(parts, group).flatten(0, 1)
        if not on_host:
            parts = self._to_host(parts)
        return [int(other) for other in parts[:, 0].tolist()], parts

    def _learn(self, layout: Layout) -> bool:
        """Exchange the layouts; returns whether the vectors need more room than before."""
        for found in self.of_all_ranks(layout):
            self._layouts[number_of(found)] = found
        before = self._room
        self._room = max(filled_blocks(sum(entry.size for entry in found)) for found in self._layouts.values())
        return self._room > before

    def of_all_ranks(self, own: object) -> list[Any]:
        """Return an object of every rank, in the order of the vectors; all of them must call this together."""
        found = [own]
        for group in self._groups:
            parts: list[Any] = [None] * group.size()
            with explained_failure(group):
                torch.distributed.all_gather_object(parts, found, group=group)
            found = [one for part in parts for one in part]
        return found

    def _to_host(self, vector: Tensor) -> Tensor:
        self.transfers += 1
        return vector.to("cpu")
