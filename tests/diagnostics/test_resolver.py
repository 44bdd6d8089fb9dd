"""One table of faults, one resolver: tests refute causes, and the rest is judged again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from null_logs import rollouts, write_rows

from rollcorr.config import Finding
from rollcorr.diagnostics import check_logs
from rollcorr.diagnostics.fault_row import CAUSES, Case
from rollcorr.diagnostics.faults import FAULTS, fault, refutation
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.health_check import evidence_of
from rollcorr.diagnostics.health.trend import AGE
from rollcorr.diagnostics.report.console import COLUMNS
from rollcorr.diagnostics.resolver import resolve_findings, standing
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

RECORDED = Path(__file__).parents[1] / "data" / "reverse_digits_stopped_sync.npz"
CONSTANT = ("stochastic_trainer", "template", "tempered", "truncated", "raw")


def finding(code, confidence=0.9, severity="warning", **more):
    return Finding(code=code, title=code, confidence=confidence, severity=severity, **more)


def course(k3, ages=None):
    """The evidence of a run with these k3, and these recorded ages of the weights."""
    steps = [{"step": step, "token_count": 1000.0, "k3_kl": value} for step, value in enumerate(k3, start=1)]
    if ages is not None:
        steps = [step | {AGE: float(age)} for step, age in zip(steps, ages, strict=True)]
    return evidence_of(steps)


STOPPED = course([2e-4] * 15 + [0.03 * 1.5**step for step in range(10)])
SUDDEN = course([2e-4] * 15 + [0.1] * 10)


@pytest.mark.parametrize("null_steps", [None, (1, 5)])
def test_a_stopped_sync_is_no_dropout(tmp_path, null_steps):
    """A loop that reverses ten digits: 128 responses of 11 tokens, a bfloat16 sampler, the last sync at step 15."""
    recorded = np.load(RECORDED)
    rows = [{name: recorded[name][row].tolist() for name in recorded.files} for row in range(len(recorded["step"]))]
    log = tmp_path / "log.parquet"
    with RolloutLogWriter(log) as writer:
        writer.write(RolloutBatch.from_rows(rows))
    result = check_logs([log], null_steps=null_steps)
    assert [(cause.code, cause.first_step) for cause in result.causes] == [("weights_differ", 16)]
    assert "weight sync" in result.causes[0].fix


@pytest.mark.parametrize("code", CONSTANT)
def test_a_constant_cause_does_not_grow(code):
    alone = {"pairs": [finding(code, 0.999)], "steps": [finding("growing_mismatch", first_step=16)]}
    assert standing(resolve_findings(**alone))[0].code == code
    (first, ruled_out) = resolve_findings(**alone, evidence=STOPPED)
    assert (first.code, ruled_out.code, ruled_out.severity) == ("growing_mismatch", code, "note")
    assert ruled_out.title.startswith("ruled out: ")
    assert "acts from the first step on" in ruled_out.reason
    steady = course([0.1, 0.12] * 12)
    assert refutation(code, Case(finding(code), steady)) is None


def test_rows_that_begin_at_a_jump_explain_it():
    case = Case(finding("tempered", first_step=16), SUDDEN)
    assert refutation("tempered", case) is None
    assert refutation("tempered", case._replace(finding=finding("tempered"))) is not None
    assert refutation("tempered", case._replace(evidence=STOPPED)) is not None


def test_a_constant_cause_does_not_reset():
    ages = [0, 1, 2, 3] * 6
    resets = course([1e-4 * 4**age for age in ages], ages)
    assert "with each sync" in refutation("stochastic_trainer", Case(None, resets)).reason
    flat = course([1e-4] * 24, ages)
    assert refutation("stochastic_trainer", Case(None, flat)) is None


def test_an_undeclared_code_raises():
    with pytest.raises(LookupError, match=r"'cosmic_rays' is not declared; add a row to rollcorr/diagnostics/faults"):
        resolve_findings(pairs=[finding("cosmic_rays")])


def test_every_row_is_complete():
    for row in FAULTS.values():
        assert set(row.explained_by) <= set(FAULTS), row.code
        assert row.kind not in CAUSES or row.score > 0 or row.part == "nothing", row.code
        assert not row.refuted_by or row.kind in CAUSES | {"course"}, row.code
        assert fault(row.code).finding.code == row.code
        assert len(f"unhealthy: {row.title}") <= COLUMNS, row.code


causes = st.lists(
    st.builds(
        finding,
        st.sampled_from([row.code for row in FAULTS.values() if row.kind in CAUSES]),
        st.floats(0.1, 0.99),
        row_share=st.none() | st.floats(0.01, 1.0),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda found: found.code,
)
symptoms = st.lists(
    st.builds(
        finding,
        st.sampled_from([row.code for row in FAULTS.values() if row.kind == "symptom"]),
        st.floats(0.1, 0.999),
        metric=st.sampled_from(["kl", "chi2_token", "nonfinite_count"]),
    ),
    max_size=4,
)


@given(pairs=causes, null=causes, symptoms=symptoms, evidence=st.sampled_from([Evidence(current={}), STOPPED]))
def test_a_symptom_never_changes_the_first_cause(pairs, null, symptoms, evidence):
    def first(**sources):
        ranked = standing(resolve_findings(pairs=pairs, null=null, evidence=evidence, **sources))
        return [one.code for one in ranked if fault(one.code).kind in CAUSES]

    assert first(metrics=symptoms) == first() == first(steps=symptoms)


def test_a_row_is_judged_without_a_few_tokens():
    """A value above 0 in 1 of 64 rows does not explain the mismatch of the remaining rows."""
    ranked = resolve_findings(
        pairs=[finding("positive", row_share=1 / 64)],
        null=[finding("weights_differ")],
        metrics=[finding("out_of_range", metric="kl")],
    )
    assert [(one.code, one.follows_from) for one in ranked] == [
        ("weights_differ", None),
        ("positive", None),
        ("out_of_range", "weights_differ"),
    ]
    whole = replace(ranked[1], row_share=0.9)
    assert resolve_findings(pairs=[whole], null=[finding("weights_differ")])[1].follows_from == "positive"


def test_an_excess_that_fades_and_grows_is_no_template(tmp_path):
    rows = []
    for step in range(1, 15):
        fading = 0.0 if step < 8 else 0.3 * 1.5 ** (step - 8)
        rows += [{**row, "step": step} for row in rollouts(rows=12, length=60, seed=step, fading=fading)]
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)], null_steps=(1, 5))
    assert result.causes[0].code == "weights_differ"
    assert result.causes[0].first_step in (7, 8, 9)
    assert "template" not in {cause.code for cause in result.causes}
