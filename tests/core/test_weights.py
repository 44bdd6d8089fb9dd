"""Importance weights by hand, then properties of any input, then errors."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.core import weights as module
from rollcorr.core.weights import between, normalization_factor

NAN, INF = math.nan, math.inf
bounded_weights = partial(module.bounded_weights, safety_bound=SAFETY_BOUND)
masked_weights = partial(module.masked_weights, safety_bound=SAFETY_BOUND)
log_weights = st.lists(st.floats(-1000.0, 1000.0), min_size=1, max_size=8).map(torch.tensor)
probabilities = st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4).map(
    lambda x: torch.tensor(x, dtype=torch.float64).div(sum(x))
)


def truncated_weights(log_weight, upper):
    """Truncated importance sampling, as the correction computes it."""
    return between(bounded_weights(log_weight), None, upper)


def test_weights_by_hand():
    logs = torch.log(torch.tensor([0.25, 1.0, 1.9, 2.1]))
    torch.testing.assert_close(truncated_weights(logs, upper=2.0), torch.tensor([0.25, 1.0, 1.9, 2.0]))
    torch.testing.assert_close(masked_weights(logs, lower=0.5, upper=2.0), torch.tensor([0.0, 1.0, 1.9, 0.0]))
    torch.testing.assert_close(bounded_weights(torch.tensor([-50.0, 50.0])), torch.tensor([-20.0, 20.0]).exp())


def test_probability_zero_is_weight_zero_and_not_the_safety_floor():
    zero = torch.tensor([-INF])
    assert bounded_weights(zero).item() == 0.0
    assert truncated_weights(zero, upper=2.0).item() == 0.0
    assert masked_weights(zero, lower=1e-9, upper=2.0).item() == 0.0


def test_nan_stays_visible():
    assert bounded_weights(torch.tensor([NAN])).isnan().all()
    assert truncated_weights(torch.tensor([NAN]), upper=2.0).isnan().all()
    assert masked_weights(torch.tensor([NAN]), lower=0.5, upper=2.0).isnan().all()


@given(log_weight=log_weights)
def test_truncated_weight_is_monotone_all_the_way(log_weight):
    ordered = truncated_weights(log_weight.sort().values, upper=1e9)
    assert (ordered.diff() >= 0).all()


@given(log_weight=log_weights, upper=st.floats(1e-3, 1e6))
def test_weights_stay_finite_and_bounded(log_weight, upper):
    for weights in (truncated_weights(log_weight, upper=upper), masked_weights(log_weight, lower=1e-3, upper=upper)):
        assert weights.isfinite().all()
        assert ((weights >= 0) & (weights <= upper * (1 + 1e-5))).all()


@given(pi=probabilities, mu=probabilities, upper=st.floats(0.1, 50.0))
def test_truncation_only_loses_mass(pi, mu, upper):
    """Exact sum over μ: E_μ[π/μ] = 1, so E_μ[min(π/μ, C)] ≤ 1, with equality when C is never hit."""
    expected = (mu * truncated_weights((pi / mu).log(), upper=upper)).sum().item()
    assert expected <= 1 + 1e-9
    if upper > (pi / mu).max():
        assert expected == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_carry_no_gradient_and_widen_half_precision(dtype):
    weights = truncated_weights(torch.zeros(3, dtype=dtype, requires_grad=True), upper=2.0)
    assert not weights.requires_grad
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_normalization_factor_by_hand():
    assert normalization_factor(torch.tensor(6.0), torch.tensor(4.0)).item() == 1.5
    assert normalization_factor(torch.tensor(0.0), torch.tensor(0.0)).item() == 1.0
