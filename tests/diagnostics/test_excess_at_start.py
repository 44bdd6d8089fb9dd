"""A mismatch that is there before the first update: whatever makes it, no weight sync has failed by then."""

import pytest

from rollcorr import health
from rollcorr.diagnostics import check_logs, null_of_logs
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.monitor.running_judge import RunningJudge
from tests.diagnostics.null_logs import rollouts, write_rows

NULL = Noise(sigma=1.3e-3, source="null.json", k3=8e-7, is_null=True)


def steps_of(k3, *, age=None, first_step=1):
    """Steps of a run with these k3, and with a recorded age of the weights where one is given."""
    recorded = {} if age is None else {"engine/staleness": float(age)}
    return [
        {"step": step, "token_count": 5000.0, "sequence_count": 100.0, "k3_kl": x, "log_ratio_std": (2 * x) ** 0.5}
        | recorded
        for step, x in enumerate(k3, start=first_step)
    ]


def rises(first, last, steps=30):
    """k3 that grows by a factor per step."""
    return [first * (last / first) ** (step / (steps - 1)) for step in range(steps)]


def alarms_of(steps):
    judge = RunningJudge(NULL)
    for metrics in steps:
        judge.judge(metrics["step"], bare_metrics(metrics), None)
    return judge.alarms


def by_code(findings):
    return {finding.code: finding for finding in findings}


@pytest.mark.parametrize("age", [None, 0])
def test_a_run_that_differs_from_the_first_step_on_is_not_said_to_be_out_of_sync(age):
    """As at another temperature: it shows more as the policy sharpens."""
    steps = steps_of(rises(0.005, 0.03), age=age)
    report = health(steps, null=NULL)
    assert report.warnings[0].code == "above_null"
    assert "differ from the first step on" in report.warnings[0].title
    assert "temperature" in report.warnings[0].fix
    assert "rollcorr check" in report.warnings[0].confirm
    assert report.warnings[0].first_step == 1
    found = by_code(report.findings)
    assert found["growing_mismatch"].follows_from == "above_null"
    assert "in excess already" in found["growing_mismatch"].title
    assert "frozen_sampler" not in found

    watched = by_code(alarms_of(steps))
    assert {"above_null", "growing_mismatch"} <= set(watched)
    assert "frozen_sampler" not in watched
    assert watched["above_null"].title.startswith("the two sides differ from the first step on")


@pytest.mark.parametrize("age", [None, 0])
def test_a_sampler_that_was_right_at_the_first_step_and_is_not_since_is_frozen_whatever_age_it_reports(age):
    steps = steps_of(rises(8e-7, 0.03), age=age)
    report = health(steps, null=NULL)
    assert report.warnings[0].code == "frozen_sampler"
    assert by_code(report.findings)["above_null"].follows_from == "frozen_sampler"
    assert "frozen_sampler" in by_code(alarms_of(steps))


def test_a_small_excess_at_the_first_step_comes_first_where_the_weights_are_fresh_on_record():
    """The record may be wrong, so the sampler may still be frozen."""
    found = health(steps_of(rises(8e-6, 0.03), age=0), null=NULL).warnings
    assert [finding.code for finding in found] == ["above_null", "frozen_sampler"]
    assert found[1].follows_from == "above_null"
    assert "that may be wrong" in found[1].reason
    without_record = health(steps_of(rises(8e-6, 0.03)), null=NULL).warnings
    assert [finding.code for finding in without_record] == ["frozen_sampler", "above_null"]


def test_a_run_whose_first_step_is_not_recorded_may_have_a_frozen_sampler():
    report = health(steps_of(rises(0.005, 0.03), first_step=50), null=NULL)
    assert report.warnings[0].code == "frozen_sampler"


def test_an_excess_that_stays_is_told_to_be_there_from_the_first_step_on():
    (warning,) = health(steps_of([0.005] * 20), null=NULL).warnings
    assert "before any update that a sampler could miss" in warning.reason
    assert warning.evidence["k3_at_first_step"] == 0.005
    (later,) = (w for w in health(steps_of([8e-7] * 10 + [0.005] * 20), null=NULL).warnings if w.code == "above_null")
    assert "first step on" not in later.title


def test_recorded_versions_do_not_make_a_frozen_sampler_of_what_was_there_at_the_first_step(tmp_path):
    """The age is 0 at every step, and k3 grows: of a trainer that is changed from the first step on, and ever more."""
    null = null_of_logs([write_rows(tmp_path / "null.parquet", rollouts(rows=96, seed=100))])
    for first, code in ((0.2, "weights_differ"), (0.0, "frozen_sampler")):
        rows = []
        for step in range(1, 11):
            of_step = rollouts(rows=8, length=50, seed=step, weights=first + 0.03 * (step - 1))
            version = [{"start": 0, "length": 50, "version": step}]
            rows += [{**row, "step": step, "policy_versions": version} for row in of_step]
        result = check_logs([write_rows(tmp_path / f"{code}.parquet", rows)], null=null)
        assert result.hypotheses[0].code == code
        assert ("frozen_sampler" in by_code(result.health.findings)) is (code == "frozen_sampler")
