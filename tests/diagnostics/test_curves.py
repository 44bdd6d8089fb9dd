"""The charts of a page: panels, guide lines, packed points and captions."""

import base64
import math
import zlib

import numpy as np
import pytest

from rollcorr.diagnostics.report.curves import (
    MOST_POINTS,
    PANELS,
    REWARD,
    caption,
    chart_of,
    guides_of,
    pack,
    thinned,
)

BY_NAME = {panel.name: panel for panel in (*PANELS, REWARD)}


def unpack(text):
    """What the page's script does."""
    kind, _, packed = text.partition(":")
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8).reshape(np.dtype(kind).itemsize, -1)
    return np.ascontiguousarray(planes.T).view(f"<{kind}").ravel()


def test_the_six_panels_are_those_of_the_usage_guide():
    assert list(BY_NAME) == [
        "mean_weight",
        "effective_sample_size",
        "rejected",
        "kl",
        "ppl_ratio",
        "chi2",
        "reward",
    ]


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i4", "u1"])
def test_packed_numbers_come_back(kind):
    values = np.array([0, 1, 2, 100], dtype=kind)
    assert unpack(pack(values, kind)).tolist() == values.tolist()
    assert unpack(pack([], kind)).size == 0


def test_a_chart_has_its_points_guides_and_caption():
    panel = BY_NAME["mean_weight"]
    chart = chart_of(panel, {"mean weight": [(1, 1.0), (2, 1.5)]}, guides=guides_of(panel.curves, labels=panel.curves))
    (curve,) = chart["curves"]
    assert (unpack(curve["x"]).tolist(), unpack(curve["y"]).tolist()) == ([1, 2], [1, 1.5])
    assert {guide["label"] for guide in chart["guides"]} == {"ideal 1", "warn < 0.5", "warn > 2"}
    assert chart["caption"] == "mean weight 1.5000 (1 to 1.5000)"


def test_guides_of_several_metrics_say_whose_they_are():
    panel = BY_NAME["rejected"]
    labels = [guide.label for guide in guides_of(panel.curves, labels=panel.curves)]
    assert labels == ["ideal < 0.05, vetoed", "warn > 0.1, vetoed", "warn > 0.3, rejected"]


def test_a_long_series_keeps_its_spikes():
    points = np.stack([np.arange(100_000.0), np.zeros(100_000)], axis=1)
    points[54_321, 1], points[77_777, 1] = 9.0, -9.0
    shown = thinned(points)
    assert len(shown) <= MOST_POINTS
    assert (shown[:, 1].max(), shown[:, 1].min()) == (9.0, -9.0)
    assert (np.diff(shown[:, 0]) > 0).all()


def test_captions_give_the_latest_value_and_its_range():
    assert caption({"mean reward": [(1, 0.5), (2, 1.5), (3, 1.0)]}) == "mean reward 1 (0.5 to 1.5000)"
    assert caption({"mean reward": [(1, 0.5), (2, math.nan)]}) == "mean reward 0.5"
    assert caption({}) == ""
