"""Exact values: dynamic programming against finite differences, against sums over every sequence, and by hand."""

import math

import pytest
import torch

from rollcorr.simulation import make_pair, sample_rows
from rollcorr.simulation.markov_policies import MarkovPolicy, RewardRule, exact_gradient, expected_reward
from rollcorr.simulation.mismatches import KINDS, PolicyPair, pair_at_kl
from rollcorr.simulation.sequence_rows import every_count, every_sequence, exact_rows

SMALL = {"vocabulary": 3, "length": 5}
SHAPES = [
    {"states": 3},
    {"states": 1},
    {"states": 2},
    {"states": 3, "outcome": True},
    {"states": 2, "outcome": True},
]


def small_pair(kind="noise", severity=0.4, **options):
    return make_pair(kind, severity, **(SMALL | options))


def finite_difference(policy, rule, length, row, column):
    """Sixth order: the error is h⁶ times a seventh derivative."""
    step, total = 0.02, 0.0
    for places, factor in ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60)):
        for sign in (1, -1):
            logits = policy.logits.clone()
            logits[row, column] += sign * places * step
            total += sign * factor * float(expected_reward(policy.with_logits(logits), rule, length))
    return total / step


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_the_exact_gradient_agrees_with_finite_differences(options):
    pair = small_pair(**options)
    for row in range(pair.trainer.states):
        for column in range(3):
            expected = finite_difference(pair.trainer, pair.rule, pair.length, row, column)
            assert float(pair.gradient[row, column]) == pytest.approx(expected, abs=1e-9)
    assert pair.gradient.abs().max() > 1e-3


@pytest.mark.parametrize("length", [1, 40, 200])
def test_the_gradient_of_long_sequences_agrees_with_finite_differences(length):
    pair = make_pair("noise", 0.2, vocabulary=4, length=length)
    for row, column in ((0, 0), (1, 2), (3, 3)):
        expected = finite_difference(pair.trainer, pair.rule, length, row, column)
        assert float(pair.gradient[row, column]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_the_exact_gradient_is_the_sum_over_every_sequence(options):
    """Σ_y π(y) R(y) Σ_t ∇log π: on-policy, so the rows' probabilities are π's."""
    pair = small_pair("noise", 0.0, **options)
    rows = every_sequence(pair)
    total = (rows.probability * rows.rewards)[:, None, None] * rows.score_sums(torch.ones_like(rows.train_log_prob))
    torch.testing.assert_close(total.sum(0), pair.gradient, rtol=0, atol=1e-13)
    assert float(rows.probability @ rows.rewards) == pytest.approx(float(pair.baseline), abs=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_and_chi2_are_the_sums_over_every_sequence(kind):
    pair = small_pair(kind, 1.0 if kind == "top_k" else 0.3)
    rows = every_sequence(pair)
    log_weight = (rows.train_log_prob - rows.rollout_log_prob).sum(-1)
    assert float(rows.probability.sum()) == pytest.approx(1, abs=1e-12)
    assert pair.sequence_kl == pytest.approx(float(-rows.probability @ log_weight), abs=1e-12)
    assert pair.sequence_chi2 == pytest.approx(float(rows.probability @ (2 * log_weight).exp()) - 1, rel=1e-11)
    squares = (2 * (rows.train_log_prob - rows.rollout_log_prob)).exp().sum(-1)
    assert pair.chi2 == pytest.approx(float(rows.probability @ squares) / pair.length - 1, abs=1e-12)
    assert pair.kl > 0 or not pair.rollout.logits.isfinite().all()


def test_one_token_by_hand():
    """π = (1/2, 1/2), μ = (3/4, 1/4), reward 1 for the first: ∇J = π₁π₂ (1, −1); KL and χ² of two numbers."""
    trainer = MarkovPolicy(torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.int64))
    rollout = trainer.with_logits(torch.tensor([[3.0, 1.0]], dtype=torch.float64).log())
    pair = PolicyPair(trainer, rollout, RewardRule(torch.tensor([[1.0, 0.0]], dtype=torch.float64)), 1)
    torch.testing.assert_close(pair.gradient, torch.tensor([[0.25, -0.25]], dtype=torch.float64))
    assert pair.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert pair.chi2 == pytest.approx(0.25 / 0.75 + 0.25 / 0.25 - 1)
    assert float(pair.baseline) == pytest.approx(0.75)


def test_counts_and_sequences_describe_the_same_distribution():
    pair = small_pair(states=1, outcome=True)
    for rows in (every_count(pair), every_sequence(pair)):
        log_weight = (rows.train_log_prob - rows.rollout_log_prob).sum(-1)
        assert float(rows.probability.sum()) == pytest.approx(1)
        assert float(rows.probability @ (2 * log_weight).exp()) - 1 == pytest.approx(pair.sequence_chi2)
        assert float(rows.probability @ rows.rewards) == pytest.approx(float(pair.baseline))
    assert len(every_count(pair)) == 21


def test_truncation_loses_mass_that_no_weight_brings_back():
    pair = small_pair("truncated", 0.3)
    rows = every_sequence(pair)
    log_weight = (rows.train_log_prob - rows.rollout_log_prob).sum(-1)
    reachable = float(rows.probability @ log_weight.exp())
    lost = pair.trainer.log_probs.exp().masked_fill(pair.rollout.logits.isfinite(), 0.0).sum(-1)
    lost_mass = float((pair.visits * lost).sum() / pair.length)
    assert 0 < lost_mass < 0.3
    assert reachable < 1 - lost_mass / 2


def test_raw_reports_hide_the_mismatch_from_the_trainer():
    pair = small_pair("tempered", 0.3, reports="raw")
    rows = every_sequence(pair)
    assert torch.equal(rows.train_log_prob, rows.rollout_log_prob)
    assert pair.kl > 0.01


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"top_k", "truncated"}))
def test_a_pair_is_made_at_a_given_kl(kind):
    pair = pair_at_kl(kind, 0.05, vocabulary=8, length=20)
    assert pair.kl == pytest.approx(0.05, rel=0.2 if kind == "quantized" else 1e-6)


def test_sampled_rows_come_from_the_rollout_policy():
    """10⁵ draws, and the frequency of every sequence within 5 standard errors of μ(y)."""
    pair = make_pair("noise", 0.5, vocabulary=3, length=3, states=2)
    every = every_sequence(pair)
    code = torch.tensor([9, 3, 1])
    rows = sample_rows(pair, 100_000, torch.Generator().manual_seed(0))
    found = torch.bincount((rows.tokens * code).sum(-1), minlength=27)[(every.tokens * code).sum(-1)]
    error = (every.probability * (1 - every.probability) * 1e5).sqrt()
    assert ((found - every.probability * 1e5).abs() <= 5 * error).all()
    assert int(found.sum()) == 100_000


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'tempered'"):
        make_pair("temperd", 0.2)
    with pytest.raises(ValueError, match="vocabulary must be >= 2"):
        make_pair("noise", 0.2, vocabulary=1)
    with pytest.raises(ValueError, match="must be a whole number"):
        RewardRule(torch.tensor([[0.5]], dtype=torch.float64), goal=1)
    pair = small_pair("truncated", 0.5)
    with pytest.raises(ValueError, match="trainer's logits must be finite"):
        PolicyPair(pair.rollout, pair.trainer, pair.rule, 5)
    with pytest.raises(ValueError, match="severity of truncated must be in"):
        make_pair("truncated", 1.0)
    with pytest.raises(ValueError, match="nats at most here; got 50"):
        pair_at_kl("tempered", 50.0)
    assert exact_rows(make_pair("noise", 0.1, length=30)) is None
    assert exact_gradient(pair.trainer, pair.rule, 5).shape == (3, 3)
