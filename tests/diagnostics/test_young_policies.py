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
    assert [finding for finding in report.notes if "young policy" in finding.reason]


def test_the_same_growth_at_a_size_that_matters_is_a_warning():
    assert health(series([6e-5 * min(1.1**step, 8) for step in range(40)])).verdict == "unhealthy"
