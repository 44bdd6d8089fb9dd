"""Rows whose values are not the log-probs of their tokens: where they lie, and what follows from them."""

import json
from functools import cache
from unittest import mock

import numpy as np
import pytest
from null_logs import log_softmax, rollouts, write_rows

from rollcorr.diagnostics import check_logs, null_of_logs
from rollcorr.diagnostics.faults import is_rise
from rollcorr.diagnostics.provenance import pair_sample
from rollcorr.diagnostics.report.console import to_json
from rollcorr.diagnostics.report.verdict_content import verdict_content
from rollcorr.run_directory.stored_run import BadInputError

STEPS, ROWS = 14, 12


def late(row):
    """The row with log-probs that come late by one token; the first one is repeated."""
    values = row["rollout_log_prob"]
    return {**row, "rollout_log_prob": [values[0], *values[:-1]]}


@cache
def rows_of(step, weights):
    return tuple({**row, "step": step} for row in rollouts(rows=ROWS, length=60, seed=step, weights=weights))


def series(*, faults=(), weights=lambda step: 0.0):
    """Rows of a log of steps, from 1: each fault is a function that damages a row, two steps, and how many rows."""
    found = []
    for step in range(1, STEPS + 1):
        own = list(rows_of(step, weights(step)))
        for fault, first, last, count in faults:
            if first <= step <= last:
                own[:count] = [fault(row) for row in own[:count]]
        found += own
    return found


def finding_of(result, code):
    return next(finding for finding in result.health.findings if finding.code == code)


def test_a_cause_of_some_rows_says_with_which_step_and_row_it_begins(tmp_path):
    rows = series(faults=[(late, 9, 12, 3)])
    half = len(rows) // 2
    write_rows(tmp_path / "a.parquet", rows[:half])
    second = write_rows(tmp_path / "b.parquet", rows[half:])
    result = check_logs([tmp_path])

    found = finding_of(result, "shifted")
    assert (found.rows, found.first_step, found.steps) == (12, 9, 4)
    assert (found.file, found.first_row) == (str(second), (9 - 1) * ROWS - half)
    assert result.hypotheses[0] == found
    assert result.provenance.finding("shifted").confidence == found.evidence["score"]

    [entry] = [entry for entry in verdict_content(result.health).entries if entry.finding.code == "shifted"]
    assert "first at step 9, 4 steps in all" in entry.numbers
    assert ("first in", f"{second}, row 12") in entry.lines
    [in_json] = [one for one in json.loads(to_json(result.health))["findings"] if one["code"] == "shifted"]
    assert (in_json["first_step"], in_json["file"], in_json["first_row"]) == (9, str(second), 12)


def test_a_cause_without_a_number_begins_with_its_steps(tmp_path):
    log = write_rows(tmp_path / "log.parquet", series(faults=[(constant, 9, 12, 3)]))
    entries = verdict_content(check_logs([log]).health).entries
    [entry] = [entry for entry in entries if entry.finding.code == "placeholder"]
    assert entry.numbers == "first at step 9, 4 steps in all"


def in_log10(row):
    return {**row, "rollout_log_prob": [value / np.log(10) for value in row["rollout_log_prob"]]}


def constant(row):
    return {**row, "rollout_log_prob": [-1.0] * len(row["rollout_log_prob"])}


def reversed_(row):
    """The row with values unrelated to its tokens, as from a different request."""
    return {**row, "rollout_log_prob": row["rollout_log_prob"][::-1]}


ROW_FAULTS = {"shifted": late, "placeholder": constant, "other_request": reversed_, "wrong_unit": in_log10}


@pytest.mark.parametrize("count", [4, ROWS])
@pytest.mark.parametrize("code", ROW_FAULTS)
def test_rows_that_hold_other_values_from_a_step_on_explain_the_rise_there(tmp_path, code, count):
    """Also where all rows since that step do: that is less than half of the log."""
    log = write_rows(tmp_path / "log.parquet", series(faults=[(ROW_FAULTS[code], 9, STEPS, count)]))
    result = check_logs([log])
    assert (result.hypotheses[0].code, result.hypotheses[0].first_step) == (code, 9)
    rise = finding_of(result, "changed_at_step")
    assert (rise.follows_from, rise.first_step) == (code, 9)
    assert [cause.finding.code for cause in result.health.causes if cause.finding.severity != "note"] == [code]
    assert "the other rows are unchanged since steps 1 to 5 of this log" in result.health.not_judged[0]

    # The same with a null.
    assert check_logs([log], null_steps=(1, 5)).hypotheses[0].code == code


def of_two_temperatures(step, count, weights=0.0):
    """Rows sampled at temperature 0.5, the first ones scored at 1 and, from their step on, all with noise `weights`."""
    random = np.random.default_rng(step)
    z = 2 * random.normal(size=(ROWS, 100, 32))
    scored = z + (0.01 + weights) * random.normal(size=z.shape)
    temperature = np.where(np.arange(ROWS) < count, 1.0, 0.5)[:, None, None]
    mu, pi = log_softmax(z / 0.5), log_softmax(scored / temperature)
    ids = (mu + random.gumbel(size=mu.shape)).argmax(-1)[..., None]
    sides = {
        "response_ids": ids,
        "rollout_log_prob": np.take_along_axis(mu, ids, -1),
        "old_log_prob": np.take_along_axis(pi, ids, -1),
    }
    return [{"step": step, **{name: side[row, :, 0].tolist() for name, side in sides.items()}} for row in range(ROWS)]


def tempered_series(first, count, weights=0.0):
    """A log of steps, in which some rows have two temperatures from one of them on."""
    late_steps = {step: of_two_temperatures(step, count, weights) for step in range(first, STEPS + 1)}
    return [row for step in range(1, STEPS + 1) for row in late_steps.get(step) or of_two_temperatures(step, 0)]


@pytest.mark.parametrize(("first", "count"), [(11, ROWS), (8, ROWS), (8, 5)])
def test_rows_with_settings_of_their_own_from_a_step_on_explain_the_rise_there(tmp_path, first, count):
    """Whatever their share of the rows: a finding that the rest does not show follows from the settings of these."""
    rows = tempered_series(first, count)
    log = write_rows(tmp_path / "log.parquet", rows)
    right = [row for step in range(21, 26) for row in of_two_temperatures(step, 0)]
    null = null_of_logs([write_rows(tmp_path / "null.parquet", right)])
    results = [check_logs([log]), check_logs([log], null_steps=(1, 5)), check_logs([log], null=null)]
    for result in results:
        assert [cause.finding.code for cause in result.health.causes if cause.finding.severity != "note"] == [
            "tempered"
        ]
        assert result.hypotheses[0].rows == (STEPS + 1 - first) * count
        rise = finding_of(result, "changed_at_step")
        assert (rise.follows_from, rise.first_step, result.hypotheses[0].first_step) == ("tempered", first, first)
    assert "the other rows are unchanged since steps 1 to 5 of this log" in results[0].health.not_judged[0]
    assert "rows hold log-probs of other sampling settings; the other" in results[2].remarks[-1]


def test_settings_of_some_rows_explain_a_log_without_steps_too(tmp_path):
    rows = [{**row, "step": None} for row in tempered_series(10, ROWS)]
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)])
    assert [cause.finding.code for cause in result.health.causes if cause.finding.severity != "note"] == ["tempered"]
    assert finding_of(result, "out_of_range").follows_from == "tempered"


@pytest.mark.parametrize("with_null", [True, False])
def test_settings_of_some_rows_do_not_explain_what_the_other_rows_show(tmp_path, with_null):
    log = write_rows(tmp_path / "log.parquet", tempered_series(8, 5, weights=0.3))
    result = check_logs([log], null_steps=(1, 5) if with_null else None)
    assert finding_of(result, "tempered").evidence["score"] > 0.99
    assert finding_of(result, "weights_differ").follows_from is None, "dropout would be there from step 1"
    assert "-0%" not in finding_of(result, "weights_differ").reason
    assert finding_of(result, "changed_at_step").follows_from == "weights_differ"


def test_rows_that_become_more_with_the_steps_explain_a_growth_from_the_start(tmp_path):
    faults = [(late, step, STEPS, step // 3) for step in range(3, STEPS + 1, 3)]
    result = check_logs([write_rows(tmp_path / "log.parquet", series(faults=faults))])
    rises = {finding.code: finding.follows_from for finding in result.health.findings if is_rise(finding)}
    assert set(rises.values()) == {"shifted"}
    assert result.hypotheses[0].code == "shifted"


@pytest.mark.parametrize("onset", [9, 6])
def test_a_rise_that_the_other_rows_show_too_stands_by_itself(tmp_path, onset):
    """Four of twelve rows are shifted from step 9 on, and the weights of all rows differ from a later step on."""
    rows = series(faults=[(late, 9, STEPS, 4)], weights=lambda step: 0.1 * (step >= onset))
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)])
    rises = [f for f in result.health.findings if is_rise(f) and f.follows_from != "shifted"]
    assert [(rise.first_step, rise.follows_from) for rise in rises] == [(onset, "weights_differ")]
    assert rises[0].title.startswith("in the other rows the mismatch")
    assert rises[0].evidence["factor"] < 100, "the shift has no part in it"
    assert {f.follows_from for f in result.health.warnings if f.metric == "chi2_token"} == {"shifted"}
    assert {cause.finding.code for cause in result.health.causes} >= {"shifted", "weights_differ"}


def test_a_null_of_some_steps_is_judged_by_these_alone(tmp_path):
    late_fault = write_rows(tmp_path / "late.parquet", series(faults=[(late, 9, STEPS, 4)]))
    assert null_of_logs([late_fault], steps=(1, 5)).profile.row_count == 5 * ROWS

    early_fault = write_rows(tmp_path / "early.parquet", series(faults=[(late, 3, STEPS, 4)]))
    with pytest.raises(
        BadInputError, match=r"no null: .*early.parquet, row 24: .*neighboring token \(and 11 more rows\)"
    ):
        null_of_logs([early_fault], steps=(1, 5))


def test_the_steps_of_a_null_have_a_sample_of_their_own_in_a_large_log(tmp_path):
    """The sample of the log is every fourth row; those that are shifted lie between."""
    rows = series()
    rows[25:28] = [late(row) for row in rows[25:28]]
    log = write_rows(tmp_path / "log.parquet", rows)
    with mock.patch.object(pair_sample, "TOKENS", 1 << 11):
        result = check_logs([log], null_steps=(1, 5))
        assert "shifted" not in result.provenance.codes
        assert result.null.profile.row_count == 5 * ROWS - 3
        with pytest.raises(BadInputError, match=r"neighboring token \(and 2 more rows\)"):
            null_of_logs([log], steps=(1, 5))


@pytest.mark.parametrize("null_steps", [None, (1, 5)])
def test_rows_of_the_null_steps_that_hold_other_values_are_left_out_of_the_null(tmp_path, null_steps):
    clean = check_logs([write_rows(tmp_path / "clean.parquet", series())], null_steps=null_steps)
    faulty = check_logs(
        [write_rows(tmp_path / "log.parquet", series(faults=[(late, 1, STEPS, 4)]))], null_steps=null_steps
    )
    assert faulty.null.profile.row_count == 5 * (ROWS - 4)
    assert faulty.null.profile.k3 == pytest.approx(clean.null.profile.k3, rel=0.3)
    assert faulty.health.expected["k3_kl"] == pytest.approx(clean.health.expected["k3_kl"], rel=0.3)
    assert "20 of 60 rows of steps 1 to 5 hold values that are not the log-probs of their tokens" in faulty.remarks[-1]
    assert any("the other 72 rows after steps 1 to 5 were compared with these" in remark for remark in faulty.remarks)
    assert [cause.finding.code for cause in faulty.health.causes if cause.finding.severity != "note"] == ["shifted"]


def test_steps_in_which_hardly_a_row_is_right_are_no_null(tmp_path):
    log = write_rows(tmp_path / "log.parquet", series(faults=[(late, 1, 5, 11)]))
    result = check_logs([log], null_steps=(1, 5))
    assert result.null is None
    [sentence] = result.health.not_judged
    assert sentence.startswith("weights not judged: steps 1 to 5 were not used: they are no null: 55 of 60 rows")
    assert "5 others with 300 tokens are left, 8 and 1,000 are needed" in sentence
    assert result.hypotheses[0].code == "shifted"

    # Noise is measured on rows whose values are the log-probs of their tokens.
    assert result.health.expected["k3_kl"] == pytest.approx(2e-4, rel=0.7)
    assert "as observed in the other rows" in result.health.expected_from


def test_zeros_that_only_a_shift_put_there_follow_from_it(tmp_path):
    def padded(row):
        return {**row, "rollout_log_prob": [0.0, *row["rollout_log_prob"][:-1]]}

    log = write_rows(tmp_path / "padded.parquet", series(faults=[(padded, 9, STEPS, 4)]))
    assert finding_of(check_logs([log]), "contradicted_zeros").follows_from == "shifted"

    def with_a_gap(row):
        row = padded(row)
        values = row["rollout_log_prob"]
        place = min(range(20, 40), key=lambda place: row["old_log_prob"][place])
        return {**row, "rollout_log_prob": [*values[: place - 1], 0.0, *values[place:]]}

    log = write_rows(tmp_path / "filled.parquet", series(faults=[(with_a_gap, 9, STEPS, 4)]))
    assert finding_of(check_logs([log]), "contradicted_zeros").follows_from != "shifted"


def test_a_setting_that_all_rows_show_only_together_claims_no_first_step(tmp_path):
    rows = [{**row, "step": index // 12} for index, row in enumerate(rollouts(rows=96, length=60, temperature=0.6))]
    found = check_logs([write_rows(tmp_path / "log.parquet", rows)]).provenance.finding("tempered")
    assert (found.rows, found.first_step, found.steps, found.first_row, found.file) == (96, None, None, None, None)
