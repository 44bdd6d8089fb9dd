"""Ranges by hand: at the limit and beyond it; then series, empty batches and names."""

import math
from dataclasses import replace

import pytest

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.metric_registry import METRICS, PREFIX
from rollcorr.diagnostics.health.health_check import health, limit_in_words
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.log_check.check import DIAGNOSIS

HEALTHY = {
    "token_count": 4000.0,
    "sequence_count": 100.0,
    "kl": 2e-4,
    "k3_kl": 1e-4,
    "chi2_token": 2e-4,
    "log_ratio_abs_mean": 0.01,
    "log_ppl_abs_diff": 0.01,
    "ppl_ratio": 1.0002,
    "t_times_kl": 0.008,
    "max_viable_length": 100_000.0,
    "rollout_is_mean": 1.0,
    "rollout_is_std": 0.02,
    "rollout_is_max": 1.2,
    "rollout_is_eff_sample_size": 0.999,
    "saturated_low_fraction": 0.0,
    "saturated_high_fraction": 0.0,
    "rollout_rs_masked_fraction": 0.0,
    "rollout_rs_seq_masked_fraction": 0.0,
}
"""A small mismatch, as between bf16 and fp32."""


def series(steps, **changes):
    """Healthy steps 1 to `steps`; a change is a value, or a function of the step."""
    return [
        {"step": s, **{PREFIX + name: value for name, value in HEALTHY.items()}}
        | {PREFIX + name: value(s) if callable(value) else value for name, value in changes.items()}
        for s in range(1, steps + 1)
    ]


NULL = Noise(sigma=0.014, source="null.json", is_null=True)


def test_a_small_mismatch_is_healthy_with_no_finding_at_all_where_a_null_judges_the_weights():
    report = health(HEALTHY, null=NULL)
    assert report.findings == ()
    assert report.healthy
    assert (report.verdict, report.exit_code, report.judged_against) == ("healthy", 0, "null.json")


def test_one_batch_without_a_null_is_not_judged_whatever_its_ranges_say():
    report = health(HEALTHY)
    assert (report.findings, report.verdict, report.exit_code) == ((), "not judged", 3)
    (sentence,) = report.not_judged
    assert sentence.startswith("weights not judged: there is no null, and no series of steps")
    assert health(HEALTHY, judged_against="steps 1 to 5 of this log").verdict == "healthy", "the caller judged them"


def test_a_series_that_stays_as_it_began_says_that_its_start_was_not_judged():
    report = health(series(40))
    assert (report.verdict, report.judged_against) == ("not judged", "steps 1 to 5 of this run")
    assert report.not_judged[0].startswith("unchanged since steps 1 to 5; the start was not judged")
    assert health(series(40), null=NULL).verdict == "healthy"
    assert "9 steps with a token, and 10 are needed" in health(series(9)).not_judged[0]


@pytest.mark.parametrize("steps", [3, 40])
def test_a_null_that_is_too_small_is_named_with_what_it_lacks(steps):
    """A report of a long run said "measure a null" to somebody who had just put one there."""
    small = replace(
        NULL, is_null=False, unusable="has too few tokens (437 in 40 sequences; at least 1,000 in 8 are needed)"
    )
    (sentence,) = health(series(steps), null=small).not_judged
    assert "null.json has too few tokens (437 in 40 sequences; at least 1,000 in 8 are needed)" in sentence


def test_a_mismatch_of_three_times_the_null_is_never_healthy():
    assert health(HEALTHY | {"k3_kl": 3.01 * NULL.sigma**2 / 2}, null=NULL).warnings[0].code == "above_null"
    assert health(HEALTHY | {"k3_kl": 2.99 * NULL.sigma**2 / 2}, null=NULL).verdict == "healthy"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sequence_count": 15.0}, "too little data: 15 sequences, and 16 are needed"),
        ({"token_count": 99.0}, "too little data: 99 tokens, and 100 are needed"),
    ],
)
def test_too_little_data_is_not_judged(change, sentence):
    report = health(HEALTHY | change, null=NULL)
    assert (report.verdict, report.not_judged) == ("not judged", (sentence,))
    assert health([HEALTHY | change | {"step": step} for step in (1, 2)], null=NULL).verdict == "healthy"


def test_limits_on_weights_and_rejection_warn_only_where_they_act():
    sick = HEALTHY | {"rollout_is_eff_sample_size": 0.1, "rollout_rs_masked_fraction": 0.9, "t_times_kl": 50.0}
    sick |= {"rollout_is_seq_max_deviation": 5.0}
    token = RolloutCorrectionConfig(rollout_is="token")
    sequence = RolloutCorrectionConfig(rollout_is="sequence")
    rejecting = RolloutCorrectionConfig(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)

    def warned(config):
        report = health(sick, config)
        assert len(report.findings) == 4, "what does not act is a note"
        return {finding.metric for finding in report.warnings}

    assert warned(DIAGNOSIS) == set()
    assert warned(token) == {"rollout_is_eff_sample_size"}
    assert warned(sequence) == {"rollout_is_eff_sample_size", "rollout_is_seq_max_deviation", "t_times_kl"}
    assert warned(rejecting) == {"rollout_rs_masked_fraction"}


@pytest.mark.parametrize(
    ("name", "at_the_limit", "beyond"),
    [
        ("rollout_is_mean", 0.5, 0.499),
        ("rollout_is_mean", 2.0, 2.001),
        ("rollout_is_std", 1.0, 1.001),
        ("rollout_is_eff_sample_size", 0.3, 0.299),
        ("rollout_is_veto_fraction", 0.1, 0.101),
        ("rollout_is_catastrophic_token_fraction", 0.01, 0.0101),
        ("rollout_is_ratio_fraction_high", 0.1, 0.101),
        ("rollout_is_ratio_fraction_low", 0.1, 0.101),
        ("rollout_is_seq_max_deviation", 1.0, 1.01),
        ("rollout_rs_masked_fraction", 0.3, 0.301),
        ("rollout_rs_token_k1_masked_fraction", 0.3, 0.301),
        ("kl", 0.1, 0.1001),
        ("kl", -0.1, -0.1001),
        ("chi2_token", 1.0, 1.001),
        ("nonfinite_count", 0.0, 1.0),
        ("zero_probability_count", 0.0, 1.0),
        ("capped_fraction", 0.0, 1e-6),
    ],
)
def test_a_range_warns_beyond_its_limit_and_not_at_it(name, at_the_limit, beyond):
    assert health(HEALTHY | {name: at_the_limit}).findings == ()
    (finding,) = health(HEALTHY | {name: beyond}).warnings
    assert (finding.metric, finding.value) == (name, beyond)
    assert finding.reason
    assert finding.fix
    assert any(character.isdigit() for character in finding.limit)


def test_every_range_of_the_registry_that_warns_makes_a_finding():
    for name, metric in METRICS.items():
        limits = metric.healthy
        if limits is None or (limits.warn_below is None and limits.warn_above is None):
            continue
        beyond = limits.warn_above + 1 if limits.warn_above is not None else limits.warn_below - 1
        config = RolloutCorrectionConfig(rollout_is="sequence") if name == "t_times_kl" else None
        assert name in {finding.metric for finding in health(HEALTHY | {name: beyond}, config).warnings}


def test_a_float32_weight_truncated_at_two_does_not_breach_a_limit_of_one_by_rounding():
    assert health(HEALTHY | {"rollout_is_seq_max_deviation": 1.0000001192092896}).findings == ()


def test_titles_say_which_side_was_breached():
    def title(**change):
        return health(HEALTHY | change).warnings[0].title

    assert title(rollout_is_mean=0.1) == "mean weight is too low"
    assert title(rollout_is_mean=9.0) == "mean weight is too high"
    assert title(kl=-0.5) == "KL is too far from 0"


def test_an_empty_batch_fires_no_range_but_is_not_called_healthy():
    report = health(dict.fromkeys(HEALTHY, 0.0), null=NULL)
    assert (report.findings, report.verdict) == ((), "not judged")
    assert report.not_judged[0].startswith("nothing was measured: ")


def test_metrics_without_any_mismatch_are_not_called_healthy():
    for metrics in ({"reward/mean": 1.0, "step": 3}, []):
        (sentence,) = health(metrics).not_judged
        assert sentence.startswith("nothing was measured: ")
        assert health(metrics).verdict == "not judged"


@pytest.mark.parametrize("prefix", ["", "rollout_corr/", "actor/rollout_corr/"])
def test_names_may_carry_a_prefix(prefix):
    (finding,) = health({prefix + name: value for name, value in (HEALTHY | {"kl": 0.5}).items()}).warnings
    assert finding.metric == "kl"


def test_the_older_prefix_is_read_too():
    metrics = {"mismatch/mismatch_kl": 0.5, "mismatch/mismatch_k3_kl": 0.2, "mismatch/rollout_is_mean": 0.1}
    assert {finding.metric for finding in health(metrics).warnings} == {"kl", "rollout_is_mean"}


def test_nan_null_and_text_are_not_measured_and_never_fire():
    assert (
        health(HEALTHY | {"kl": math.nan, "chi2_token": None, "note": "x", "rollout_is_std": math.nan}).findings == ()
    )


def test_infinity_breaks_a_limit():
    (finding,) = health(HEALTHY | {"chi2_token": math.inf}).warnings
    assert finding.value == math.inf


def test_a_series_is_judged_by_the_median_of_its_last_ten_steps():
    six_bad = series(40, rollout_is_std=lambda step: 3.0 if step > 34 else 0.02)
    four_bad = series(40, rollout_is_std=lambda step: 3.0 if step > 36 else 0.02)
    (finding,) = health(six_bad).warnings
    assert (finding.value, finding.first_step, finding.steps) == (3.0, 35, 6)
    report = health(four_bad)
    assert report.warnings == ()
    assert report.steps == 40


def test_trouble_that_has_passed_is_a_note_with_its_worst_value_and_first_step():
    report = health(series(40, kl=lambda step: {7: 0.4, 9: -0.9}.get(step, 2e-4)))
    assert report.warnings == ()
    (note,) = report.notes
    assert (note.metric, note.value, note.first_step, note.steps) == ("kl", -0.9, 7, 2)
    assert note.title == "KL was too far from 0 in 2 of 40 steps"


def test_one_missing_log_prob_in_a_recent_step_is_a_finding():
    (finding,) = health(series(40, nonfinite_count=lambda step: float(step == 35))).warnings
    assert (finding.metric, finding.value, finding.first_step) == ("nonfinite_count", 1.0, 35)


def test_steps_without_a_token_are_left_out_of_a_series():
    steps = series(20)
    steps[-1] |= dict.fromkeys((PREFIX + name for name in HEALTHY), 0.0)
    assert health(steps).findings == ()
    assert health(steps).steps == 19


def test_warnings_come_before_notes():
    report = health(series(40, kl=lambda step: 0.4 if step == 7 else 2e-4, chi2_token=5.0))
    assert [finding.severity for finding in report.findings] == ["warning", "note"]


def test_one_criterion_is_not_reported_twice():
    rejected = {"rollout_rs_masked_fraction": 0.8, "rollout_rs_seq_mean_k1_masked_fraction": 0.8}
    (finding,) = health(HEALTHY | rejected).warnings
    assert finding.metric == "rollout_rs_masked_fraction"


def test_limits_are_put_in_words():
    words = {name: limit_in_words(METRICS[name].healthy) for name in ("rollout_is_mean", "kl", "rollout_is_std")}
    assert words == {"rollout_is_mean": "0.5 to 2", "kl": "−0.1 to 0.1", "rollout_is_std": "at most 1"}
    assert limit_in_words(METRICS["rollout_is_eff_sample_size"].healthy) == "at least 0.3"
    assert limit_in_words(METRICS["ppl_ratio"].healthy) == "ideally 1"
