"""Calibrated thresholds have their nominal rejection rate on unseen sequences, and their intervals cover.

`make calibration` sets ROLLCORR_CALIBRATION=full: larger pools, the laboratory, and 100 repeats of each interval.
"""

import json
import math
import os
from functools import lru_cache

import numpy as np
import pytest
import torch
from mismatch_pools import (
    laboratory_pool,
    null_of,
    rejected_share,
    spliced,
    statistics_of,
    synthetic_pool,
)

from rollcorr import RolloutCorrectionConfig, correct
from rollcorr.diagnostics import MismatchNull, MismatchProfile, calibrate, noise_table
from rollcorr.diagnostics.advice import calibration
from rollcorr.diagnostics.advice.order_statistics import _quantile_ranks, quantile_estimate
from rollcorr.diagnostics.advice.spliced_rows import RowLevels, UnitRows, halves_of, row_levels, splices
from rollcorr.run_directory.stored_run import BadInputError

FULL = os.environ.get("ROLLCORR_CALIBRATION") == "full"
POOLS = {"synthetic": synthetic_pool, "laboratory": laboratory_pool}

# Pool, tokens of its rows, wanted length, rows of the null, sequences that are judged.
SAMPLE = [("synthetic", 100, 100, 8000, 8000), ("laboratory", 50, 100, 4000, 4000)]
WHOLE = [
    (name, tokens, length, rows, sequences)
    for name in POOLS
    for tokens, length, rows, sequences in (
        (100, 100, 8000, 8000),
        (500, 500, 8000, 8000),
        (500, 1000, 16_000, 10_000),
        (500, 8000, 16_000, 4000),
    )
]


@lru_cache(maxsize=4)
def null_at(name, tokens, rows):
    return null_of(POOLS[name](rows, tokens, seed=1))


@lru_cache(maxsize=4)
def calibrated(name, tokens, rows, length):
    """Thresholds and alarms of a pool: the tests of both share them, for the bootstrap behind them costs the most."""
    return calibrate(null_at(name, tokens, rows), rate=0.05, lengths=[length], alarm_rate=0.02, sequences=64)


def longer_rows(name, count, tokens, length, seed):
    """Sequences of a pool's policies: synthetic rows keep their level; the laboratory's have none."""
    if name == "synthetic":
        return synthetic_pool(count, length, seed)
    return spliced(POOLS[name](count * (length // tokens), tokens, seed=seed), length)


@pytest.mark.parametrize(("name", "tokens", "length", "rows", "sequences"), WHOLE if FULL else SAMPLE)
def test_thresholds_reject_their_rate_on_a_disjoint_pool(name, tokens, length, rows, sequences):
    found = calibrated(name, tokens, rows, length)

    # Other sequences, a part at a time: 2,000 sequences of 8,000 tokens do not fit into memory.
    parts, blocks = length // tokens, []
    for block in range(4):
        blocks.append(statistics_of(longer_rows(name, sequences // 4, tokens, length, seed=100 + block)))
    judged = {setting: np.concatenate([one[setting] for one in blocks]) for setting in blocks[0]}
    assert len(judged["veto"]) == sequences

    shares = {setting: rejected_share(found.limit(setting, length), values) for setting, values in judged.items()}
    print(name, tokens, length, {setting: f"{share:.2%}" for setting, share in shares.items()})  # noqa: T201
    # Both samples err: the null's quantile, and the share of the judged. A splice of p rows repeats what the mean of n
    # rows is off, which is √(p / n) of its spread, and the density of a normal at its 95 % point is 0.103.
    error = math.sqrt(0.0475 * (1 / rows + 1 / sequences)) + (0.103 * math.sqrt(parts / rows) if parts > 1 else 0.0)
    for setting, share in shares.items():
        # The laboratory's policies have few different d, so the extreme of most sequences is the same: none may be out.
        if name == "laboratory" and setting in ("seq_max_k2", "seq_max_k3", "veto"):
            assert share < 0.05 + max(0.01, 3 * error), setting
        else:
            assert share == pytest.approx(0.05, abs=max(0.01, 3 * error)), setting


def test_token_thresholds_reject_their_rate_of_tokens():
    null, fresh = null_at("synthetic", 100, 8000), synthetic_pool(8000, 100, seed=3).ravel()
    found = calibrate(null, rate=0.02, lengths=[100])
    k3 = np.expm1(fresh) - fresh
    for setting, values in {
        "token_k1": np.exp(fresh),
        "token band": np.exp(fresh),
        "token ceiling": np.exp(fresh),
        "token_k2": fresh**2 / 2,
        "token_k3": k3,
    }.items():
        assert rejected_share(found.limit(setting), values) == pytest.approx(0.02, abs=0.003), setting


REPEATS = 100 if FULL else 8


@pytest.mark.parametrize(
    ("tokens", "length", "rows"),
    [(100, 100, 2000), (500, 500, 2000), (500, 1000, 2000), (500, 8000, 2000)]
    if FULL
    else [(50, 50, 500), (50, 100, 500)],
)
def test_intervals_cover_the_threshold_of_an_endless_null(tokens, length, rows):
    """The truth comes from a pool a hundred times as large, whose rows have the wanted length."""
    sums = [(pool.sum(1), (np.expm1(pool) - pool).sum(1)) for pool in _large_pool(length)]
    total, k3 = (np.concatenate(column) for column in zip(*sums, strict=True))
    ratio = np.exp(total)
    truth = {
        ("seq_mean_k3", "upper"): np.quantile(k3 / length, 0.95),
        ("seq_sum_k1", "upper"): np.quantile(ratio, 0.975),
        ("seq_sum_k1", "lower"): np.quantile(ratio, 0.025),
    }
    covered = dict.fromkeys(truth, 0)
    for repeat in range(REPEATS):
        null = null_of(synthetic_pool(rows, tokens, seed=2000 + repeat))
        found = calibrate(null, lengths=[length], seed=repeat)
        for (setting, side), value in truth.items():
            estimate = getattr(found.limit(setting, length), side)
            covered[setting, side] += estimate.low <= value <= estimate.high
    print(tokens, length, covered)  # noqa: T201
    assert min(covered.values()) >= (90 if FULL else 6)


def _large_pool(length):
    """Rows for the truth, a block at a time: 200,000 in all, or 20,000 in the sample."""
    rows = min(10_000, 5_000_000 // length)
    return (synthetic_pool(rows, length, seed=9000 + block) for block in range((200_000 if FULL else 20_000) // rows))


NULLS = 16 if FULL else 8


@pytest.mark.parametrize("shift", [0.0, 0.05])
def test_row_effects_survive_ten_times_the_length(shift, monkeypatch):
    """Rows differ with a log-sd of 0.5 in groups of 8: every threshold rejects 4 to 6 % of longer responses at 5 %.

    That is the mean over nulls. The share of one null varies: the 5 % point of 1,000 prompts has a standard error of
    √(0.05 × 0.95 / 1,000) = 0.7 percentage points, whatever splices are made of.
    """
    monkeypatch.setattr(calibration, "REPLICATES", 2)
    fresh = statistics_of(synthetic_pool(8000, 1000, seed=100, shift=shift))
    shares = dict.fromkeys(fresh, 0.0)
    for seed in range(NULLS):
        found = calibrate(null_of(synthetic_pool(8000, 100, seed=seed, group=8, shift=shift)), lengths=[1000])
        for name, values in fresh.items():
            shares[name] += rejected_share(found.limit(name, 1000), values) / NULLS
    print(shift, {name: f"{share:.2%}" for name, share in shares.items()})  # noqa: T201
    for name, share in shares.items():
        assert 0.04 <= share <= 0.06, name


def test_one_outlier_leaves_the_level_of_its_row():
    """Rows of equal noise, one d of each ten times as large: levels differ as without it."""
    pool = 0.02 * np.random.default_rng(0).normal(size=(400, 100))
    outliers = pool.copy()
    outliers[::2, 0] = 0.2
    plain, spiked = (UnitRows.of_table(null_of(one).profile.rows) for one in (pool, outliers))
    levels = RowLevels(np.array([1.0, 0.0]), np.zeros(2))
    one, other = (levels.drawn(rows, np.random.default_rng(1))[0] for rows in (plain, spiked))
    assert abs(other[::2].mean() - other[1::2].mean()) < 0.1
    assert np.corrcoef(one, other)[0, 1] > 0.9


def test_rows_without_levels_splice_as_independent_ones():
    """No level is found where there is none, and long sums spread like independent rows."""
    pool = 0.02 * np.random.default_rng(0).normal(size=(2000, 50))
    null = null_of(pool)
    levels = row_levels(halves_of(null.sample))
    assert levels.between.tolist() == [0.0, 0.0]
    rows = UnitRows.of_table(null.profile.rows)
    made = splices(rows, 500, 4000, np.random.default_rng(1), levels)
    assert made[0].std() == pytest.approx(0.02 * math.sqrt(500), rel=0.05)


def test_alarms_count_prompts_and_not_rows():
    """Steps of 8 prompts with 8 responses each: a healthy one in fifty raises an alarm, and not one in eight."""
    null = null_of(synthetic_pool(8000, 100, seed=1, group=8), group=8)
    found = calibrate(null, lengths=[100], alarm_rate=0.02, sequences=64)
    steps = synthetic_pool(64 * 1000, 100, seed=8, group=8).reshape(1000, -1)
    k3, std = (np.expm1(steps) - steps).mean(1), steps.std(1)
    for alarm, values in zip(found.alarms, (k3, std), strict=True):
        assert 0.005 < (values > alarm.limit.value).mean() < 0.045, alarm.metric


def test_the_interval_of_a_quantile_lies_between_two_order_statistics():
    """By hand, for the median of 10 values: P(2 ≤ X ≤ 8) = 1 − 22 / 1024 with X ~ Bin(10, 1/2)."""
    assert _quantile_ranks(10, 0.5) == (2, 9)
    estimate = quantile_estimate(np.arange(1.0, 11.0), 0.5)
    assert (estimate.value, estimate.low, estimate.high) == (5.5, 2.0, 9.0)


def test_a_quantile_beyond_the_sample_is_not_bounded():
    estimate = quantile_estimate(np.arange(50.0), 0.999)
    assert estimate.high == math.inf
    assert estimate.low < 49


def test_a_length_that_the_null_lacks_is_said_to_be_made():
    null = null_of(synthetic_pool(300, 40, seed=1))
    found = calibrate(null, lengths=[20, 40, 400])
    sources = {length: found.limit("veto", length).source for length in (20, 40, 400)}
    assert sources == {20: "cut", 40: "recorded", 400: "spliced"}
    assert [remark.split(" is ")[1].split()[0] for remark in found.remarks] == ["cut", "extrapolated:"]


def test_cut_sequences_are_windows_of_the_sampled_tokens():
    pool = synthetic_pool(2000, 60, seed=1)
    found = calibrate(null_of(pool), lengths=[20])
    fresh = statistics_of(synthetic_pool(8000, 20, seed=2))
    for setting in ("seq_mean_k3", "seq_sum_k1", "seq_max_k2"):
        assert rejected_share(found.limit(setting, 20), fresh[setting]) == pytest.approx(0.05, abs=0.015)


def test_rows_of_different_lengths_are_spliced_to_the_wanted_one():
    """d is 0.01 everywhere, so S = 0.01 T whatever rows a splice is made of."""
    tokens = np.array([30.0, 50.0, 70.0] * 100)
    sums = np.stack([0.01 * tokens, 0.00005 * tokens, 0.00005 * tokens])
    rows = UnitRows(tokens, sums, np.full(300, 0.01), np.full(300, 0.01), np.arange(300))
    drawn = splices(rows, 1000, 500, np.random.default_rng(0), row_levels(halves_of(())))
    np.testing.assert_allclose(drawn[0], 10.0, rtol=1e-9)
    np.testing.assert_allclose(drawn[1], 0.05, rtol=1e-9)


def test_a_null_without_tokens_of_rows_gives_thresholds_of_its_histogram():
    pool = synthetic_pool(2000, 60, seed=1)
    exact, binned = (calibrate(null_of(pool, sampled=n), lengths=[60]) for n in (1 << 17, 0))
    for setting in ("token_k1", "token_k2", "token_k3", "token ceiling"):
        one, other = exact.limit(setting).upper, binned.limit(setting).upper
        size = (lambda x: x) if setting in ("token_k2", "token_k3") else math.log
        assert size(other.value) == pytest.approx(size(one.value), rel=0.2), setting
        assert other.low <= other.value <= other.high


def test_healthy_steps_rarely_raise_the_alarms():
    found = calibrated("synthetic", 100, 8000, 100)
    steps = synthetic_pool(64 * 1000, 100, seed=8).reshape(1000, -1)
    k3, std = (np.expm1(steps) - steps).mean(1), steps.std(1)
    for alarm, values in zip(found.alarms, (k3, std), strict=True):
        assert 0.005 < (values > alarm.limit.value).mean() < 0.04, alarm.metric


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "the rate is a share between 0 and 0.5; got 0"),
        ({"alarm_rate": 1.0}, "the alarm rate is a share"),
        ({"lengths": [0]}, "a length is 1 or more; got 0"),
        ({"sequences": 0}, "a number of sequences is 1 or more"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(options, message):
    with pytest.raises(BadInputError, match=message):
        calibrate(null_of(synthetic_pool(300, 20, seed=1)), **options)


def test_a_small_null_is_refused():
    with pytest.raises(BadInputError, match="pool has 100 rows, and a quantile needs 200"):
        calibrate(null_of(synthetic_pool(100, 20, seed=1)))


def test_the_thresholds_are_what_a_configuration_reads():
    """The calibrated text, put into a configuration, rejects the rate of the null's own rows."""
    pool = synthetic_pool(1000, 40, seed=1)
    found = calibrate(null_of(pool), lengths=[40])
    rollout = torch.full((1000, 40), -1.0, dtype=torch.float64)
    train = rollout + torch.from_numpy(pool)
    for setting in ("seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k2", "seq_sum_k2"):
        config = RolloutCorrectionConfig(rollout_rs=setting, rollout_rs_threshold=found.limit(setting, 40).text)
        kept = correct(train, rollout, torch.ones(1000, 40), config).loss_mask.any(1)
        assert float(1 - kept.double().mean()) == pytest.approx(0.05, abs=0.004), setting


def test_a_value_that_many_sequences_share_is_kept_with_its_threshold():
    """The largest |d| of 30 % of the sequences is one of two values, that of 3 % is larger: only these may go."""
    random = np.random.default_rng(0)
    rollout = np.full((1000, 40), -1.7, dtype=np.float32)
    train = (rollout + 1e-3 * random.normal(size=rollout.shape)).astype(np.float32)
    for first, last, d in ((0, 150, 0.026), (150, 300, -0.026), (300, 330, 0.11)):
        train[first:last, 7] = rollout[first:last, 7] + np.float32(d)
    profile = MismatchProfile.of(train.ravel(), rollout.ravel(), np.ones(40_000, dtype=bool), np.full(1000, 40))
    null = MismatchNull(name="pool", kind="log", profile=profile, share=profile.share)
    found = calibrate(null, lengths=[40])
    for setting in ("seq_max_k2", "seq_max_k3"):
        config = RolloutCorrectionConfig(rollout_rs=setting, rollout_rs_threshold=found.limit(setting, 40).text)
        both = torch.from_numpy(train), torch.from_numpy(rollout)
        kept = correct(*both, torch.ones(1000, 40), config).loss_mask.any(1)
        assert int((~kept).sum()) == 30, setting

    # A framework that computes all of it in float32 keeps them too.
    d = train - rollout
    for setting, size in (("seq_max_k2", d * d / 2), ("seq_max_k3", np.expm1(d) - d)):
        assert size.dtype == np.float32
        assert int((size.max(1) > np.float32(found.limit(setting, 40).text)).sum()) == 30, setting
    threshold = float(found.limit("veto", 40).text)
    veto = RolloutCorrectionConfig(rollout_is="token", rollout_token_veto_threshold=threshold)
    assert correct(*both, torch.ones(1000, 40), veto).loss_mask.any(1).all()


def test_the_file_holds_what_was_calibrated(tmp_path):
    found = calibrate(null_of(synthetic_pool(300, 40, seed=1)), lengths=[40])
    found.save(tmp_path / "thresholds.json")
    document = json.loads((tmp_path / "thresholds.json").read_text(encoding="utf-8"))
    assert (document["format"], document["rows"], document["rate"]) == ("rollcorr-calibration", 300, 0.05)
    by_setting = {(one["setting"], one["length"]): one for one in document["limits"]}
    assert by_setting["seq_mean_k3", 40]["upper"]["value"] == found.limit("seq_mean_k3", 40).upper.value
    with pytest.raises(KeyError, match="no threshold for seq_mean_k3 at length 7"):
        found.limit("seq_mean_k3", 7)


def test_the_table_of_noise_is_what_noise_does():
    """Drawn: the shares of 20,000 sequences of 100 normal tokens."""
    sigma, random = 0.05, np.random.default_rng(0)
    noise = sigma * random.normal(size=(20_000, 100)) - sigma**2 / 2
    product = np.exp(noise.sum(1))
    table = {(row.limit, row.shows): row.shares[0] for row in noise_table(sigmas=[sigma], lengths=[100])}
    drawn = {
        ("seq_sum_k1 0.5_2.0", "sequences rejected"): ((product < 0.5) | (product > 2)).mean(),
        ("seq_mean_k1 0.999_1.001", "sequences rejected"): (np.abs(noise.mean(1)) > 0.001).mean(),
        ("sequence weights 2.0", "weights above the ceiling"): (product > 2).mean(),
    }

    # The first threshold of token_k3 rejects no token at this noise; a multiple of it does.
    wide = 8 * (noise + sigma**2 / 2) - (8 * sigma) ** 2 / 2
    rows = noise_table(sigmas=[8 * sigma], lengths=[100])
    table |= {(row.limit, row.shows): row.shares[0] for row in rows if row.limit.startswith("token_k3")}
    drawn["token_k3 0.1", "tokens rejected"] = (np.expm1(wide) - wide > 0.1).mean()
    for row, share in drawn.items():
        assert table[row] == pytest.approx(share, abs=0.01), row


def test_a_splice_has_the_mean_of_all_rows_and_not_of_the_table_alone(monkeypatch):
    """The table keeps every fourth row here, and these have three times the k3 of the rest."""
    from rollcorr.diagnostics.advice.calibration import _with_means_of_all
    from rollcorr.diagnostics.null import mismatch_profile

    monkeypatch.setattr(mismatch_profile, "ROWS", 256)
    pool = synthetic_pool(2000, 40, seed=1)
    pool[::4] *= math.sqrt(3)
    null = null_of(pool)
    table = null.profile.rows
    assert table.stride == 4
    rows = _with_means_of_all(UnitRows.of_table(table), null.profile)
    made = splices(rows, 8000, 2000, np.random.default_rng(0), row_levels(halves_of(null.sample)))
    assert made[2].mean() / 8000 == pytest.approx(null.profile.k3, rel=0.05)
    assert table.column("sum_k3").sum() / table.column("tokens").sum() > 1.5 * null.profile.k3
