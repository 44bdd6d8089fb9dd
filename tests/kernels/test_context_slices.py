"""Sequence slices, read apart and reduced, equal complete sequences for any distribution of tokens over ranks."""

from __future__ import annotations

import pytest
import torch
from context_slices import Slice, reduced
from correction_cases import assert_same, batches, configurations
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.kernels.correction.dispatch import correction_kernel


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


@given(
    batch=batches(),
    config=configurations(levels=("horizon",)),
    cuts=st.lists(st.integers(0, 17), max_size=3).map(sorted),
    packed=st.booleans(),
)
def test_consecutive_slices_have_the_weights_of_sequences(batch, config, cuts, packed):
    """Level "horizon": slices of consecutive tokens, some empty."""
    whole = correction_kernel(*batch, config, impl="reference")
    place = torch.arange(batch[0].shape[1]).expand(batch[0].shape)
    owner = sum((place >= cut).int() for cut in cuts) if cuts else torch.zeros_like(place)
    slices = []
    for rank in range(len(cuts) + 1):
        own = owner == rank
        if packed:
            cu_seqlens = torch.cat([own.new_zeros(1, dtype=torch.long), own.sum(1).cumsum(0)])
            slices.append(Slice(*(x[own] for x in batch), cu_seqlens))
        else:
            columns = owner[:1].eq(rank).any(0)
            slices.append(Slice(*(x[:, columns] for x in batch), None))
    for rank, output in enumerate(reduced(slices, config)):
        own = owner == rank
        if not packed:
            output = output._replace(weights=output.weights.flatten(), loss_mask=output.loss_mask.flatten())
        assert_same(output, whole, rows=own)


def test_the_reference_does_not_take_slices():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="needs whole sequences"):
        correction_kernel(x, x, x.bool(), RolloutCorrectionConfig(), reduce=lambda *_: None, impl="reference")
