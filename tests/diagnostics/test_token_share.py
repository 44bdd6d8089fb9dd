"""The share of Var(d) that the token id explains: by hand, without bias for rare ids, exact under merges."""

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.diagnostics.null import token_share
from rollcorr.diagnostics.null.token_share import TokenSums


def share_of(ids, log_ratio, **options):
    return TokenSums.of(np.asarray(ids), np.asarray(log_ratio, dtype=np.float64), **options).share()


def test_an_id_that_decides_d_explains_all_of_it():
    share = share_of([0, 0, 1, 1], [1.0, 1.0, -1.0, -1.0])
    # Products of two tokens of one id are 1. Over all pairs the mean product is (0 − 4) / 12 = −1/3.
    assert share.between == pytest.approx(1 + 1 / 3)
    assert share.variance == pytest.approx(1 + 1 / 3)
    assert share.share == pytest.approx(1.0)
    assert (share.tokens, share.ids) == (4, 2)


def test_an_id_seen_once_is_left_out():
    assert share_of([0, 1, 2], [1.0, 2.0, 3.0]).tokens == 0
    assert np.isnan(share_of([0, 1, 2], [1.0, 2.0, 3.0]).share)
    assert share_of([0, 0, 1], [1.0, 2.0, 99.0]).tokens == 2


@pytest.mark.parametrize("vocabulary", [50, 5_000, 150_000])
def test_noise_is_explained_by_no_id_however_rare_the_ids_are(vocabulary):
    random = np.random.default_rng(0)
    ids = np.minimum(random.zipf(1.2, size=40_000), vocabulary) - 1

    # Noise whose spread depends on the id, as rounding does on how sure the policy was.
    spread = random.uniform(0.01, 0.1, size=vocabulary)
    share = share_of(ids, random.normal(size=len(ids)) * spread[ids])
    assert abs(share.share) < 3 * share.error + 1e-3
    assert share.error < 0.02


@pytest.mark.parametrize("vocabulary", [512, 150_000])
def test_a_part_that_the_id_decides_is_measured_at_any_vocabulary(vocabulary):
    random = np.random.default_rng(1)
    ids = np.minimum(random.zipf(1.2, size=60_000), vocabulary) - 1
    of_id = random.normal(size=vocabulary)
    truth = of_id[ids]
    log_ratio = 0.5 * truth + random.normal(size=len(ids))

    # What the id explains depends on the frequent ids that were drawn, so the truth is that of these tokens.
    counts = np.bincount(ids, minlength=vocabulary)
    seen = counts[ids] >= 2
    expected = 0.25 * truth[seen].var() / (0.25 * truth[seen].var() + 1)
    assert share_of(ids, log_ratio).share == pytest.approx(expected, abs=0.01)


@given(cut=st.integers(0, 200), seed=st.integers(0, 99))
def test_sums_of_parts_merge_to_those_of_the_whole(cut, seed):
    random = np.random.default_rng(seed)
    ids, log_ratio = random.integers(0, 300, size=200), random.integers(-8, 8, size=200) / 8
    whole = TokenSums.of(ids, log_ratio)
    merged = TokenSums.of(ids[:cut], log_ratio[:cut]).merge(TokenSums.of(ids[cut:], log_ratio[cut:]))
    np.testing.assert_array_equal(merged.sums, whole.sums)
    assert merged.largest == whole.largest
    rest = whole.without(TokenSums.of(ids[:cut], log_ratio[:cut]))
    assert rest.sums.sum() == pytest.approx(TokenSums.of(ids[cut:], log_ratio[cut:]).sums.sum())


def test_ids_beyond_the_limit_share_sums_and_memory_stays_bounded():
    random = np.random.default_rng(0)
    ids, log_ratio = random.integers(0, 1 << 30, size=500), random.normal(size=500)
    sums = TokenSums.of(ids, log_ratio, limit=64)
    assert sums.sums.shape == (3, 64)
    np.testing.assert_allclose(TokenSums.of(ids % 64, log_ratio).folded(64).sums, sums.sums)
    np.testing.assert_allclose(TokenSums.of(ids % 5000, log_ratio).folded(8).sums[0].sum(), 500)


def test_padding_ids_are_left_out():
    assert share_of([-1, -1, 3, 3], [9.0, 9.0, 1.0, 2.0]).tokens == 2


def test_tokens_of_many_batches_are_counted_at_once(monkeypatch):
    counted = []
    count = token_share._count
    monkeypatch.setattr(token_share, "_count", lambda *arguments: counted.append(arguments) or count(*arguments))
    monkeypatch.setattr(token_share, "AT_ONCE", 1000)

    # 30 batches of 100 tokens are three times a thousand.
    random = np.random.default_rng(0)
    ids, log_ratio = random.integers(0, 5000, size=3000), random.normal(size=3000)
    batches = zip(ids.reshape(30, 100), log_ratio.reshape(30, 100), strict=True)
    merged = reduce(TokenSums.merge, (TokenSums.of(*batch) for batch in batches), TokenSums.empty())
    assert len(counted) == 3
    np.testing.assert_allclose(merged.sums, TokenSums.of(ids, log_ratio).sums, atol=1e-12)
    assert len(counted) == 4  # nothing was left over
