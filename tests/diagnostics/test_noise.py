"""What pure noise would show: against sampled noise, and by hand."""

import math
import warnings

import pytest
import torch

from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.correction import correct
from rollcorr.diagnostics.health.noise import SIGNED, Noise, expected_from_noise, ranges_from_noise

CASES = [
    (0.05, 100, {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}),
    (0.3, 50, {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_rs": "token_k3",
               "rollout_rs_threshold": 0.1}),
    (0.1, 50, {"rollout_is": "geometric", "rollout_is_threshold": "0.99_1.01", "rollout_rs": "seq_mean_k1",
               "rollout_rs_threshold": "0.98_1.02"}),
    (0.1, 50, {"rollout_rs": "seq_max_k2,seq_mean_k2", "rollout_rs_threshold": "0.05,0.006"}),
    (0.1, 200, {"rollout_is": "sequence", "rollout_is_threshold": 5.0, "rollout_is_floor": 0.5,
                "rollout_token_veto_threshold": 0.7}),
]  # fmt: skip
FEW_DECIDE = {"chi2_seq"}
"""Metrics that a few sequences of thousands decide."""


@pytest.mark.parametrize(("sigma", "length", "options"), CASES)
def test_every_expectation_is_what_sampled_noise_shows(sigma, length, options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        config = RolloutCorrectionConfig(**options)
    generator = torch.Generator().manual_seed(0)
    d = sigma * torch.randn(4000, length, dtype=torch.float64, generator=generator) - sigma**2 / 2
    rollout = torch.full_like(d, -20.0)
    measured = correct(rollout + d, rollout, torch.ones(d.shape), config).metrics(prefix="")
    expected = expected_from_noise(Noise(sigma=sigma, source="a test"), measured, config)
    assert len(expected) >= 11
    for name, value in expected.items():
        if name not in FEW_DECIDE:
            assert measured[name] == pytest.approx(value, rel=0.1, abs=0.02), name


def test_expectations_by_hand():
    metrics = dict.fromkeys(("k3_kl", "t_times_kl", "rollout_is_eff_sample_size"), 0.0)
    metrics |= {"token_count": 1000.0, "sequence_count": 10.0}
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=None)
    expected = expected_from_noise(Noise(sigma=0.1, source="a test"), metrics, config)
    assert expected["k3_kl"] == pytest.approx(0.005)
    assert expected["t_times_kl"] == pytest.approx(0.5)
    assert expected["rollout_is_eff_sample_size"] == pytest.approx(math.exp(-1), rel=1e-3)
    token = expected_from_noise(Noise(sigma=0.1, source="a test"), metrics, RolloutCorrectionConfig(rollout_is="token"))
    assert token["rollout_is_eff_sample_size"] == pytest.approx(math.exp(-0.01), rel=1e-3)


@pytest.mark.parametrize("sigma", [0.0, math.nan, 50.0])
def test_a_noise_that_is_none_expects_nothing(sigma):
    assert expected_from_noise(Noise(sigma=sigma, source="a test"), {"k3_kl": 1.0}, None) == {}


@pytest.mark.parametrize(("sigma", "length"), [(0.02, 50), (0.2, 20)])
def test_a_range_holds_95_percent_of_batches(sigma, length):
    """400 batches of 60 sequences: 380 expected, and a binomial seldom leaves 380 ± 18 (four standard errors)."""
    batches, rows = 400, 60
    d = sigma * torch.randn(batches, rows, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    d -= sigma**2 / 2
    sums = d.sum(-1)
    measured = {
        "kl": -d.mean((1, 2)),
        "t_times_kl": -sums.mean(1),
        "chi2_token": torch.expm1(2 * d).mean((1, 2)),
        "chi2_seq": torch.expm1(2 * sums).mean(1),
        "ppl_ratio": torch.exp(-d.mean(-1)).mean(1),
    }
    counts = {"token_count": float(rows * length), "sequence_count": float(rows)}
    ranges = ranges_from_noise(Noise(sigma=sigma, source="a test"), counts | dict.fromkeys(measured, 0.0))

    # The mean of few sequences with a spread of 1.8 in the exponent is far from normal: no range is claimed.
    assert set(ranges) == SIGNED - {"kl_joint"} - ({"chi2_seq"} if sigma == 0.2 else set())
    for name, (low, high) in ranges.items():
        inside = int(((measured[name] >= low) & (measured[name] <= high)).sum())
        assert abs(inside - 380) <= 18, (name, inside)


def test_ranges_by_hand():
    counts = {"token_count": 400.0, "sequence_count": 4.0, "kl": 0.0, "t_times_kl": 0.0}
    ranges = ranges_from_noise(Noise(sigma=0.1, source="a test"), counts)
    assert ranges["kl"] == pytest.approx((0.005 - 1.96 * 0.005, 0.005 + 1.96 * 0.005))
    assert ranges["t_times_kl"] == pytest.approx((0.5 - 0.98, 0.5 + 0.98))
    assert ranges_from_noise(Noise(sigma=0.1, source="a test"), {"kl": 0.0}) == {}
    assert ranges_from_noise(Noise(sigma=50.0, source="a test"), counts) == {}
