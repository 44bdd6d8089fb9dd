"""Correct the sequence slices of context-parallel ranks without a process group."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.kernels.correction.call import CorrectionOutput
from rollcorr.kernels.correction.dispatch import correction_kernel
from rollcorr.kernels.correction.torch.table import Reduction, SequenceTable


class Slice(NamedTuple):
    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor | None


def reduced(slices: list[Slice], config: RolloutCorrectionConfig) -> list[CorrectionOutput]:
    """Return the result of each rank: each round records the messages of one exchange, for the next to answer."""
    ends, sent = [], []

    class StopError(Exception):
        """Ends a rank at its first exchange."""

    def note_ends(values: torch.Tensor) -> tuple[torch.Tensor, int]:
        ends.append(values)
        raise StopError

    def note(table: SequenceTable, rows: Statistics) -> Statistics:
        sent.append((table.pack(), rows))
        return rows

    def merge(table: SequenceTable, rows: Statistics) -> Statistics:
        table.merge(torch.stack([columns for columns, _ in sent]))
        return merge_statistics([statistics for _, statistics in sent])

    def run(part: Slice, *exchange) -> CorrectionOutput:
        reduce = Reduction(*exchange)
        return correction_kernel(*part[:3], config, cu_seqlens=part.cu_seqlens, reduce=reduce)

    for part in slices if config.rollout_is == "horizon" else []:
        with suppress(StopError):
            run(part, note, note_ends)
    gathers = [lambda values, rank=rank: (torch.stack(ends), rank) for rank in range(len(slices))]
    for part, gather in zip(slices, gathers, strict=True):
        run(part, note, gather)
    return [run(part, merge, gather) for part, gather in zip(slices, gathers, strict=True)]
