"""Correct the sequence slices of context-parallel ranks without a process group."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.kernels.correction.call import CorrectionOutput
from rollcorr.kernels.correction.dispatch import correction_kernel
from rollcorr.kernels.correction.torch.table import SequenceTable


class Slice(NamedTuple):
    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor | None


def reduced(slices: list[Slice], config: RolloutCorrectionConfig) -> list[CorrectionOutput]:
    """Return the result of each rank: round one records the messages of the ranks, round two merges them."""
    sent = []

    def note(table: SequenceTable, rows: Statistics) -> Statistics:
        sent.append((table.pack(), rows))
        return rows

    def merge(table: SequenceTable, rows: Statistics) -> Statistics:
        table.merge(torch.stack([columns for columns, _ in sent]))
        return merge_statistics([statistics for _, statistics in sent])

    def run(part: Slice, reduce) -> CorrectionOutput:
        return correction_kernel(*part[:3], config, cu_seqlens=part.cu_seqlens, reduce=reduce)

    for part in slices:
        run(part, note)
    return [run(part, merge) for part in slices]
