"""Lasting rises of a series: found in time, at the right step, and not in healthy runs."""

import math

import numpy as np
import pytest
from series_of_runs import broken, healthy, metrics_of

from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.health_check import health
from rollcorr.diagnostics.health.trend import REMEMBERED, ChangeDetector, onset_of, without_spikes
from rollcorr.monitor.running_judge import RunningJudge

KINDS = ("never synced", "break", "jump", "slow growth", "resume")
CODES = {
    "never synced": "frozen_sampler",
    "resume": "frozen_sampler",
    "break": "changed_at_step",
    "jump": "changed_at_step",
    "slow growth": "growing_mismatch",
}


def detected(values):
    detector = ChangeDetector()
    for step, value in enumerate(values, start=1):
        detector.add(step, value)
    return detector


def test_a_hundred_healthy_runs_of_a_hundred_steps_give_at_most_two_alarms():
    alarms = [seed for seed in range(100) if detected(healthy(seed).k3).changes]
    assert len(alarms) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_found_within_ten_steps_of_five_times_its_start_and_its_onset_to_three(kind):
    for seed in range(6):
        series = broken(kind, seed)
        found = detected(series.k3).changes[0]
        assert found.found <= series.fivefold + 10, seed
        assert abs(found.onset - series.onset) <= 3, seed


@pytest.mark.parametrize("kind", KINDS)
def test_the_health_check_and_the_running_judge_name_the_same_cause(kind):
    series = broken(kind, 3)
    steps = [{"step": step, **metrics_of(k3)} for step, k3 in enumerate(series.k3, start=1)]
    end = series.fivefold + 25
    report = health(steps[:end])
    judge = RunningJudge()
    for metrics in steps[:end]:
        judge.judge(metrics["step"], bare_metrics(metrics), None)
    assert report.findings[0].code == CODES[kind]
    assert (report.verdict, judge.verdict, judge.exit_code) == ("unhealthy", "unhealthy", 1)
    (alarm,) = [finding for finding in judge.alarms if finding.metric == "k3_kl"]
    ours = report.findings[0]
    assert (alarm.code, alarm.first_step, alarm.evidence) == (ours.code, ours.first_step, ours.evidence)
    assert ours.confirm
    assert ours.fix


@pytest.mark.parametrize("kind", KINDS)
def test_the_baseline_of_an_alarm_is_that_of_the_report(kind):
    """The onset may move when more steps show it. The baseline moved with it."""
    series = broken(kind, 0)
    judge, began = RunningJudge(), []
    steps = [{"step": step, **metrics_of(k3)} for step, k3 in enumerate(series.k3, start=1)]
    for metrics in steps:
        changes = judge.judge(metrics["step"], bare_metrics(metrics), None)
        began += [finding for finding in changes.began if finding.metric == "k3_kl"]
    (lasting,) = [finding for finding in health(steps).findings if finding.metric == "k3_kl"]
    assert {alarm.evidence["baseline"] for alarm in began} == {lasting.evidence["baseline"]}
    assert {alarm.limit for alarm in began} == {lasting.limit}


def test_a_step_is_compared_with_first_steps_of_its_own_age():
    """A sampler that is synchronized every fourth step: old weights differ 30-fold, fresh ones must not hide there."""
    ages = [step % 4 for step in range(60)]
    k3 = [1e-5 * (1, 10, 20, 30)[age] for age in ages]
    right, broken_at_40 = ChangeDetector(), ChangeDetector()
    for step, (value, age) in enumerate(zip(k3, ages, strict=True), start=1):
        right.add(step, value, age=age)
        broken_at_40.add(step, value * (1 if step < 40 else 15), age=age)
    assert right.changes == []
    assert broken_at_40.changes[-1].found <= 46
    assert broken_at_40.changes[-1].onset >= 37


def test_first_steps_of_several_ages_are_no_baseline_of_a_verdict():
    steps = of_age(lambda step: step % 3, lambda step: 1e-5 * (1 + step % 3))
    report = health(steps)
    assert (report.verdict, report.judged_against) == ("not judged", "")
    assert "steps 1 to 5 of this run have weights of 0 to 2 updates of age" in report.not_judged[0]
    same_age = health(of_age(lambda step: 2, lambda step: 1e-5))
    assert same_age.judged_against == "steps 1 to 5 of this run"

    # The Monitor agrees.
    judge = RunningJudge()
    for metrics in steps:
        judge.judge(metrics["step"], bare_metrics(metrics), None)
    assert judge.not_judged == report.not_judged


def test_what_a_restart_cured_stays_a_warning_until_it_would_have_come_back():
    k3 = [1e-5] * 30 + [1e-3] * 20 + [1e-5] * 30
    early, late = ([{"step": s, **metrics_of(x)} for s, x in enumerate(k3[:end], start=1)] for end in (60, 80))
    (warning,) = health(early).warnings
    assert (warning.code, warning.first_step, warning.steps) == ("changed_at_step", 31, 20)
    assert "it was back at its start from step 51 on" in warning.reason
    assert health(late).warnings == ()
    assert [note.code for note in health(late).notes] == ["changed_at_step"]


def test_a_run_that_starts_broken_and_stays_so_cannot_be_judged_by_itself():
    report = health([{"step": step, **metrics_of(0.02)} for step in range(1, 51)])
    assert report.verdict == "not judged"
    assert "unchanged since steps 1 to 5; the start was not judged" in report.not_judged[0]


def of_age(age_of, k3_of, *, steps=60):
    """Steps with a recorded age of the weights; k3 is a function of the step and of how old they really are."""
    noise = [math.exp(0.05 * (-1) ** step) for step in range(steps)]
    return [
        {"step": step, **metrics_of(k3_of(step) * noise[step - 1]), "engine/staleness": float(age_of(step))}
        for step in range(1, steps + 1)
    ]


def test_a_rise_that_goes_with_the_recorded_age_is_staleness_and_not_a_frozen_sampler():
    """The weights are up to 8 updates old: the mismatch grows for 8 steps and stays."""
    lag = lambda step: min(step - 1, 8)  # noqa: E731 (a course is one expression)
    steps = of_age(lag, lambda step: 1e-5 * (1 + lag(step)) ** 1.5)
    report = health(steps)
    (warning,) = report.warnings
    assert warning.code == "stale_by_lag"
    assert "now 8 updates" in warning.title
    judge = RunningJudge()
    for metrics in steps:
        judge.judge(metrics["step"], bare_metrics(metrics), None)
    assert [alarm.code for alarm in judge.alarms if alarm.metric == "k3_kl"] == ["stale_by_lag"]


@pytest.mark.parametrize("age_of", [lambda _: 0, lambda _: 8, lambda step: min(step - 1, 8)])
def test_a_rise_that_goes_on_at_one_recorded_age_is_a_frozen_sampler(age_of):
    (warning,) = health(of_age(age_of, lambda step: 1e-5 * step**1.5)).warnings
    assert warning.code == "frozen_sampler"


def test_the_share_that_the_token_id_explains_is_watched_too():
    share = [0.02, 0.04, 0.01, 0.03] * 5 + [0.25] * 10
    steps = [{"step": s, **metrics_of(1e-5), "log/token_id_share": x} for s, x in enumerate(share, start=1)]
    (warning,) = health(steps).warnings
    assert (warning.code, warning.first_step) == ("token_share_rose", 21)
    assert health(steps[:20]).warnings == ()


def test_two_spikes_in_a_row_are_no_change_and_three_bad_steps_are():
    quiet = [1e-5 * math.exp(0.05 * (-1) ** step) for step in range(20)]
    assert detected([*quiet, 1e-3, 1e-3, *quiet]).changes == []
    assert detected([*quiet, *[1e-3] * 3]).changes[-1].onset == 21


def test_steps_without_a_number_and_exact_zeros_are_no_change():
    detector = detected([1e-5, 0.0, math.nan, math.inf, -1.0] * 20)
    assert detector.changes == []
    steps = [{"step": s, **metrics_of(0.0 if s % 3 else 1e-14)} for s in range(1, 60)]
    assert health(steps).warnings == (), "below rounding nothing grows"


def test_the_work_of_a_step_does_not_grow_with_the_run():
    detector = detected([1e-5 * math.exp(0.1 * math.sin(step)) for step in range(3 * REMEMBERED)])
    held = [len(getattr(detector, name)) for name in ("_values", "_first", "_differences")]
    assert held[0] == REMEMBERED
    assert max(held[1:]) <= 30


def test_the_onset_by_hand():
    assert onset_of([0.0] * 10 + [2.0] * 5) == (10, "step")
    place, shape = onset_of([0.0] * 20 + [0.2 * step for step in range(1, 16)])
    assert (place, shape) == (20, "growth")
    assert onset_of([1.0]) == (0, "step")
    assert without_spikes(np.array([0.0, 0.0, 9.0, 0.0, 0.1])).max() < 0.2


def test_a_resumed_monitor_judges_by_the_steps_before():
    series = broken("jump", 0)
    whole, resumed = RunningJudge(), RunningJudge()
    cut = series.onset - 2
    for step, k3 in enumerate(series.k3[: cut + 10], start=1):
        whole.judge(step, bare_metrics(metrics_of(k3)), None)
        if step <= cut:
            resumed.remember(step, bare_metrics(metrics_of(k3)))
        else:
            resumed.judge(step, bare_metrics(metrics_of(k3)), None)
    assert [alarm.first_step for alarm in resumed.alarms] == [alarm.first_step for alarm in whole.alarms]
    assert resumed.alarms


@pytest.mark.parametrize(("vetted", "alarms"), [(1.0, 0), (0.0, 1)])
def test_a_rise_counts_beyond_the_growth_of_the_null(vetted, alarms):
    """k3 and the null grow 6-fold. After a restart the last null applies until the next measurement."""
    judge = RunningJudge()
    for step in range(1, 61):
        growth = 6.0 ** (step / 60)
        null = {"monitor/null_k3": 1e-3 * growth, "monitor/null_std": 0.045 * growth**0.5}
        null |= {"monitor/null_is_vetted": vetted, "monitor/null_is_large": 0.0}
        judge.judge(step, bare_metrics(metrics_of(1e-3 * growth)) | (null if step < 50 else {}), None)
    assert len([alarm for alarm in judge.alarms if alarm.first_step is not None and alarm.metric == "k3_kl"]) == alarms


def test_a_null_that_falls_makes_no_rise():
    judge = RunningJudge()
    for step in range(1, 41):
        null = {"monitor/null_k3": 1e-3 * 5.0 ** (-step / 40), "monitor/null_std": 0.04, "monitor/null_is_vetted": 1.0}
        judge.judge(step, bare_metrics(metrics_of(1e-3)) | null | {"monitor/null_is_large": 0.0}, None)
    assert judge.alarms == ()
