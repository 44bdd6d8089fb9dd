"""Rounding grows with the logits of a policy that trains from random weights: no sampler is out of sync for that."""

import pytest

from rollcorr import health


def series(values):
    return [
        {"step": step, "token_count": 5000.0, "sequence_count": 100.0, "k3_kl": k3, "log_ratio_std": (2 * k3) ** 0.5}
        for step, k3 in enumerate(values, start=1)
    ]


@pytest.mark.parametrize("growth", [1.05, 1.1])
def test_growth_far_below_what_matters_is_a_note(growth):
    report = health(series([6e-7 * min(growth**step, 8) for step in range(40)]))
    assert not report.warnings
    assert report.verdict == "not judged"
    assert "unchanged" not in " ".join(report.not_judged)
    (note,) = [finding for finding in report.notes if "young policy" in finding.reason]
    assert note.fix.startswith("nothing to do")
    assert not note.confirm, "what rounding explains needs no test"
    assert "sync" not in f"{note.title} {note.reason} {note.fix}"


def test_the_same_growth_at_a_size_that_matters_is_a_warning():
    assert health(series([6e-5 * min(1.1**step, 8) for step in range(40)])).verdict == "unhealthy"


def test_a_bf16_copy_of_a_policy_that_sharpens_is_a_note_and_a_sampler_that_drifts_on_is_a_warning():
    """From 5e-7 to 6e-5 in 40 steps, as measured with a copy that is fresh at every step."""
    rise = [5e-7 * (6e-5 / 5e-7) ** (step / 39) for step in range(40)]
    report = health(series(rise))
    assert [finding.code for finding in report.notes if "sharpens" in finding.reason]
    assert (report.warnings, report.verdict) == ((), "not judged")
    assert health(series([2 * k3 for k3 in rise])).verdict == "unhealthy", "1.2e-4 is not negligible"


def test_a_step_of_the_same_size_is_a_warning_for_no_policy_sharpens_within_one():
    (warning,) = health(series([1e-5] * 20 + [8e-5] * 10)).warnings
    assert (warning.code, warning.first_step) == ("changed_at_step", 21)
