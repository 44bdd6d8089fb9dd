"""The rules that need more than one number, each at its limit and beyond it."""

import math
from dataclasses import replace

import pytest

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.health_check import health
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.rules import (
    RULES,
    band_narrower_than_mismatch,
    contradicted_zeros,
    deceptive_effective_sample_size,
    gap_at_start,
    horizon,
    identical_policies,
    length_dependence,
    low_weights,
    pinned_at_threshold,
    saturation,
    skipped_updates,
    sustained_rejection,
)

TOKEN = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
SEQUENCE = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=2.0)


def now(config=None, *, diffusion=False, **values):
    return Evidence(current={"token_count": 100.0, **values}, config=config, diffusion=diffusion)


def over(name, values, config=None, *, diffusion=False, first_step=1):
    history = [(first_step + i, {"token_count": 100.0, name: value}) for i, value in enumerate(values)]
    return Evidence(current=history[-1][1], history=history, config=config, diffusion=diffusion)


def test_every_rule_is_silent_without_numbers():
    assert [rule for rule in RULES if rule(now()) is not None] == []


def test_identical_policies_are_degenerate_and_bypass_is_named_as_the_cause():
    zeros = {"kl": 0.0, "k3_kl": -0.0, "log_ratio_abs_mean": 0.0, "chi2_token": 0.0}
    assert "logged as the other's too" in identical_policies(now(**zeros)).reason
    bypass = RolloutCorrectionConfig(bypass_mode=True)
    assert "bypass mode sets old_log_prob" in identical_policies(now(bypass, **zeros)).reason
    assert identical_policies(now(bypass, **zeros)).severity == "warning"
    assert identical_policies(now(**{**zeros, "log_ratio_abs_mean": 1e-9})) is None
    assert identical_policies(Evidence(current={"token_count": 0.0, **zeros})) is None


def test_identical_policies_are_a_note_unless_something_shows_two_programs():
    """One float32 program that samples and trains agrees exactly, and is right."""
    alike = {"kl": 0.0, "k3_kl": 0.0}
    assert identical_policies(now(**alike)).severity == "note"
    assert identical_policies(over("kl", [0.0] * 20)).severity == "note"

    # A null of the same two sides: exact zeros there are one program, noise there is two.
    evidence = now(**alike)
    of_one_program, of_two = (Noise(sigma=sigma, source="null.json", is_null=True) for sigma in (0.0, 1e-7))
    assert identical_policies(replace(evidence, noise=of_one_program)).severity == "note"
    assert identical_policies(replace(evidence, noise=of_two)).severity == "warning"
    assert "null.json shows two computations" in identical_policies(replace(evidence, noise=of_two)).reason

    # So are earlier steps, also those that a window has let go.
    assert identical_policies(over("kl", [1e-6] * 5 + [0.0] * 10)).severity == "warning"
    assert identical_policies(replace(over("kl", [0.0] * 10), differed=True)).severity == "warning"


def test_one_different_step_among_the_recent_ones_is_not_degenerate():
    assert identical_policies(over("kl", [0.0] * 20)).steps == 20
    assert identical_policies(over("kl", [0.0] * 15 + [1e-9] + [0.0] * 4)) is None


@pytest.mark.parametrize(("value", "fires"), [(19.999, False), (20.0, True), (25.0, True), (-25.0, False)])
def test_length_times_kl_warns_at_the_safety_bound_itself(value, fires):
    assert (horizon(now(t_times_kl=value)) is not None) == fires


@pytest.mark.parametrize(
    ("config", "severity"),
    [
        (SEQUENCE, "warning"),
        (TOKEN, "note"),
        (SEQUENCE.with_options(apply_is=False), "note"),
        (RolloutCorrectionConfig(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1), "note"),
        (None, "note"),
    ],
)
def test_length_times_kl_warns_only_where_sequence_weights_reach_the_loss(config, severity):
    finding = horizon(now(config, t_times_kl=30.0))
    assert finding.severity == severity
    assert ("sequence weights are not in use" in finding.reason) == (severity == "note")


def test_saturated_weights_that_are_only_measured_are_a_note():
    measured = SEQUENCE.with_options(apply_is=False)
    values = {"saturated_low_fraction": 0.9, "saturated_high_fraction": 0.0, "rollout_is_eff_sample_size": 0.99}
    for rule in (saturation, deceptive_effective_sample_size):
        assert rule(now(SEQUENCE, **values)).severity == "warning"
        assert rule(now(measured, **values)).severity == "note"


def test_length_times_kl_follows_the_configured_bound_and_names_the_viable_length():
    config = RolloutCorrectionConfig(safety_bound=10.0)
    finding = horizon(now(config, t_times_kl=10.0, max_viable_length=606.06))
    assert finding.limit == "below 10, the safety bound"
    assert "606 tokens" in finding.reason


@pytest.mark.parametrize(
    ("ess", "low", "high", "fires"),
    [
        (0.99, 0.9, 0.0, True),
        (0.99, 0.3, 0.3, True),
        (0.99, 0.5, 0.0, False),
        (0.9, 0.9, 0.0, False),
        (0.99, 0.0, 0.0, False),
    ],
)
def test_an_effective_sample_size_near_one_is_false_when_most_weights_are_clamped(ess, low, high, fires):
    evidence = now(rollout_is_eff_sample_size=ess, saturated_low_fraction=low, saturated_high_fraction=high)
    assert (deceptive_effective_sample_size(evidence) is not None) == fires


def test_saturation_names_the_side_that_saturates():
    assert saturation(now(saturated_low_fraction=0.01, saturated_high_fraction=0.0)) is None
    low = saturation(now(saturated_low_fraction=0.4, saturated_high_fraction=0.1))
    assert (low.metric, low.value) == ("saturated_low_fraction", 0.5)
    assert saturation(now(saturated_low_fraction=0.0, saturated_high_fraction=0.02)).metric == "saturated_high_fraction"


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ([0.06] * 5, "bypass"),
        ([0.06, 0.2, 0.2, 0.2, 0.2], "bypass"),
        ([0.11] * 5, "widen"),
        ([0.05] * 5, None),
        ([0.06] * 4, None),
        ([0.06] * 4 + [0.01], None),
        ([0.01, 0.06, 0.06, 0.06, 0.06], None),
    ],
)
def test_rejection_is_sustained_after_five_consecutive_steps(values, fix):
    finding = sustained_rejection(over("rollout_rs_seq_masked_fraction", values))
    assert (finding is None) if fix is None else (fix in finding.fix)


def test_the_diffusion_rules_warn_for_diffusion_and_note_for_language():
    rejected = [0.2] * 5
    name = "rollout_rs_seq_masked_fraction"
    assert sustained_rejection(over(name, rejected)).severity == "note"
    assert sustained_rejection(over(name, rejected, diffusion=True)).severity == "warning"
    assert pinned_at_threshold(now(SEQUENCE, rollout_is_max=2.0)).severity == "note"
    assert pinned_at_threshold(now(SEQUENCE, rollout_is_max=2.0, diffusion=True)).severity == "warning"


def test_a_gap_of_more_than_a_nat_in_the_first_fifty_steps_is_a_finding():
    name = "log_ppl_abs_diff"
    assert gap_at_start(now(log_ppl_abs_diff=1.0)) is None
    assert gap_at_start(now(log_ppl_abs_diff=1.1)).severity == "warning"
    closed = gap_at_start(over(name, [1.5] + [0.1] * 60))
    assert (closed.value, closed.first_step, closed.steps, closed.severity) == (1.5, 1, 1, "note")
    assert gap_at_start(over(name, [1.5, 0.1])).severity == "warning"


def test_a_right_start_has_no_gap_at_start():
    name = "log_ppl_abs_diff"
    assert gap_at_start(over(name, [0.1, 1.5, 0.1])) is None
    window = over(name, [1.5] * 5, first_step=16)
    assert gap_at_start(window).severity == "warning"
    assert gap_at_start(replace(window, first=(1, {name: 0.1}))) is None
    name = "log_ppl_abs_diff"
    assert gap_at_start(over(name, [0.1] * 50 + [1.5])) is None


def test_the_largest_weight_is_pinned_when_it_equals_the_threshold_in_half_of_the_first_steps():
    name = "rollout_is_max"
    assert pinned_at_threshold(over(name, [2.0, 1.9999998, 1.3, 1.3], SEQUENCE)) is not None
    assert pinned_at_threshold(over(name, [2.0, 1.3, 1.3], SEQUENCE)) is None
    assert pinned_at_threshold(over(name, [1.3] * 50 + [2.0] * 500, SEQUENCE)) is None
    assert pinned_at_threshold(now(rollout_is_max=2.0)) is None, "without a configuration there is no threshold"


def test_one_truncated_token_weight_of_a_language_model_is_ordinary():
    assert pinned_at_threshold(now(TOKEN, rollout_is_max=2.0)) is None
    assert pinned_at_threshold(now(TOKEN, rollout_is_max=2.0, diffusion=True)) is not None
    icepop = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold="0.5_2.0")
    assert pinned_at_threshold(now(icepop, rollout_is_max=2.0, diffusion=True)) is None, "IcePop cuts, it does not pin"


def test_a_geometric_band_narrower_than_the_mismatch_is_found():
    band = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001")
    assert band_narrower_than_mismatch(now(band, log_ppl_abs_diff=0.0009)) is None
    finding = band_narrower_than_mismatch(now(band, log_ppl_abs_diff=0.02))
    assert finding.limit.startswith("at most 0.0009995 nats")
    open_below = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0_1.01")
    assert band_narrower_than_mismatch(now(open_below, log_ppl_abs_diff=0.009)) is None
    assert band_narrower_than_mismatch(now(TOKEN, log_ppl_abs_diff=0.5)) is None


def test_bounds_on_products_depend_on_length_once_the_drift_passes_their_log():
    assert length_dependence(now(SEQUENCE, t_times_kl=math.log(2) - 0.01)) is None
    assert length_dependence(now(SEQUENCE, t_times_kl=math.log(2) + 0.01)).severity == "note"
    assert length_dependence(now(TOKEN, t_times_kl=5.0)) is None
    band = RolloutCorrectionConfig(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_4.0")
    assert length_dependence(now(band, t_times_kl=0.8)) is not None
    assert length_dependence(now(SEQUENCE, t_times_kl=30.0)) is None, "the safety bound says it louder"


def test_low_weights_warn_only_where_sequence_weights_are_applied():
    assert low_weights(now(SEQUENCE, rollout_is_low_weight_fraction=0.5)) is None
    assert low_weights(now(SEQUENCE, rollout_is_low_weight_fraction=0.85)).severity == "warning"
    assert low_weights(now(TOKEN, rollout_is_low_weight_fraction=0.85)).severity == "note"


def test_skipped_updates_are_counted_over_the_run():
    assert skipped_updates(over("actor/skipped_steps", [0.0, 0.0])) is None
    finding = skipped_updates(over("actor/skipped_steps", [0.0, 1.0, 1.0, 3.0]))
    assert (finding.value, finding.first_step, finding.steps) == (3.0, 2, 3)


def test_a_zero_that_the_other_side_contradicts_is_a_placeholder():
    name = "log/contradicted_zero_count"
    assert contradicted_zeros(now(**{name: 0.0})) is None
    assert contradicted_zeros(now(**{name: 1.0})).severity == "warning"


OWN = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=2.0)


@pytest.mark.parametrize(
    ("config", "advised"),
    [
        (OWN, ""),
        (replace(OWN, bypass_mode=True, loss_type="reinforce"), "or leave bypass mode"),
        (None, "or leave bypass mode if it is on"),
    ],
)
def test_only_a_run_in_bypass_mode_is_told_to_leave_it(config, advised):
    step = {"rollout_rs_seq_masked_fraction": 0.08, "log_ppl_abs_diff": 1.5, "rollout_is_max": 2.0}
    step |= {"actor/zeroed_fraction_negative": 0.6, "actor/zeroed_fraction_positive": 0.1}
    steps = [{"step": number, "token_count": 4000.0, "kl": 0.01, **step} for number in range(1, 11)]
    found = [*health(steps, config).findings, *health(steps, config, diffusion=True).findings]
    fixes = {finding.code: finding.fix for finding in found}
    rules = {"gap_at_start", "sustained_rejection", "one_sided_gradients"} | (
        {"pinned_at_threshold"} if config else set()
    )
    assert rules <= set(fixes)
    for rule in rules:
        assert ("bypass" in fixes[rule]) == bool(advised), fixes[rule]
        assert advised in fixes[rule]
