"""Figures of any series: one step, ten thousand, nothing at all, values that are not finite."""

import math

import numpy as np
import pytest
from processes import run_python

from rollcorr.diagnostics.report.plots import DARK, LIGHT, PANELS, REWARD, draw, guides_of, rolling_mean, to_png

BY_NAME = {panel.name: panel for panel in (*PANELS, REWARD)}


def lines(figure):
    return [line for line in figure.axes[0].get_lines() if line.get_label()[0] != "_"]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


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


@pytest.mark.parametrize("panel", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize("steps", [0, 1, 2, 100, 3000])
def test_every_panel_draws_any_number_of_steps(panel, steps):
    series = {name: [(s, 0.5 + 0.1 * math.sin(s)) for s in range(1, steps + 1)] for name in panel.curves}
    figure = draw(panel, series, DARK if steps % 2 else LIGHT)
    assert len(lines(figure)) == (len(panel.curves) if steps else 0)
    assert figure.axes[0].get_title(loc="left") == panel.title
    assert to_png(figure, dpi=40).startswith(b"\x89PNG")


def test_guide_lines_are_the_registrys_ranges_and_labelled():
    figure = draw(BY_NAME["mean_weight"], {"rollout_is_mean": [(1, 1.0), (2, 1.1)]})
    assert set(texts(figure)) == {"ideal 1", "warn < 0.5", "warn > 2"}
    dashed = {
        (line.get_ydata()[0], line.get_color()) for line in figure.axes[0].get_lines() if line.get_linestyle() == "--"
    }
    assert dashed == {(1.0, LIGHT.ideal), (0.5, LIGHT.warn), (2.0, LIGHT.warn)}


def test_guide_lines_lie_inside_the_axes():
    for panel in PANELS:
        figure = draw(panel, {name: [(1, 1e-5), (2, 2e-5)] for name in panel.curves})
        low, high = figure.axes[0].get_ylim()
        for guide in guides_of(panel.curves, labels=panel.curves):
            assert guide.optional or low < guide.value < high


def test_the_kl_panel_shows_the_lower_limit_only_when_kl_is_near_it():
    panel = BY_NAME["kl"]
    assert "warn < −0.1" not in texts(draw(panel, {"kl": [(1, 1e-4)]}))
    assert "warn < −0.1" in texts(draw(panel, {"kl": [(1, -0.2)]}))


def test_guides_of_several_metrics_say_whose_they_are():
    panel = BY_NAME["rejected"]
    labels = [guide.label for guide in guides_of(panel.curves, labels=panel.curves)]
    assert labels == ["ideal < 0.05, vetoed", "warn > 0.1, vetoed", "warn > 0.3, rejected"]


def test_a_panel_without_values_says_why():
    assert texts(draw(BY_NAME["mean_weight"], {})) == ["no importance weights: rollout_is is not set"]
    assert texts(draw(BY_NAME["kl"], {"kl": [(1, math.nan)], "k3_kl": []})) == ["not measured"]


def test_values_that_are_not_finite_are_left_out():
    figure = draw(BY_NAME["ppl_ratio"], {"ppl_ratio": [(1, 1.0), (2, math.nan), (3, math.inf), (4, 1.1)]})
    (line,) = lines(figure)
    assert line.get_xdata().tolist() == [1, 4]


def test_ten_thousand_steps_become_a_line_of_bins_over_their_range():
    figure = draw(REWARD, {"reward/mean": [(s, float(s % 2)) for s in range(10_000)]})
    (line,) = lines(figure)
    assert len(line.get_xdata()) == 400
    np.testing.assert_allclose(line.get_ydata(), 0.5, atol=0.05)
    assert len(figure.axes[0].collections) == 1, "the band of minimum and maximum"


def test_values_over_orders_of_magnitude_get_a_logarithmic_axis():
    assert draw(BY_NAME["mean_weight"], {"rollout_is_mean": [(1, 1.0), (2, 1e8)]}).axes[0].get_yscale() == "symlog"
    assert draw(BY_NAME["mean_weight"], {"rollout_is_mean": [(1, 1.0), (2, 3.0)]}).axes[0].get_yscale() == "linear"


def test_a_single_step_gets_whole_numbers_on_its_axis():
    axes = draw(REWARD, {"reward/mean": [(7, 1.0)]}).axes[0]
    assert axes.get_xlim() == (6, 8)


def test_the_rolling_mean_by_hand():
    np.testing.assert_allclose(rolling_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3), [1.5, 3.0, 3.0, 3.0])


def test_figures_touch_no_global_state():
    code = "import sys; from rollcorr.diagnostics.report.plots import REWARD, draw; draw(REWARD, {}); "
    code += "sys.exit('matplotlib.pyplot' in sys.modules)"
    assert run_python(code).returncode == 0
