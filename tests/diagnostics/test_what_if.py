"""Every preset on one log: sums that merge, a gain with the error of random rejection, and the groups of presets."""

import math

import numpy as np
import pytest
import torch

from rollcorr import RolloutCorrectionConfig, correct
from rollcorr.config.presets import PRESETS
from rollcorr.diagnostics import check_logs
from rollcorr.diagnostics.log_check.log_totals import PRESETS_ONCE, SAME_AS, PresetTotals
from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter


def batch_of(train, rollout, **columns):
    return RolloutBatch.from_padded(torch.ones(train.shape), rollout_log_prob=rollout, old_log_prob=train, **columns)


def totals_of(batch):
    packed = [batch.packed(name) for name in ("old_log_prob", "rollout_log_prob", "response_mask")]
    return PresetTotals.of(batch, *packed, TokenRatios.of(*(x.numpy() for x in (*packed, batch.lengths))))


def noisy(rows, length, seed=0, noise=0.3):
    """Rows of different noise, as float32 log-probs."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, length, generator=generator) - 1
    own = noise * torch.rand(rows, 1, generator=generator)
    train = (rollout + own * torch.randn(rows, length, generator=generator)).clamp(max=-0.01)
    return train, rollout


def by_preset(rows):
    return {row.preset: row for row in rows}


def test_by_hand():
    """Two rows of two tokens; the second has d = log 4 twice: k3 = 3 − log 4 each, and a product of 16."""
    rollout = torch.tensor([[-2.0, -2.0], [-2.0, -2.0]])
    train = rollout + torch.tensor([[0.0, 0.0], [math.log(4), math.log(4)]])
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    found = by_preset(totals_of(batch_of(train, rollout, advantages=advantages)).rows())

    # Token weights are 1, 1, 2, 2: ESS 36 / (4 · 10), change √((1 + 1) / 4).
    weighted = found["decoupled_token_is"]
    assert (weighted.rejected_sequences, weighted.rejected_tokens, weighted.gain) == (0.0, 0.0, None)
    assert weighted.effective_share == pytest.approx(0.9)
    assert weighted.gradient_change == pytest.approx(math.sqrt(0.5), rel=1e-6)

    # The k3 filter leaves the first row. Both halves were 1/4 of the loss per token; now it is 1/2 and 0.
    filtered = found["decoupled_k3_rs"]
    assert (filtered.rejected_sequences, filtered.rejected_tokens, filtered.effective_share) == (0.5, 0.5, 0.5)
    assert filtered.gradient_change == pytest.approx(1.0)
    assert filtered.gain == pytest.approx((3 - math.log(4)) / 2, rel=1e-6)


def test_random_rejection_has_the_stated_error():
    """10,000 random choices of as many rows: their mean k3 has the standard error that the table states."""
    train, rollout = noisy(200, 20)
    row = by_preset(totals_of(batch_of(train, rollout)).rows())["decoupled_k3_rs"]
    assert 0.2 < row.rejected_sequences < 0.8

    d = (train - rollout).double().numpy()
    k3 = (np.expm1(d) - d).mean(1)
    kept, random = round(200 * (1 - row.rejected_sequences)), np.random.default_rng(0)
    means = [k3[random.permutation(200)[:kept]].mean() for _ in range(2000)]
    assert row.gain_error == pytest.approx(np.std(means), rel=0.06)

    # A filter on k3 does far better than that, by construction.
    assert row.gain > 5 * row.gain_error


def test_a_filter_that_looks_at_nothing_gains_nothing():
    """All rows have the same noise, and the product of 8 ratios rejects by chance."""
    generator = torch.Generator().manual_seed(4)
    rollout = torch.full((1000, 200), -2.0)
    train = rollout + 0.01 * torch.randn(1000, 200, generator=generator)
    row = by_preset(totals_of(batch_of(train, rollout)).rows())["decoupled_geo_rs"]
    assert row.rejected_sequences > 0.02
    assert abs(row.gain) < 4 * row.gain_error


@pytest.mark.parametrize("name", ["decoupled_token_icepop", "decoupled_seq_is_rs", "geo_rs", "decoupled_k3_rs_seq_tis"])
def test_the_shares_are_those_of_the_correction_itself(name):
    train, rollout = noisy(60, 12, noise=1.5)
    row = by_preset(totals_of(batch_of(train, rollout)).rows())[name]
    correction = correct(train, rollout, torch.ones(60, 12), name)
    weight = correction.loss_mask.double()
    if correction.weights is not None:
        weight = weight * correction.weights
    assert row.rejected_tokens == pytest.approx(float((weight == 0).double().mean()), abs=1e-12)
    assert row.effective_share == pytest.approx(float(weight.sum() ** 2 / (720 * weight.square().sum())), rel=1e-6)


def test_every_preset_stands_in_one_line():
    shown = [name for first in PRESETS_ONCE for name in (first, *SAME_AS[first])]
    assert sorted(shown) == sorted(name for name in PRESETS if "_horizon_" not in name)
    assert "tis" in SAME_AS["decoupled_token_is"]
    assert RolloutCorrectionConfig.preset("geo_rs") == PRESETS_ONCE["geo_rs"]  # with its veto, another filter


def test_without_advantages_the_change_of_the_gradient_is_not_recorded():
    train, rollout = noisy(8, 4)
    half = torch.ones(8, 4).masked_fill(torch.arange(8)[:, None] < 4, torch.nan)
    for columns in ({}, {"advantages": half}):
        assert {row.gradient_change for row in totals_of(batch_of(train, rollout, **columns)).rows()} == {None}


def test_missing_log_probs_are_no_tokens():
    train, rollout = noisy(40, 6)
    with_gap = rollout.clone()
    with_gap[:, 5] = torch.nan
    gap, without = (totals_of(batch_of(train[:, :n], r[:, :n])) for r, n in ((with_gap, 6), (rollout, 5)))
    np.testing.assert_allclose(gap.log, without.log, rtol=1e-12)
    for name in PRESETS_ONCE:
        np.testing.assert_allclose(gap.presets[name], without.presets[name], rtol=1e-12)


def test_any_number_of_workers_gives_the_same_numbers(tmp_path):
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        for seed in range(3):
            train, rollout = noisy(16, 8, seed=seed)
            log.write(batch_of(train, rollout, advantages=train))
    one, two = (check_logs([tmp_path / "log.parquet"], what_if=True, workers=n).what_if for n in (1, 2))
    assert one == two
    assert len(one) == len(PRESETS_ONCE)
    assert check_logs([tmp_path / "log.parquet"]).what_if == ()
