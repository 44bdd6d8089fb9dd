"""Advice on logs: repair before correcting, a preset by the rules of the page choosing.md, YAML that can be pasted."""

import json
import re
from pathlib import Path

import pytest
import torch

from rollcorr.config import RolloutCorrectionConfig, SamplingSpec
from rollcorr.config.conversion import resolve
from rollcorr.config.documents import load_yaml
from rollcorr.diagnostics import advise, check_logs, null_of_logs
from rollcorr.diagnostics.advice import SITUATIONS
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter
from tests.diagnostics.null_logs import rollouts, write_rows

CHOOSING = Path(__file__).parents[2] / "docs" / "guides" / "choosing.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("advice")


@pytest.fixture(scope="module")
def null(folder):
    return null_of_logs([write_rows(folder / "null.parquet", rollouts(rows=260, length=40, seed=100))])


def noisy_log(path, sigma, *, rows=300, length=40, seed=0, judged=True):
    """A log of pure noise without ids: E_μ[exp d] = 1."""
    generator = torch.Generator().manual_seed(seed)
    d = sigma * torch.randn(rows, length, generator=generator) - sigma**2 / 2
    rollout = torch.full((rows, length), -4.0)
    with RolloutLogWriter(path) as log:
        log.write(
            RolloutBatch.from_padded(
                torch.ones(rows, length),
                rollout_log_prob=rollout,
                old_log_prob=rollout + d,
                sampling=SamplingSpec(logprobs="processed"),
            )
        )
    return check_logs([path], null=null_of_logs([path], engine_precision="int8") if judged else None)


def test_a_fault_is_repaired_and_not_corrected(folder, null):
    result = check_logs([write_rows(folder / "stale.parquet", rollouts(rows=96, weights=0.1, seed=2))], null=null)
    advice = advise(result)
    assert (advice.decision, advice.preset, advice.yaml, advice.exit_code) == ("repair", None, "", 1)
    assert advice.repairs[0].code == "weights_differ"
    assert advice.reasons[0].startswith("do not correct; repair this first: the weights of the sampler")
    assert advice.repairs[0].fix


def test_a_wrong_temperature_is_repaired_and_not_corrected(folder, null):
    rows = rollouts(rows=96, temperature=0.7, seed=3)
    advice = advise(check_logs([write_rows(folder / "tempered.parquet", rows)], null=null))
    assert advice.decision == "repair"
    assert advice.repairs[0].code == "tempered"
    assert "temperature" in advice.repairs[0].fix


def test_a_healthy_log_needs_the_safe_default(folder, null):
    result = check_logs([write_rows(folder / "healthy.parquet", rollouts(rows=96, length=40, seed=4))], null=null)
    advice = advise(result)
    assert (advice.decision, advice.preset, advice.exit_code) == ("correct", "decoupled_token_is", 0)
    assert advice.caveats == ()


@pytest.mark.parametrize(
    ("sigma", "situation", "preset"),
    [
        (0.002, "negligible", "measure"),
        (0.1, "small", "decoupled_token_is"),
        (0.35, "moderate", "decoupled_k3_rs_token_tis"),
        (0.9, "severe", "decoupled_k3_rs"),
    ],
)
def test_the_size_of_the_mismatch_decides(tmp_path, monkeypatch, sigma, situation, preset):
    # The pairs call so large a noise unexplained or a cause; the rules of size are tested by themselves.
    monkeypatch.setattr("rollcorr.diagnostics.advice.advisor._faults", lambda result: ())
    advice = advise(noisy_log(tmp_path / "log.parquet", sigma))
    assert (advice.situation, advice.preset) == (situation, preset)


def test_a_severe_mismatch_of_short_responses_keeps_sequence_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("rollcorr.diagnostics.advice.advisor._faults", lambda result: ())
    advice = advise(noisy_log(tmp_path / "log.parquet", 0.9, length=1, rows=2000))
    assert (advice.situation, advice.preset) == ("severe", "decoupled_seq_is_rs")


def test_a_calibrated_threshold_spares_the_null_and_the_known_drift(tmp_path, monkeypatch):
    """The threshold is the null's, or three times the log's k3 if that is more."""
    monkeypatch.setattr("rollcorr.diagnostics.advice.advisor._faults", lambda result: ())
    result = noisy_log(tmp_path / "log.parquet", 0.35)
    k3 = result.profile.k3
    rough = advise(result).thresholds["rollout_rs_threshold"]
    assert rough == pytest.approx(3 * k3, rel=0.01)

    # A null ten times as noisy allows more, and the text names it.
    loud = null_of_logs([tmp_path / "log.parquet"], engine_precision="int8")
    louder = advise(result, null=loud)
    assert louder.thresholds["rollout_rs_threshold"] == pytest.approx(3 * k3, rel=0.01)
    assert any("would reject the known drift as well" in reason for reason in louder.reasons)
    noisy_log(tmp_path / "loud.parquet", 0.9, seed=5)
    loudest = advise(result, null=null_of_logs([tmp_path / "loud.parquet"], engine_precision="int8"))
    assert loudest.thresholds["rollout_rs_threshold"] > 4 * k3
    assert any("rejects 5% of the sequences" in reason for reason in loudest.reasons)


def test_the_yaml_is_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr("rollcorr.diagnostics.advice.advisor._faults", lambda result: ())
    advice = advise(noisy_log(tmp_path / "log.parquet", 0.35))
    assert resolve(load_yaml(advice.yaml)) == advice.config
    assert advice.config.rollout_rs == "seq_mean_k3"
    document = json.loads(advice.to_json())
    assert (document["preset"], document["yaml"]) == (advice.preset, advice.yaml)


def test_too_little_data_is_not_advised_on(tmp_path):
    advice = advise(noisy_log(tmp_path / "log.parquet", 0.1, rows=8))
    assert (advice.decision, advice.exit_code) == ("not judged", 3)
    assert advice.reasons == ("too little data: 8 sequences, and 16 are needed",)


def test_a_log_that_was_not_judged_is_not_corrected(tmp_path):
    """Also one of other weights whose token ids tell nothing."""
    advice = advise(noisy_log(tmp_path / "log.parquet", 0.01, judged=False))
    assert (advice.decision, advice.preset, advice.exit_code) == ("not judged", None, 3)
    assert "weights not judged" in advice.reasons[0]
    rows = [{**row, "response_ids": None} for row in rollouts(rows=96, weights=0.02, seed=6)]
    other_weights = check_logs([write_rows(tmp_path / "weights.parquet", rows)])
    assert not other_weights.causes
    assert advise(other_weights).preset is None


def test_the_rules_are_those_of_the_page():
    """The table "By severity" of docs/guides/choosing.md names the limits and the presets of the rules."""
    section = CHOOSING.read_text(encoding="utf-8").partition("## By severity")[2].partition("## By response")[0]
    rows = {line.split("|")[1].split(":")[0].strip(): line for line in section.splitlines() if line.startswith("| ")}
    for one in SITUATIONS:
        line = rows[one.name]
        assert {one.short, one.long} <= set(re.findall(r"`(\w+)`", line)), one.name
        for limit in (one.k3_below, one.kl_below, one.chi2_below):
            assert limit == float("inf") or f"below {limit:g}".replace("0.0001", "1e-4") in line, one.name
    assert "while T × KL is below about 0.5" in CHOOSING.read_text(encoding="utf-8").replace("\n", " ")
    for one in SITUATIONS:
        for preset in (one.short, one.long):
            assert isinstance(RolloutCorrectionConfig.preset(preset), RolloutCorrectionConfig)
