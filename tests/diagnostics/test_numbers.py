"""How numbers and metrics are written."""

import math

import pytest

from rollcorr.core.metric_registry import METRICS
from rollcorr.diagnostics.numbers import HEADLINES, LABELS, format_number, label


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (1.00031, "1.0003"),
        (0.25, "0.25"),
        (0.123456, "0.1235"),
        (-0.4042, "−0.4042"),
        (1.3e-5, "1.30e−05"),
        (12345.0, "12,345"),
        (4213.27, "4,213.3"),
        (4.85e8 + 0.5, "4.85e+08"),
        (606.06, "606.1"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_have_about_four_digits(value, text):
    assert format_number(value) == text


def test_every_range_that_warns_has_a_label():
    warns = {
        n for n, m in METRICS.items() if m.healthy and (m.healthy.warn_above, m.healthy.warn_below) != (None, None)
    }
    assert warns == set(LABELS)
    assert set(HEADLINES) <= set(METRICS)


def test_other_metrics_are_called_by_their_names():
    assert label("rollout_rs_seq_mean_k3_masked_fraction") == "rollout rs seq mean k3 masked fraction"
