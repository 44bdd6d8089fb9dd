"""`rollcorr demo`: a healthy run, a fault found and fixed, and a correction that saves a run."""

from statistics import fmean

import pytest
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.demo import demo_screen
from rollcorr.demo.stories import fault_story, healthy_story, stale_story
from rollcorr.diagnostics.numbers import sparkline


def test_the_healthy_run_has_no_warning():
    story = healthy_story()
    assert not story.provenance.warnings
    assert story.metrics["rollout_corr/rollout_is_eff_sample_size"] > 0.999


def test_the_fault_is_named_and_gone_after_the_fix():
    broken, fixed = fault_story()
    assert "tempered" in broken.provenance.codes
    assert broken.provenance.temperature_ratio == pytest.approx(0.7, rel=0.05)
    assert not fixed.provenance.warnings
    assert fixed.metrics["rollout_corr/k3_kl"] < 0.01 * broken.metrics["rollout_corr/k3_kl"]


def test_a_stale_sampler_loses_reward_and_sequence_weights_keep_it():
    curves = stale_story(seeds=(0,))
    none, token, sequence = (fmean(curve[-20:]) for curve in curves.values())
    assert none < sequence - 0.1
    assert token < sequence - 0.1
    assert sequence > curves["sequence weights"][0]


def test_the_command_prints_all_three_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr(demo_screen, "SEEDS", (0,))
    monkeypatch.setattr(demo_screen, "stale_story", lambda on_step: stale_story(on_step, seeds=(0,)))
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "█" in result.stdout
    assert not [line for line in result.stdout.splitlines() if "▁" in line and "…" in line], "a curve was cut"
    for words in ("rounds to bfloat16", "tempered", "A stale sampler", "sequence weights", "rollcorr.Monitor"):
        assert words in result.stdout


def test_a_curve_is_drawn_between_its_limits():
    assert sparkline([0, 1], low=0, high=1) == "▁█"
    assert len(sparkline(list(range(60)), low=0, high=59)) == 30
    assert sparkline([1, 1], low=1, high=1) == "▁▁"
