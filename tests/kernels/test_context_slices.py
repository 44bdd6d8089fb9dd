"""Slices of sequences, read apart and reduced, give what whole sequences give: any dealing of tokens to any ranks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from correction_cases import assert_same, batches, configurations
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.statistics import merge_statistics
from rollcorr.kernels.correction import CorrectionOutput, correction_kernel
from rollcorr.kernels.correction.table import BlockRows, SequenceTable


class Slice(NamedTuple):
    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor | None


def reduced(slices: list[Slice], config) -> list[CorrectionOutput]:
    """What each rank returns: a first round notes what the ranks would send, a second one merges it."""
    sent = []

    def note(table: SequenceTable, rows: BlockRows) -> None:
        sent.append((table.pack(), rows.statistics(torch.device("cpu"))))

    def merge(table: SequenceTable, rows: BlockRows) -> None:
        table.merge(torch.stack([columns for columns, _ in sent]))
        rows.replace(merge_statistics([statistics for _, statistics in sent]))

    def run(part: Slice, reduce) -> CorrectionOutput:
        return correction_kernel(*part[:3], config, cu_seqlens=part.cu_seqlens, reduce=reduce)

    for part in slices:
        run(part, note)
    return [run(part, merge) for part in slices]


@given(batch=batches(), config=configurations(), ranks=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_columns_dealt_to_ranks_are_decided_as_whole_rows(batch, config, ranks, seed):
    owner = torch.randint(0, ranks, (batch[0].shape[1],), generator=torch.Generator().manual_seed(seed))
    whole = correction_kernel(*batch, config, impl="reference")
    columns = [(owner == rank).nonzero().flatten() for rank in range(ranks)]
    slices = [Slice(*(x[:, chosen] for x in batch), None) for chosen in columns]
    for chosen, output in zip(columns, reduced(slices, config), strict=True):
        own = whole._replace(
            weights=None if whole.weights is None else whole.weights[:, chosen], loss_mask=whole.loss_mask[:, chosen]
        )
        assert_same(output, own)


@given(batch=batches(), config=configurations(), ranks=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_tokens_dealt_one_by_one_are_decided_as_whole_packed_sequences(batch, config, ranks, seed):
    owner = torch.randint(0, ranks, batch[0].shape, generator=torch.Generator().manual_seed(seed))
    whole = correction_kernel(*batch, config, impl="reference")
    slices = []
    for rank in range(ranks):
        counts = (owner == rank).sum(1)
        cu_seqlens = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        slices.append(Slice(*(x[owner == rank] for x in batch), cu_seqlens))
    for rank, output in enumerate(reduced(slices, config)):
        assert_same(output, whole, rows=owner == rank)


def test_the_reference_does_not_take_slices():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="needs whole sequences"):
        correction_kernel(x, x, x.bool(), RolloutCorrectionConfig(), reduce=lambda *_: None, impl="reference")
