"""`rollcorr explain METRIC` and `rollcorr presets`."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.conversion import resolve
from rollcorr.config.presets import PRESETS
from rollcorr.core.metric_registry import METRICS
from rollcorr.core.metric_tables import Metric
from rollcorr.diagnostics.metric_explanation import SCALES, SYNONYMS, explain_metric


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", ["kl", "rollout_corr/kl", "actor/rollout_corr/kl"])
def test_a_metric_is_explained_by_its_name_in_a_log(name):
    result = invoke("explain", name)
    assert result.exit_code == 0
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    lines = {heading: text.strip() for heading, text in lines.items()}
    assert lines["metric"] == "rollout_corr/kl"
    assert lines["unit"] == "nats"
    assert lines["formula"] == "tm(−d), estimates KL(μ‖π)"
    assert "d: log π − log μ of a token, in nats" in lines["where"]
    assert "tm: mean over V" in lines["where"]
    assert lines["a finding"].endswith("above 0.1")
    assert "look for a cause before correcting" in lines["fix"]


def test_how_large_is_large_is_said_with_its_source():
    lines = dict(line.split("  ", 1) for line in invoke("explain", "k3_kl").stdout.splitlines())
    scale = lines["scale"]
    assert "below 1e-4 negligible, below 0.01 small" in scale
    assert "bfloat16 6e-4" in scale
    for page in ("choosing", "remove_the_mismatch_first"):
        assert f"docs/guides/{page}.md" in scale
    assert set(SCALES) <= set(METRICS)


def test_the_orders_of_magnitude_are_those_of_the_pages():
    docs = Path(__file__).parents[2] / "docs" / "guides"
    measured = (docs / "remove_the_mismatch_first.md").read_text(encoding="utf-8")
    for row in (
        "`TransformersEngine` | float32 | 1.8e-12 | 1.9e-6",
        "`TransformersEngine` | float16 | 9.5e-6 | 0.0043",
        "`TransformersEngine` | bfloat16 | 6.2e-4 | 0.036",
        "`CTranslate2Engine` | int8 | 2.1e-3 | 0.065",
    ):
        assert row in measured


def test_every_metric_is_explained_and_listed():
    assert invoke("explain").stdout.split() == list(METRICS)
    for name, row in METRICS.items():
        explanation = explain_metric(name)
        assert isinstance(row, Metric)
        assert explanation["formula"] == row.formula
        assert ("fix" in explanation) == (row.healthy is not None), name


def test_metrics_of_criteria_and_of_denoising_are_explained_too():
    found = json.loads(invoke("explain", "rollout_rs_seq_mean_k1_seq_max", "kl_joint", "--json").stdout)
    assert found[0]["metric"] == "rollout_corr/rollout_rs_seq_mean_k1_seq_max"
    assert "seq_mean_k1: the statistic of that criterion" in found[0]["where"]
    assert "J: the joint log-ratio of a denoising step" in found[1]["where"]


def test_an_unknown_metric_is_answered_with_the_nearest_and_exit_code_2():
    result = invoke("explain", "rollout_is_maen")
    assert result.exit_code == 2
    assert "Did you mean 'rollout_is_mean'?" in result.stderr


@pytest.mark.parametrize(
    ("synonym", "metric"),
    [
        ("ess", "rollout_is_eff_sample_size"),
        ("ESS", "rollout_is_eff_sample_size"),
        ("mean_ratio", "rollout_is_raw_mean"),
        ("clip_frac", "rollout_is_ratio_fraction_high"),
        ("actor/pg_clipfrac", "rollout_is_ratio_fraction_high"),
        ("approx-kl", "k3_kl"),
    ],
)
def test_a_synonym_is_explained_as_its_metric(synonym, metric):
    result = invoke("explain", synonym)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["metric", f"rollout_corr/{metric}"]


def test_synonyms_stand_for_one_known_metric_each():
    every = [synonym for synonyms in SYNONYMS.values() for synonym in synonyms]
    assert len(every) == len(set(every))
    assert set(SYNONYMS) <= set(METRICS)
    assert not set(every) & set(METRICS)


def test_a_misspelt_synonym_is_suggested():
    assert "Did you mean 'mean_ratio'?" in invoke("explain", "mean_ratoi").stderr


def test_presets_are_listed_with_what_they_do():
    result = invoke("presets")
    assert result.exit_code == 0
    assert result.stdout.startswith("Start with `measure`: it applies no weights")
    for name, preset in PRESETS.items():
        assert any(line.startswith(f"{name} ") and preset.description in line for line in result.stdout.splitlines())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_printed_as_yaml_that_means_the_same(name):
    result = invoke("presets", name)
    assert result.exit_code == 0
    assert PRESETS[name].description in result.stdout
    assert resolve(yaml.safe_load(result.stdout)) == RolloutCorrectionConfig.preset(name)


def test_an_unknown_preset_is_answered_with_the_nearest_and_exit_code_2():
    result = invoke("presets", "decoupled_tokn_is")
    assert result.exit_code == 2
    assert "Did you mean 'decoupled_token_is'" in result.stderr
