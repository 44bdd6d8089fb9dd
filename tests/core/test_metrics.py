"""The registry is complete and consistent, and describes its computations."""

from __future__ import annotations

import re

import pytest
import torch
from implementations import per_implementation

from rollcorr import RolloutCorrectionConfig, correct
from rollcorr.core.health_ranges import CRITERION_RANGES, RANGES
from rollcorr.core.metric_registry import CRITERIA, METRICS, criterion_metrics, metric

SPECIFIED = [
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "kl", "k3_kl", "log_ppl_diff",
    "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio", "ppl_ratio_geo", "chi2_token",
    "chi2_seq", "log_ratio_mean", "log_ratio_std", "log_ratio_abs_mean", "log_ratio_min", "log_ratio_max",
    "prob_diff_abs_mean", "prob_diff_abs_max", "ratio_outside_10pct", "nonfinite_count", "zero_probability_count",
    "saturated_low_fraction", "saturated_high_fraction", "rollout_is_mean", "rollout_is_std", "rollout_is_min",
    "rollout_is_max", "rollout_is_raw_mean", "rollout_is_raw_std", "rollout_is_raw_min", "rollout_is_raw_max",
    "rollout_is_log_min", "rollout_is_log_max", "rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low",
    "rollout_is_eff_sample_size", "rollout_is_seq_mean", "rollout_is_seq_std", "rollout_is_seq_min",
    "rollout_is_seq_max", "rollout_is_seq_max_deviation", "rollout_is_seq_fraction_high",
    "rollout_is_seq_fraction_low", "rollout_is_low_weight_fraction", "rollout_is_batch_norm_factor",
    "rollout_is_oob_ratio", "rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction",
    "rollout_is_veto_fraction", "rollout_is_catastrophic_token_fraction", "t_times_kl", "max_viable_length",
]  # fmt: skip

CRITERION_SUFFIXES = [
    "mean", "std", "min", "max", "fraction_high", "fraction_low", "masked_fraction", "seq_masked_fraction",
    "seq_mean", "seq_std", "seq_min", "seq_max", "seq_max_deviation", "seq_fraction_high", "seq_fraction_low",
]  # fmt: skip


def test_every_specified_metric_is_in_the_registry():
    assert set(SPECIFIED) <= METRICS.keys()
    for criterion in CRITERIA:
        names = {f"rollout_rs_{criterion}_{suffix}" for suffix in CRITERION_SUFFIXES}
        assert names <= criterion_metrics(criterion).keys()
    assert len(CRITERIA) == 11


@per_implementation
def test_every_specified_metric_is_produced_by_some_configuration():
    train, rollout, mask = torch.randn(3, 4), torch.randn(3, 4), torch.ones(3, 4)
    produced: set[str] = set()
    for fields in (
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True, "rollout_token_veto_threshold": 1e-4},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        {"rollout_rs": ",".join(CRITERIA), "rollout_rs_threshold": 2.0},
    ):
        produced |= correct(train, rollout, mask, RolloutCorrectionConfig(**fields)).metrics(prefix="").keys()
    assert produced >= set(SPECIFIED)
    assert produced >= {f"rollout_rs_{name}_{suffix}" for name in CRITERIA for suffix in CRITERION_SUFFIXES}
    assert all(metric(name) for name in produced)


def test_every_metric_says_what_it_is():
    for found in [*METRICS.values(), *criterion_metrics("token_k3").values()]:
        assert found.formula
        assert all(re.fullmatch("(sums|moments|extremes|histograms|tops):.+", row) for row in found.finalizer.rows)
        assert found.source
        assert found.unit in {"1", "nats", "probability", "ratio", "sequences", "share", "tokens"}
        assert found.sample in {"batch", "sequences", "tokens", "unit"}


def test_every_healthy_range_belongs_to_a_metric_and_says_what_to_do():
    assert RANGES.keys() <= METRICS.keys()
    for healthy in [*RANGES.values(), *CRITERION_RANGES.values()]:
        guide_lines = {healthy.ideal_low, healthy.ideal_high} - {None}
        assert guide_lines <= {float(healthy.ideal.rpartition(" ")[-1])}
        assert healthy.reason
        assert healthy.fix


@pytest.mark.parametrize(("value", "limit"), [(0.49, 0.5), (0.5, None), (1.0, None), (2.0, None), (2.01, 2.0)])
def test_a_range_is_breached_strictly_beyond_its_limit(value, limit):
    assert RANGES["rollout_is_mean"].breached(value) == limit


def test_an_absolute_range_ignores_the_sign():
    assert RANGES["kl"].breached(-0.2) == 0.1
    assert RANGES["kl"].breached(-0.05) is None


def test_look_up_takes_bare_and_prefixed_names():
    assert metric("kl") is metric("rollout_corr/kl")
    assert metric("rollout_rs_seq_mean_k3_mean").sample == "sequences"
    with pytest.raises(KeyError, match="no metric is called 'nonsense'"):
        metric("nonsense")


def test_the_ideals_in_words_are_the_guide_lines():
    """A plot draws the numbers, and a page prints the words."""
    for name, healthy in RANGES.items():
        words = healthy.ideal.split()
        if words[0] in "<>" and len(words) == 2:
            line = healthy.ideal_high if words[0] == "<" else healthy.ideal_low
            assert line == float(words[1]), name
