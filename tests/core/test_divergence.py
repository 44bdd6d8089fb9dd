"""Divergence estimates: exact expectations, and accuracy where naive formulas fail."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core.divergence import chi_squared, k1, k2, k3, probability_difference

probabilities = st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4).map(
    lambda x: torch.tensor(x, dtype=torch.float64).div(sum(x))
)


@given(pi=probabilities, mu=probabilities)
def test_expectations_under_the_rollout_policy_are_exact(pi, mu):
    """E_μ[k1] = E_μ[k3] = KL(μ‖π) and E_μ[ρ² − 1] = χ²(π‖μ), summed over a small vocabulary."""
    d = pi.log() - mu.log()
    kl = (mu * (mu.log() - pi.log())).sum()
    torch.testing.assert_close((mu * k1(d)).sum(), kl, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close((mu * k3(d)).sum(), kl, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close((mu * chi_squared(d)).sum(), (pi.square() / mu).sum() - 1, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-9, 1e-7, 1e-5, 1e-3, 0.0299, 0.0301, 0.1, 1.0, 10.0])
def test_k3_is_positive_and_accurate_at_every_scale(size, dtype):
    """exp(d) − 1 − d in float32 is negative or 0 below |d| ≈ 3e-4."""
    d = torch.tensor([size, -size], dtype=dtype)
    exact = [sum(x**n / math.factorial(n) for n in range(2, 60)) for x in d.tolist()]
    assert (k3(d) > 0).all()
    assert k3(d).tolist() == pytest.approx(exact, rel=1e-5 if dtype == torch.float32 else 1e-12, abs=0)


def test_the_series_of_k3_rounds_like_one_operation():
    """The highest powers are about 1e-16 of the sum: an error of one power shows as 1e-15."""
    d = torch.linspace(0.025, 0.0299, 50, dtype=torch.float64)
    d = torch.cat([d, -d])
    exact = [float(sum(Fraction(x) ** n / math.factorial(n) for n in range(2, 14))) for x in d.tolist()]
    assert k3(d).tolist() == pytest.approx(exact, rel=2 * torch.finfo(torch.float64).eps, abs=0)


def test_estimates_by_hand():
    d = torch.tensor([math.log(2.0), -1.0, 50.0, -50.0], dtype=torch.float64)
    assert k1(d).tolist() == [-math.log(2.0), 1.0, -50.0, 50.0]
    assert k2(d).tolist() == pytest.approx([math.log(2.0) ** 2 / 2, 0.5, 1250.0, 1250.0])
    assert k3(d).tolist() == pytest.approx([1 - math.log(2.0), math.exp(-1), math.expm1(20) - 20, 49.0])
    assert chi_squared(d).tolist() == pytest.approx([3.0, math.expm1(-2), math.expm1(40), -1.0])


def test_probability_zero_is_infinite_divergence_and_finite_chi_squared():
    d = torch.tensor([-math.inf])
    assert k3(d).item() == math.inf
    assert k2(d).item() == math.inf
    assert chi_squared(d).item() == pytest.approx(-1.0)


def test_probability_difference_by_hand():
    logs = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    torch.testing.assert_close(probability_difference(*logs), torch.tensor([0.25, 0.25]))


def test_densities_beyond_the_dtype_count_as_equal_and_one_alone_as_infinitely_far():
    train, rollout = torch.tensor([[1000.0, 999.0, 1000.0, -1.0], [1000.0, 1000.0, 1.0, -1.0]], dtype=torch.float64)
    assert probability_difference(train, rollout).tolist() == [0.0, 0.0, float("inf"), 0.0]
