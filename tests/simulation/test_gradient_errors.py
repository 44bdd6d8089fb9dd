"""Bias, variance and ESS of estimators: exact rows against full batches, samples against exact values, controls."""

import itertools
import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

from rollcorr import correct
from rollcorr.config import PRESETS, RolloutCorrectionConfig
from rollcorr.simulation import LossCoefficients, gradient_error, gradient_sums, make_pair, measure, sample_rows
from rollcorr.simulation.gradient_errors import (
    batch_gradient,
    inverse_kept,
    loss_coefficients,
    random_rejection,
    rejected_unit,
    without_rejection,
)
from rollcorr.simulation.mismatches import KINDS
from rollcorr.simulation.sequence_rows import every_count, every_sequence, mixed_rows

TOKEN_FILTER = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=1.3)
VETO = RolloutCorrectionConfig(rollout_token_veto_threshold=0.5)
FIXED = RolloutCorrectionConfig(
    rollout_is="sequence", rollout_rs="seq_max_k2", rollout_rs_threshold=0.1, normalizer="original"
)


def preset(name):
    return RolloutCorrectionConfig.preset(name)


def test_without_mismatch_every_preset_gives_the_exact_gradient():
    rows = every_sequence(make_pair("noise", 0.0, vocabulary=3, length=4))
    for name in PRESETS:
        error = gradient_error(gradient_sums(rows, preset(name)), rows.pair.gradient, 8)
        assert error.bias.value < 1e-6, name
        assert error.ess.value == pytest.approx(1)
        assert error.kept.value == 1


def test_untruncated_sequence_weights_have_no_bias_and_token_weights_have_one():
    rows = every_sequence(make_pair("noise", 0.5, vocabulary=3, length=5))
    whole = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=None)
    token = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=None)
    bias = {c: gradient_error(gradient_sums(rows, c), rows.pair.gradient, 8).bias.value for c in (None, whole, token)}
    assert bias[whole] < 1e-6
    assert 1e-3 < bias[token] < bias[None]


def test_a_formula_of_ones_own_is_measured_as_a_configuration_is():
    """Token weights truncated at 1.1, by hand: the same sums as the package's."""
    rows = sample_rows(make_pair("noise", 0.3, vocabulary=4, length=6), 300, torch.Generator().manual_seed(0))
    weights = (rows.train_log_prob - rows.rollout_log_prob).exp().clamp(max=1.1)
    own = gradient_sums(rows, LossCoefficients(weights * rows.advantages[:, None], rows.mask))
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.1)
    expected = gradient_error(gradient_sums(rows, config), rows.pair.gradient, 8)
    found = gradient_error(own, rows.pair.gradient, 8)
    for name in ("bias", "deviation", "direction", "ess", "kept"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5, abs=1e-7), name


def test_a_formula_of_ones_own_stands_in_the_table_of_configurations():
    rows = every_sequence(make_pair("noise", 0.3, vocabulary=3, length=4))
    own = LossCoefficients(rows.advantages[:, None].expand(rows.mask.shape), rows.mask)
    plain, formula = measure(rows, {"none": None, "own": own}, (8,))
    assert (formula["estimator"], formula["unit"]) == ("own", "")
    assert formula["bias"] == pytest.approx(plain["bias"], rel=1e-6)


def test_tokens_outside_the_mask_of_ones_own_formula_are_rejected():
    rows = sample_rows(make_pair("noise", 0.3, vocabulary=4, length=6), 300, torch.Generator().manual_seed(0))
    log_ratio = rows.train_log_prob - rows.rollout_log_prob
    keep = rows.mask & (log_ratio.abs() < 0.2)
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=math.exp(0.2))
    expected = gradient_error(gradient_sums(rows, config), rows.pair.gradient, 8)
    assert 0.2 < expected.kept.value < 0.9
    plain = rows.advantages[:, None].expand_as(log_ratio)
    found = gradient_error(gradient_sums(rows, LossCoefficients(plain, keep)), rows.pair.gradient, 8)
    for name in ("bias", "deviation", "direction", "ess", "kept"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5, abs=1e-7), name


def test_a_coefficient_that_is_no_number_is_refused():
    rows = every_sequence(make_pair("noise", 0.3, vocabulary=3, length=4))
    with pytest.raises(ValueError, match="324 coefficients of tokens in the loss are NaN or infinite"):
        gradient_sums(rows, LossCoefficients(torch.full(rows.mask.shape, math.nan), rows.mask))


def test_the_error_of_a_bias_is_never_0_on_sampled_rows_and_covers_the_truth():
    """Untruncated sequence weights have no bias: of 40 estimates, most lie within two standard errors of it."""
    pair = make_pair("tempered", 0.2, vocabulary=4, length=8)
    whole = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=None)
    biases = []
    for seed in range(40):
        rows = sample_rows(pair, 400, torch.Generator().manual_seed(seed))
        biases.append(gradient_error(gradient_sums(rows, whole), pair.gradient, 64).bias)
    assert any(bias.value == 0 for bias in biases)
    assert all(bias.error > 0 for bias in biases)
    assert sum(bias.value <= 2 * bias.error for bias in biases) >= 34


def test_coefficients_of_another_shape_are_refused():
    rows = every_sequence(make_pair("noise", 0.3, vocabulary=3, length=4))
    with pytest.raises(ValueError, match=r"must be \(n, T\) = \(81, 4\); got \(81,\) and \(81, 4\)"):
        gradient_sums(rows, LossCoefficients(rows.advantages, rows.mask))


def test_decoupled_and_bypass_reinforce_presets_agree_on_the_first_update():
    rows = every_sequence(make_pair("noise", 0.3, vocabulary=3, length=4))
    for one, other in (
        ("decoupled_seq_is", "bypass_pg_is"),
        ("decoupled_token_icepop", "bypass_pg_token_icepop"),
        ("decoupled_geo_rs_seq_tis", "bypass_pg_geo_rs_seq_tis"),
    ):
        first, second = (loss_coefficients(rows, preset(name)) for name in (one, other))
        torch.testing.assert_close(first.coefficients, second.coefficients, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("config", [None, preset("bypass_ppo_clip"), TOKEN_FILTER, VETO, FIXED], ids=str)
def test_every_batch_of_two_has_the_mean_and_variance_that_the_sums_give(config):
    """All 8² batches with their probability, each through the full loss with the package's own denominators."""
    pair = make_pair("heavy_tailed", 0.8, vocabulary=2, length=3)
    rows = every_sequence(pair)
    mean, square = torch.zeros_like(pair.gradient), 0.0
    for i, j in itertools.product(range(len(rows)), repeat=2):
        two = rows.pick(torch.tensor([i, j]))
        gradient = batch_gradient(two, config)
        probability = float(two.probability.prod())
        mean += probability * gradient
        square += probability * float(gradient.square().sum())
    scale = float(pair.gradient.square().sum())

    error = gradient_error(gradient_sums(rows, config), pair.gradient, 2)
    assert error.bias.value == pytest.approx(math.sqrt(float((mean - pair.gradient).square().sum()) / scale), rel=1e-5)
    assert error.deviation.value**2 == pytest.approx((square - float(mean.square().sum())) / scale, rel=1e-5)
    assert error.mse.value == pytest.approx(error.bias.value**2 + error.deviation.value**2)
    aligned = float((mean * pair.gradient).sum()) ** 2 / (scale * square)
    assert error.direction.value == pytest.approx(math.sqrt(1 - aligned), rel=1e-5)
    assert error.exact
    if config not in (None, preset("bypass_ppo_clip")):
        assert 0 < error.kept_sequences.value < 1 or config is TOKEN_FILTER
        assert 0 < error.kept.value < 1


def test_rows_by_counts_measure_what_rows_by_sequences_measure():
    pair = make_pair("noise", 0.6, vocabulary=3, length=6, states=1, outcome=True)
    # Counts lose the order of the tokens, which a horizon reads.
    for name in (*(name for name in PRESETS if "_horizon_" not in name), None):
        config = None if name is None else preset(name)
        one, other = (gradient_sums(rows, config) for rows in (every_count(pair), every_sequence(pair)))
        for field in ("kept_weight", "first", "factors", "tokens"):
            torch.testing.assert_close(getattr(one, field), getattr(other, field), rtol=1e-5, atol=1e-9, msg=name)


def test_ess_is_the_package_metric_of_the_same_batch():
    rows = sample_rows(make_pair("noise", 0.3), 500, torch.Generator().manual_seed(0))
    for name in ("decoupled_token_is", "decoupled_seq_is"):
        told = correct(rows.train_log_prob, rows.rollout_log_prob, rows.mask, name).metrics(prefix="")
        measured = gradient_error(gradient_sums(rows, preset(name)), rows.pair.gradient, 8)
        assert measured.ess.value == pytest.approx(told["rollout_is_eff_sample_size"], rel=1e-6)


def test_inverse_kept_by_hand():
    assert inverse_kept(2, 0.5) == pytest.approx(0.5 * 1 + 0.25 / 2)
    assert inverse_kept(7, 1.0) == 1 / 7


def four_sigma(comparisons):
    """The z at which all comparisons together are as unlikely as one at 4."""
    chance = 2 * (1 - NormalDist().cdf(4))
    return NormalDist().inv_cdf(1 - chance / comparisons / 2)


def deviations(pair, configs, count, seed):
    """(sampled mean − exact mean) / exact standard error, for each configuration and entry of the gradient."""
    every = every_sequence(pair)
    rows = sample_rows(pair, count, torch.Generator().manual_seed(seed))
    found = []
    for config in configs:
        exact, sampled = gradient_sums(every, config), gradient_sums(rows, config)
        mean = exact.first.sum(0)
        error = ((exact.second.sum(0) - mean.square()).clamp(min=0) / count).sqrt()
        varies = error > 1e-9
        found.append(((sampled.first.sum(0) - mean) / error)[varies])
        assert varies.any() or exact.kept_weight.sum() == 0
    return torch.cat(found)


DISTINCT = ("decoupled_token_is", "decoupled_seq_is_rs", "decoupled_k3_rs", "bypass_ppo_clip")


@pytest.mark.parametrize("kind", KINDS)
def test_samples_agree_with_exact_values_within_four_exact_standard_errors(kind):
    """20,000 draws for each kind; the study repeats it with a million for every preset."""
    pair = make_pair(kind, 1.0 if kind == "top_k" else 0.3, vocabulary=4, length=5, seed=3)
    z = deviations(pair, [None, *map(preset, DISTINCT), TOKEN_FILTER], 20_000, seed=7)
    assert z.abs().max() <= four_sigma(len(z))


def test_the_exact_standard_errors_are_not_too_wide_either():
    """Over forty seeds the squared deviations average 1, so four of them is a real limit."""
    pair, config = make_pair("noise", 0.4, vocabulary=3, length=3), [preset("decoupled_seq_is")]
    z = torch.cat([deviations(pair, config, 2000, seed) for seed in range(40)])
    assert 0.6 < z.square().mean() < 1.6


def test_a_million_samples_agree_with_exact_values():
    z = deviations(make_pair("noise", 0.4, vocabulary=3, length=3), [preset("decoupled_seq_is")], 1_000_000, seed=1)
    assert z.abs().max() <= four_sigma(len(z))


def test_intervals_of_sampled_numbers_cover_the_exact_ones():
    pair = make_pair("noise", 0.4, vocabulary=4, length=5)
    config = preset("decoupled_seq_is_rs")
    exact = gradient_error(gradient_sums(every_sequence(pair), config), pair.gradient, 32)
    inside = total = 0
    for seed in range(12):
        rows = sample_rows(pair, 4000, torch.Generator().manual_seed(seed))
        sampled = gradient_error(gradient_sums(rows, config), pair.gradient, 32)
        assert not sampled.exact
        for name in ("deviation", "mse", "ess", "kept"):
            found, true = getattr(sampled, name), getattr(exact, name).value
            inside += abs(found.value - true) <= 2 * found.error
            total += 1
    assert inside >= 0.85 * total


@pytest.mark.parametrize("config", [TOKEN_FILTER, preset("decoupled_seq_is_rs"), VETO], ids=str)
def test_the_control_is_what_random_rejection_does(config):
    """Random masks of the same share, drawn and put on the unfiltered loss."""
    pair = make_pair("heavy_tailed", 0.5, vocabulary=3, length=4)
    rows, unit = every_sequence(pair), rejected_unit(config)
    plain = without_rejection(config)
    filtered = gradient_sums(rows, config)
    control = random_rejection(filtered, gradient_sums(rows, plain), rows, unit=unit)
    error = gradient_error(control, pair.gradient, 16)
    assert error.kept.value == pytest.approx(gradient_error(filtered, pair.gradient, 16).kept.value, rel=0.1)

    count, generator = 100_000, torch.Generator().manual_seed(0)
    drawn = sample_rows(pair, count, generator)
    shape = (count, 1) if unit == "sequence" else drawn.mask.shape
    share = filtered.kept_weight.sum() if unit == "sequence" else filtered.tokens.sum(0)[2] / filtered.tokens.sum(0)[1]
    coefficients, loss_mask = loss_coefficients(drawn, plain)
    thinned = LossCoefficients(coefficients, loss_mask & (torch.rand(shape, generator=generator) < share))
    simulated = gradient_error(gradient_sums(drawn, thinned), pair.gradient, 16)
    for name in ("bias", "deviation", "mse", "kept_sequences"):
        found = getattr(simulated, name)
        assert getattr(error, name).value == pytest.approx(found.value, abs=4 * found.error + 2e-3), name


def test_what_depends_on_the_whole_batch_is_refused():
    rows = every_sequence(make_pair("noise", 0.3, vocabulary=3, length=2))
    with pytest.raises(ValueError, match="measure whole batches, with batch_gradient"):
        gradient_sums(rows, RolloutCorrectionConfig(rollout_is="token", normalizer="weights"))


def test_a_filter_gains_over_its_control_where_a_worker_is_broken():
    """Five percent of the sequences come from an unrelated policy; without them a filter has no gain."""
    pair = make_pair("noise", 0.2, vocabulary=4, length=6, spread=3.0)
    broken = replace(pair, rollout=pair.trainer.with_logits(torch.zeros_like(pair.trainer.logits)))
    generator = torch.Generator().manual_seed(0)
    honest, garbage = (sample_rows(one, 50_000, generator) for one in (pair, broken))
    mixture = mixed_rows(honest, garbage, 0.05)
    assert float(mixture.probability.sum()) == pytest.approx(1)
    config = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.75_inf")

    gains = []
    for rows in (honest, mixture):
        filtered = gradient_sums(rows, config)
        control = random_rejection(filtered, gradient_sums(rows, without_rejection(config)), rows, unit="sequence")
        found, random = (gradient_error(sums, pair.gradient, 4096) for sums in (filtered, control))
        gains.append(random.direction.value - found.direction.value)
    assert gains[0] < 0.002
    assert gains[1] > 0.1
