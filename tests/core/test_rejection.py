"""Bands act on the ratio itself, bounds are inclusive, the veto is strict."""

import math

import pytest
import torch

from rollcorr.core.weights import exceeds, ratio_below, within_ratio_band


@pytest.mark.parametrize(
    ("ratio", "kept"), [(0.59, False), (0.61, True), (1.39, True), (1.41, False), (1.5, False), (1 / 1.4, True)]
)
def test_a_band_is_on_the_ratio_not_on_its_inverse(ratio, kept):
    """−log ρ against [log 0.6, log 1.4] would keep ρ = 1.5 and reject ρ = 0.61."""
    log_ratio = torch.tensor([math.log(ratio)])
    assert within_ratio_band(log_ratio, lower=0.6, upper=1.4).item() is kept


@pytest.mark.parametrize("bound", [0.3, 0.5, 0.999, 1.001, 1.5, 2.0, 7.3])
def test_bounds_are_inclusive_for_float32_logs(bound):
    log_ratio = torch.tensor([bound]).log()
    assert within_ratio_band(log_ratio, lower=bound, upper=bound).all()
    assert not within_ratio_band(log_ratio + 1e-5, lower=None, upper=bound).any()
    assert not within_ratio_band(log_ratio - 1e-5, lower=bound, upper=None).any()
    assert not exceeds(torch.tensor([bound]), bound).any()
    assert exceeds(torch.tensor([bound * 1.00001]), bound).all()
    assert not ratio_below(log_ratio, bound).any()
    assert ratio_below(log_ratio - 1e-5, bound).all()


def test_an_open_side_never_rejects():
    extreme = torch.tensor([-math.inf, -1000.0, 1000.0])
    assert within_ratio_band(extreme, lower=None, upper=2.0).tolist() == [True, True, False]
    assert within_ratio_band(extreme, lower=0.5, upper=None).tolist() == [False, False, True]
    assert within_ratio_band(extreme, lower=None, upper=None).all()
    assert not exceeds(torch.tensor([math.inf]), None).any()


def test_probability_zero_is_rejected_by_every_bound_it_violates():
    zero = torch.tensor([-math.inf])
    assert not within_ratio_band(zero, lower=1e-9, upper=None).any()
    assert within_ratio_band(zero, lower=None, upper=2.0).all()
    assert exceeds(torch.tensor([math.inf]), 1e9).all()
    assert ratio_below(zero, 1e-30).all()
