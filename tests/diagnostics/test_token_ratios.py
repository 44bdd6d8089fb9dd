"""d of each token of a batch: uncounted tokens have 0, and sums by row are over the counted tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.diagnostics.null.token_ratios import CAP, TokenRatios, slice_sums
from rollcorr.diagnostics.null.token_share import TokenSums


def batch(seed, rows):
    """Rows of 0 to 6 tokens, with masked and missing tokens among them."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 7, size=rows)
    size = int(lengths.sum())
    rollout = -random.exponential(size=size).astype(np.float32)
    train = rollout + random.normal(size=size).astype(np.float32)
    train[random.random(size) < 0.1] = np.nan
    rollout[random.random(size) < 0.1] = -np.inf
    return train, rollout, random.random(size) < 0.7, lengths


@given(seed=st.integers(0, 200), rows=st.integers(0, 8))
def test_the_table_by_row_is_that_of_the_tokens_that_count(seed, rows):
    train, rollout, mask, lengths = batch(seed, rows)
    ratios = TokenRatios.of(train, rollout, mask, lengths)
    ends = lengths.cumsum()
    for row, table in enumerate(ratios.by_row()):
        place = slice(ends[row] - lengths[row], ends[row])
        with np.errstate(invalid="ignore"):
            d = train[place].astype(np.float64) - rollout[place]
        d = d[mask[place] & np.isfinite(d)]
        cut = np.clip(d, -CAP, CAP)
        extremes = (d.min(), d.max()) if len(d) else (0.0, 0.0)
        expected = [len(d), d.sum(), (d * d).sum(), (np.expm1(cut) - cut).sum(), *extremes]
        np.testing.assert_allclose(table, expected, rtol=1e-12, atol=1e-15)


def test_what_does_not_count_is_zero_and_is_told_apart():
    train = np.array([-1.0, -2.0, np.nan, -3.0, -4.0], dtype=np.float32)
    rollout = np.array([-1.5, -2.0, -1.0, -np.inf, -5.0], dtype=np.float32)
    mask = np.array([True, True, True, True, False])
    ratios = TokenRatios.of(train, rollout, mask, np.array([2, 3]), ids=np.arange(5))
    assert ratios.d.tolist() == [0.5, 0.0, 0.0, 0.0, 0.0]
    assert ratios.valid.tolist() == [True, True, False, False, False]
    assert (ratios.count, ratios.missing) == (2, 2)
    assert ratios.k3[0] == pytest.approx(np.expm1(0.5) - 0.5)
    assert TokenSums.of_ratios(ratios).sums[:2, :2].tolist() == [[1, 1], [0.5, 0.0]]


def test_some_rows_are_as_if_they_had_been_alone():
    train, rollout, mask, lengths = batch(3, 8)
    rows = np.arange(8) % 3 == 0
    tokens = np.repeat(rows, lengths)
    alone = TokenRatios.of(train[tokens], rollout[tokens], mask[tokens], lengths[rows])
    some = TokenRatios.of(train, rollout, mask, lengths).of_rows(rows)
    np.testing.assert_array_equal(some.by_row(), alone.by_row())
    assert (some.count, some.missing) == (alone.count, alone.missing)


def test_slices_may_be_empty():
    assert slice_sums(np.arange(5.0), np.array([0, 2, 0, 3, 0])).tolist() == [0, 1, 0, 9, 0]
    assert slice_sums(np.ones(3, dtype=bool), np.array([3, 0])).tolist() == [3, 0]
    assert slice_sums(np.zeros(0), np.array([], dtype=np.int64)).tolist() == []
