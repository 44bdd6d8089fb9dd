"""Bins by hand; quantiles against sorted values; merging."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core.detail_rows import BINS, RELATIVE_ERROR, histogram_of, quantile
from rollcorr.core.mergeable_statistics import merge_sums

SMALLEST = 2.0**-24
finite = st.floats(-(2.0**19), 2.0**19, width=32)


def of(values: list[float], mask: list[bool] | None = None) -> list[float]:
    values = torch.tensor(values, dtype=torch.float64)
    mask = torch.ones(values.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return histogram_of(values, mask).tolist()


def test_bins_by_hand():
    """Around 1 a bin is [1, 33/32): 1.0 and 1.03 share it, 1.04 and the values just below 1 do not."""
    counts = of([1.0, 1.03, 1.04, 0.999, -1.0, 0.0, 1e-9, math.inf, math.nan], [True] * 8 + [False])
    assert len(counts) == BINS
    assert sum(counts) == 8
    assert sorted(count for count in counts if count) == [1, 1, 1, 1, 2, 2]
    assert counts[BINS // 2] == 2  # 0 and values below 2⁻²⁴
    assert counts[-1] == 1


def test_a_quantile_is_the_harmonic_mean_of_its_bins_edges():
    low, high = 1.0, 33 / 32
    assert quantile(of([1.0, 1.03, 5.0]), 0.5) == pytest.approx(2 * low * high / (low + high))
    assert quantile(of([-1.0, -1.03, 5.0]), 0.5) == pytest.approx(-2 * low * high / (low + high))


@given(values=st.lists(finite, min_size=1, max_size=60), q=st.floats(0, 1), absolute=st.booleans())
def test_a_quantile_is_off_by_at_most_its_stated_error(values, q, absolute):
    exact = sorted(abs(x) if absolute else x for x in values)[max(math.ceil(q * len(values)) - 1, 0)]
    found = quantile(of(values), q, absolute=absolute)
    assert found == pytest.approx(exact, rel=RELATIVE_ERROR * (1 + 1e-6), abs=SMALLEST)


def test_the_ends_of_a_quantile():
    assert quantile(of([]), 0.5) == 0.0
    assert quantile(of([-math.inf, 1.0]), 0.0) == -math.inf
    assert quantile(of([-math.inf, 1.0]), 1.0, absolute=True) == math.inf
    assert quantile(of([float(i) for i in range(1, 101)]), 0.99) == pytest.approx(99, rel=RELATIVE_ERROR)


@given(values=st.lists(finite, max_size=40), cuts=st.lists(st.integers(0, 40), max_size=7))
def test_histograms_of_parts_add_up(values, cuts):
    values = torch.tensor(values, dtype=torch.float32)
    parts = [histogram_of(part, torch.ones_like(part, dtype=torch.bool)) for part in values.tensor_split(sorted(cuts))]
    assert merge_sums(torch.stack(parts)).tolist() == of(values.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_falls_into_the_same_bins(dtype):
    values = torch.tensor([0.25, -1.5, 3.0, 0.0])
    mask = torch.ones(4, dtype=torch.bool)
    assert torch.equal(histogram_of(values.to(dtype), mask), histogram_of(values, mask))
