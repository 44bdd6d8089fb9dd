"""How numbers and metrics are written."""

import math

import pytest

from rollcorr.core.metric_registry import METRICS
from rollcorr.diagnostics.numbers import HEADLINES, LABELS, format_number, format_range, label


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


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (-0.0012345, 0.0812345, "−0.001 to 0.081"),
        (0.9987654, 1.0012345, "0.9988 to 1.0012"),
        (-123.4, 5678.9, "−100 to 5,700"),
        (2.0, 2.0, "2 to 2"),
        (-math.inf, 1.0, "−∞ to 1"),
    ],
)
def test_a_range_has_the_digits_that_its_width_needs(low, high, text):
    assert format_range(low, high) == text


def test_every_range_that_warns_has_a_label():
    warns = {
        n for n, m in METRICS.items() if m.healthy and (m.healthy.warn_above, m.healthy.warn_below) != (None, None)
    }
    assert warns == set(LABELS)
    assert set(HEADLINES) <= set(METRICS)


def test_other_metrics_are_called_by_their_names():
    assert label("rollout_rs_seq_mean_k3_masked_fraction") == "rollout rs seq mean k3 masked fraction"
