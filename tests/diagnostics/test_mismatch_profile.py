"""The profile of a mismatch: by hand, and the same whatever a log was cut into."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.diagnostics.null.excess import BIN_TOKENS, expected_k3, pooled_bins
from rollcorr.diagnostics.null.mismatch_profile import (
    ROWS,
    MismatchProfile,
    RowTable,
    size_edges,
    surprise_bins,
)

NAN = math.nan


def profile_of(rows, *, masks=None, first=0, ids=None):
    """The profile of rows of (π, μ) pairs."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.array([pair for row in rows for pair in row], dtype=np.float32).reshape(-1, 2)
    mask = np.ones(len(flat), dtype=bool) if masks is None else np.array(masks, dtype=bool)
    index = np.arange(first, first + len(rows))
    return MismatchProfile.of(flat[:, 0], flat[:, 1], mask, lengths, ids=ids, index=index)


def random_rows(seed, count=30):
    """Rows whose numbers are multiples of 1/64, so that sums are exact in any order."""
    random = np.random.default_rng(seed)
    return [
        [(-(a + 1) / 64, -(b + 1) / 64) for a, b in random.integers(0, 200, size=(random.integers(1, 40), 2))]
        for _ in range(count)
    ]


def test_a_profile_by_hand():
    profile = profile_of([[(-1.0, -0.5), (-2.0, -2.0)], [(-0.5, -3.0)], [(-1.0, NAN)]])
    assert (profile.tokens, profile.row_count, profile.missing) == (3, 2, 1)
    assert profile.mean == pytest.approx(2.0 / 3)
    k3 = [math.exp(-0.5) - 1 + 0.5, 0.0, math.exp(2.5) - 1 - 2.5]
    assert profile.k3 == pytest.approx(sum(k3) / 3)

    # −log μ of 0.5, 2 and 3 nats are in octaves of their own or together.
    (of_half,) = surprise_bins(np.array([0.5], dtype=np.float32))
    assert profile.cells[0, of_half : of_half + 3].tolist() == [1, 0, 2]

    assert profile.rows.column("tokens").tolist() == [2, 1]
    assert profile.rows.column("min_d").tolist() == [-0.5, 2.5]
    assert profile.rows.column("max_d").tolist() == [0.0, 2.5]
    assert profile.rows.column("prompt").tolist() == [-1, -1]


def test_masked_tokens_do_not_count():
    profile = profile_of([[(-1.0, -1.0), (-1.0, -1.0), (-1.0, -1.5)]], masks=[0, 0, 1])
    assert (profile.tokens, profile.row_count, profile.sizes.sum()) == (1, 1, 1)
    assert profile.mean == 0.5


def test_log_ratios_beyond_20_nats_are_cut_in_k3_alone():
    profile = profile_of([[(-1.0, -41.0), (-90.0, -1.0)]])
    assert profile.k3 == pytest.approx((math.expm1(20) - 20 + math.expm1(-20) + 20) / 2)
    assert profile.mean == pytest.approx((40 - 89) / 2)


@settings(max_examples=20)
@given(seed=st.integers(0, 99), cut=st.integers(0, 30))
def test_profiles_of_parts_merge_to_that_of_the_whole(seed, cut):
    rows = random_rows(seed)
    ids = np.random.default_rng(seed).integers(0, 50, size=sum(map(len, rows)))
    border = sum(map(len, rows[:cut]))
    whole = profile_of(rows, ids=ids)
    merged = profile_of(rows[:cut], ids=ids[:border]).merge(profile_of(rows[cut:], first=cut, ids=ids[border:]))
    np.testing.assert_array_equal(merged.sizes, whole.sizes)
    assert merged.row_count == whole.row_count
    np.testing.assert_allclose(merged.cells, whole.cells, rtol=1e-12)
    np.testing.assert_array_equal(merged.rows.values, whole.rows.values)
    np.testing.assert_array_equal(merged.ids.sums, whole.ids.sums)

    rest = whole.without(profile_of(rows[:cut], ids=ids[:border]))
    assert (rest.tokens, rest.row_count) == (whole.tokens - border, 30 - cut)
    assert list(rest.rows.index) == list(range(cut, 30))


def test_a_null_predicts_its_own_k3_although_rare_tokens_hold_most_of_it():
    """10 of 1,010 tokens are improbable: too few for a group of their own, and nearly all of k3."""
    common, rare = [(-0.101, -0.1)] * 50 + [(-0.0011, -0.001)] * 50, [(-6.5, -6.0)]
    profile = profile_of([common + rare] * 10)
    assert profile.k3 > 20 * profile_of([common] * 10).k3
    assert expected_k3(profile, profile) == pytest.approx(profile.k3, rel=1e-12)
    # Rows without the most probable tokens are expected to have nearly twice as much.
    assert expected_k3(profile_of([common[:50] + rare] * 10), profile) > 1.9 * profile.k3


def test_pooled_bins_hold_enough_tokens_and_every_bin_is_in_one():
    random = np.random.default_rng(0)
    for _ in range(20):
        count = random.integers(0, 40, size=23).astype(float)
        group = pooled_bins(count)
        assert (np.diff(group) <= 0).all()
        assert group[-1] == 0
        assert (np.bincount(group, count) >= BIN_TOKENS).all()


def test_sizes_count_each_sign_by_parts_of_an_octave():
    profile = profile_of([[(-1.0, -1.5), (-1.5, -1.0), (-1.0, -1.53)]])
    (low,) = np.flatnonzero(size_edges(8) == 0.5)
    assert profile.sizes[:, low].tolist() == [1, 2]
    assert profile.sizes.sum() == 3


def test_edges_of_sizes_rise_and_hold_all_numbers():
    edges = size_edges(8)
    assert (np.diff(edges) > 0).all()
    assert edges[0] == 2.0**-25
    assert len(edges) == profile_of([[(-1.0, -1.0)]]).sizes.shape[1] + 1


def test_the_table_of_rows_is_bounded_and_does_not_depend_on_the_cuts():
    index = np.arange(5 * ROWS)
    values = np.tile(index[:, None].astype(np.float64), (1, 7))
    whole = RowTable.of(values, index)
    assert ROWS < len(whole) <= 2 * ROWS
    cut = RowTable()
    for start in range(0, len(index), 777):
        cut = cut.merge(RowTable.of(values[start : start + 777], index[start : start + 777]))
    assert cut.stride == whole.stride == 4
    np.testing.assert_array_equal(cut.index, whole.index)
