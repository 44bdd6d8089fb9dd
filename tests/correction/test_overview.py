"""A correction at a glance: two lines, a summary, and a verdict."""

import math

import pytest
import torch

from rollcorr import correct, merge_statistics

MASK = torch.ones(2, 3, dtype=torch.bool)


def corrected(d, config=None, **options):
    rollout = torch.full((2, 3), -2.0)
    return correct(rollout + d, rollout, MASK, config, **options)


def test_a_correction_shows_itself_in_two_lines():
    first, second = repr(corrected(0.01)).split("\n")
    assert first == "Correction(2 sequences, padded (2, 3), on cpu: token weights up to 2.0, measured only)"
    assert second.startswith("  within limits: k3_kl ")
    assert second.endswith("6 of 6 tokens kept")


def test_a_part_says_of_what():
    assert "1 sequences, padded (1, 3), a part of (2, 3), on cpu" in repr(corrected(0.01)[:1])


def test_the_four_numbers_to_look_at_first_are_there_without_a_configuration():
    shown = corrected(0.01).summary()
    for name in ("k3_kl", "rollout_is_mean", "rollout_is_eff_sample_size", "t_times_kl"):
        assert name in shown


@pytest.mark.parametrize(
    ("d", "mask", "expected"), [(0.01, MASK, "within limits"), (1.5, MASK, "unhealthy"), (0.0, ~MASK, "not judged")]
)
def test_a_batch_is_within_its_limits_unhealthy_or_not_judged(d, mask, expected):
    rollout = torch.full((2, 3), -2.0)
    correction = correct(rollout + d, rollout, mask)
    for text in (correction.summary(), repr(correction).split("\n")[1].strip()):
        assert text.startswith(f"{expected}: ")


def test_what_is_beyond_its_limit_is_named_with_its_ideal():
    summary = corrected(1.5).summary()
    (line,) = [line for line in summary.split("\n") if " kl " in line]
    assert "-1.5" in line
    assert "ideal 0  <- beyond its limit" in line


def test_without_any_correction_there_is_nothing_to_judge():
    nothing = corrected(1.5, {"rollout_is_threshold": None, "rollout_is": True})
    assert "no correction" in repr(nothing)
    assert nothing.summary() == "not judged: no response token"


def test_what_is_rejected_is_counted():
    config = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    d = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    correction = corrected(d, config)
    assert "5 of 6 tokens kept" in repr(correction)
    assert "rejection by token_k1 beyond 0.5_2.0" in repr(correction)


def test_numbers_on_a_device_stay_there():
    with torch.device("meta"):
        correction = correct(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
    assert repr(correction).split("\n")[1] == "  its numbers are on meta: summary() reads them"


def test_merged_statistics_have_the_metrics_of_the_whole():
    train = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) - 3
    rollout = train + 0.1
    mask = torch.ones(4, 5)
    whole = correct(train, rollout, mask)
    parts = [correct(train[rows], rollout[rows], mask[rows]).statistics for rows in (slice(0, 1), slice(1, 4))]
    merged = merge_statistics(parts).metrics()
    assert merged == pytest.approx(whole.metrics(), rel=1e-9, abs=1e-12)
    assert whole.statistics.metrics(prefix="") == whole.metrics(prefix="")


def test_no_metric_of_a_measured_batch_is_infinite():
    """KL is negative here, so every length is viable; the number still fits into JSON."""
    metrics = corrected(0.1).metrics(prefix="")
    assert metrics["kl"] < 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_notebook_shows_the_verdict_in_color():
    good, bad = corrected(0.01)._repr_html_(), corrected(1.5)._repr_html_()
    assert '\n  <b style="color: #15803d">within limits</b>: k3_kl' in good
    assert '\n  <b style="color: #c02626">unhealthy</b>: k3_kl' in bad
    assert good.startswith("<pre>Correction(")
