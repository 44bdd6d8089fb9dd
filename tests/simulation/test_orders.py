"""The published orders, by slopes on exact numbers; the better bounds, as inequalities; χ² growth and the clamp."""

import math

import pytest
import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.simulation import gradient_error, gradient_sums, make_pair
from rollcorr.simulation.mismatches import KINDS, pair_at_kl
from rollcorr.simulation.orders import ORDER_CHECKS, coin_with_chi2, fit_slope
from rollcorr.simulation.sequence_rows import every_sequence
from rollcorr.simulation.studies import CLAMP, PUBLISHED_LENGTHS, clamp


def log_law_of_chi2(pair):
    """T log(1 + χ̄²), nats: log E_μ[ρ(y)²] where every state has the same χ²."""
    return pair.length * math.log1p(pair.chi2)


def weights(level, ceiling=None):
    return RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=ceiling)


def test_a_power_law_is_fitted_exactly_and_a_bend_widens_the_error():
    assert fit_slope([1, 2, 4, 8], [3, 12, 48, 192]) == (pytest.approx(2), pytest.approx(0))
    slope, error = fit_slope([1, 2, 4, 8], [3, 12, 48, 100])
    assert slope < 2
    assert error > 0.1


@pytest.mark.parametrize("check", ORDER_CHECKS, ids=lambda check: f"{check.estimator}: {check.quantity}")
def test_an_order_is_attained_or_lower_by_the_power_that_is_proved(check):
    slope, _ = fit_slope(*check.points())
    if check.attained:
        assert slope == pytest.approx(check.published, abs=0.15)
    elif check.published > 0 and check.quantity.startswith("bias"):
        assert slope == pytest.approx(check.published - 0.5, abs=0.15)
    else:
        assert slope == pytest.approx(check.published - 1, abs=0.15)


def facts(kind):
    severity = {"top_k": 1.0, "truncated": 0.2}.get(kind, 0.6)
    pair = make_pair(kind, severity, vocabulary=4, length=5, outcome=True)
    rows = every_sequence(pair)
    probabilities = pair.trainer.log_probs.exp()
    largest_score = float((1 - probabilities.square().sum(-1)).max())
    return pair, rows, largest_score, float(rows.advantages.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ceiling", [0.5, 1.5, 4.0])
def test_the_variance_of_truncated_sequence_weights_is_at_most_of_order_t_times_c(kind, ceiling):
    """E_μ|f|² ≤ a² C T F: one power of T and one of C below the published T² C²."""
    pair, rows, largest_score, largest_advantage = facts(kind)
    second = float(gradient_sums(rows, weights("sequence", ceiling)).second.sum())
    assert 0 < second <= largest_advantage**2 * ceiling * pair.length * largest_score * (1 + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_variance_of_untruncated_token_weights_is_at_most_of_order_t(kind):
    """Scores weighted by ρ are uncorrelated under μ, as long as μ can sample every token."""
    pair, rows, largest_score, largest_advantage = facts(kind)
    second = float(gradient_sums(rows, weights("token")).second.sum())
    squares = (rows.train_log_prob - rows.rollout_log_prob).mul(2).exp() * rows.score_squares()
    added = float((rows.probability[:, None] * squares).sum())
    if pair.rollout.logits.isfinite().all():
        assert 0 < second <= largest_advantage**2 * added * (1 + 1e-6)
        total = rows.score_sums((rows.train_log_prob - rows.rollout_log_prob).exp()).square().sum((-1, -2))
        assert float(rows.probability @ total) == pytest.approx(added)
    assert largest_score < 1


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"truncated", "top_k"}))
@pytest.mark.parametrize("ceiling", [1.5, 4.0])
def test_the_bias_of_truncated_sequence_weights_keeps_both_bounds(kind, ceiling):
    """|bias| ≤ a √((1 + χ²) T F / C), and the published a T g (1 + χ²) / C, with g the longest score."""
    pair, rows, largest_score, largest_advantage = facts(kind)
    error = gradient_error(gradient_sums(rows, weights("sequence", ceiling)), pair.gradient, 1)
    bias = error.bias.value * float(pair.gradient.norm())
    growth = 1 + pair.sequence_chi2
    longest = float(rows.score_squares().max().sqrt())
    assert bias <= largest_advantage * math.sqrt(growth * pair.length * largest_score / ceiling)
    assert 0 < bias <= largest_advantage * pair.length * longest * growth / ceiling


def test_the_law_of_chi2_holds_where_all_states_are_alike():
    for length in (1, 30, 1000):
        pair = coin_with_chi2(0.01, length)
        assert pair.chi2 == pytest.approx(0.01)
        assert pair.sequence_log_second_moment == pytest.approx(log_law_of_chi2(pair), rel=1e-9)

    # The document's examples: "20,000 ×", and 0.99^1000 = 0.00004.
    assert math.expm1(pair.sequence_log_second_moment) == pytest.approx(20_958, rel=1e-4)
    assert pytest.approx(4.3e-5, rel=0.01) == 0.99**1000


def test_states_that_differ_change_the_exponent_of_the_law():
    """Large weights lead to other states than μ visits, so the mean over μ's visits is not the rate of growth."""
    pair = pair_at_kl("stale", 0.01, vocabulary=8, length=300, seed=2)
    assert pair.sequence_log_second_moment == pytest.approx(0.905 * log_law_of_chi2(pair), rel=0.01)
    pair = pair_at_kl("heavy_tailed", 0.01, vocabulary=8, length=300, seed=0)
    assert pair.sequence_log_second_moment == pytest.approx(1.02 * log_law_of_chi2(pair), rel=0.01)


def test_the_published_lengths_are_the_clamp_over_kl():
    for kl, length in PUBLISHED_LENGTHS.items():
        assert CLAMP / kl == pytest.approx(length, rel=0.011)


def test_at_the_longest_viable_length_half_of_the_weights_are_clamped_and_the_sample_size_is_long_gone():
    (row,) = clamp(kl=0.05, published=400, samples=64, seed=4)
    assert row["t_max"] == pytest.approx(400)
    assert row["metric_max_viable_length"] == pytest.approx(400, rel=0.1)
    assert 0.5 - 4 * 0.0625 < row["saturated_low"] < 0.5 + 4 * 0.0625
    assert row["ess_at_t_max"] < 0.1
    assert row["ess_half_at"] < 10
    assert torch.get_default_dtype() == torch.float32
