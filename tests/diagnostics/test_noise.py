"""What pure noise would show: against sampled noise, and by hand."""

import math
import warnings

import pytest
import torch

from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.correction import correct
from rollcorr.diagnostics.health.noise import Noise, expected_from_noise

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
