"""Statistics over a process group: one all-gather, merged in rank order, so that every rank has the same number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollcorr.core.statistics import Statistics, merge_statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def gather_statistics(statistics: Statistics, group: ProcessGroup | None) -> Statistics:
    """Merge statistics over the ranks of a data-parallel group: one all-gather of a small float64 vector.

    Args:
        statistics: this rank's rows; every rank must have the same ones.
        group: the process group; None returns the statistics as they are.
    """
    if group is None:
        return statistics
    vector = statistics.pack()
    gathered = [torch.empty_like(vector) for _ in range(group.size())]
    torch.distributed.all_gather(gathered, vector, group=group)
    return merge_statistics(statistics.unpack(part) for part in gathered)
