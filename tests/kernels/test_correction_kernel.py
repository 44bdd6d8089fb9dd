"""The torch kernel equals the reference: weights, masks and every metric, for any data."""

from __future__ import annotations

import math

import pytest
import torch
from correction_cases import (
    WITH_HORIZON,
    assert_same,
    batches,
    configuration,
    configurations,
    reference_correction,
    torch_correction,
)
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core.layout import pack
from rollcorr.core.metric_registry import CRITERIA, finalize
from rollcorr.kernels.correction.dispatch import correction_kernel


@given(batch=batches(), config=configurations(levels=WITH_HORIZON), block=st.sampled_from([1, 20, 1000]))
def test_blocks_of_any_size_give_the_reference(batch, config, block):
    expected = reference_correction(*batch, config)
    assert_same(torch_correction(*batch, config, block_tokens=block), expected)


@pytest.fixture
def three_threads(threads):
    threads(3)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("seed", range(20))
def test_threads_share_blocks_without_changing_a_number(seed):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(7, 11, generator=generator)
    train = rollout + torch.randn(7, 11, generator=generator)
    mask = torch.rand(7, 11, generator=generator) < 0.7
    config = configuration(
        rollout_is=["token", "sequence", "horizon"][seed % 3],
        rollout_is_horizon=0.5,
        rollout_rs="token_k1,seq_max_k3",
        rollout_rs_threshold="0.3_3.0,2.0",
        rollout_token_veto_threshold=0.05,
    )
    expected = reference_correction(train, rollout, mask, config)
    assert_same(torch_correction(train, rollout, mask, config, block_tokens=11), expected)
    cu_seqlens = torch.arange(8) * 11
    packed = (x.flatten() for x in (train, rollout, mask))
    actual = torch_correction(*packed, config, cu_seqlens=cu_seqlens, block_tokens=5)
    assert_same(actual, expected, torch.ones_like(mask))


@given(
    batch=batches(),
    config=configurations(levels=WITH_HORIZON),
    lengths=st.lists(st.integers(0, 17), min_size=6, max_size=6),
)
def test_packed_equals_padded(batch, config, lengths):
    train, rollout, mask = batch
    B, T = mask.shape
    rows = torch.arange(T).expand(B, T) < torch.tensor(lengths)[:B, None]
    expected = reference_correction(train, rollout, mask & rows, config)
    (packed_train, cu_seqlens), (packed_rollout, _), (packed_mask, _) = (pack(x, rows) for x in batch)
    for kernel in (reference_correction, torch_correction):
        assert_same(kernel(packed_train, packed_rollout, packed_mask, config, cu_seqlens=cu_seqlens), expected, rows)


@given(batch=batches(), config=configurations(levels=WITH_HORIZON))
def test_metrics_are_finite_numbers_whatever_the_data_holds(batch, config):
    for name, value in finalize(torch_correction(*batch, config).statistics.read()).items():
        assert math.isfinite(value), name


@given(batch=batches(), config=configurations(levels=WITH_HORIZON), parts=st.integers(1, 8))
def test_statistics_of_shards_merge_to_those_of_the_whole(batch, config, parts):
    """Also when shards are empty: k-way splits of up to six sequences."""
    whole = torch_correction(*batch, config).statistics
    shards = zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True)
    merged, *rest = [torch_correction(*shard, config).statistics for shard in shards]
    for statistics in rest:
        merged = merged.merge(statistics)
    a, b = finalize(merged.read()), finalize(whole.read())
    for name in b:
        assert a[name] == pytest.approx(b[name], rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("rollout_is", WITH_HORIZON)
def test_no_kernel_reads_a_value(impl, rollout_is):
    """Meta tensors have shapes and no values: a read, which is a wait on a GPU, raises here."""
    names = ",".join(CRITERIA)
    config = configuration(
        rollout_is=rollout_is,
        rollout_is_horizon=0.5,
        rollout_rs=names,
        rollout_rs_threshold=2.0,
        rollout_token_veto_threshold=1e-4,
    )
    with torch.device("meta"):
        train, mask, cu_seqlens = torch.zeros(6), torch.ones(6, dtype=torch.bool), torch.arange(3)
        packed = correction_kernel(train, train, mask, config, cu_seqlens=cu_seqlens, impl=impl)
        padded = correction_kernel(train.view(2, 3), train.view(2, 3), mask.view(2, 3), config, impl=impl)
    assert packed.loss_mask.shape == (6,)
    assert padded.loss_mask.shape == (2, 3)
    assert padded.statistics.pack().device.type == "meta"


def test_an_unknown_implementation_is_an_error_that_lists_the_known():
    empty = torch.zeros(1, 0)
    with pytest.raises(ValueError, match="'torch', 'cpu', 'triton', got 'turbo'"):
        correction_kernel(empty, empty, empty.bool(), configuration(), impl="turbo")


@pytest.mark.slow
def test_more_elements_than_a_float32_counter_holds():
    """2²⁵ elements: quantile-like calls and float32 counts stop at 2²⁴."""
    train = torch.zeros(1 << 5, 1 << 20)
    statistics = torch_correction(train, train, torch.ones(train.shape, dtype=torch.bool), configuration()).statistics
    assert finalize(statistics.read())["rollout_corr/token_count"] == 2**25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_inputs_are_left_as_they_are(impl, dtype):
    """`x.double()` is x itself when x is float64, so an in-place step after it would write to the caller's tensor."""
    train, rollout, mask = (
        torch.full((2, 3), -1.0, dtype=dtype),
        torch.full((2, 3), -1.25, dtype=dtype),
        torch.eye(2, 3),
    )
    correction_kernel(train, rollout, mask != 0, configuration(rollout_is="token"), impl=impl)
    assert (train == -1.0).all()
    assert (rollout == -1.25).all()
