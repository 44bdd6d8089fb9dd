"""The measured study: its arithmetic by hand, real engines on a few tokens, and pages that match the tables."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

STUDY = Path(__file__).parents[2] / "experiments" / "mismatch_in_practice"
sys.path.insert(0, str(STUDY))

import measured  # noqa: E402
import measured_numbers  # noqa: E402
import measured_page  # noqa: E402
import measured_rollouts  # noqa: E402
import measured_rows  # noqa: E402

CUT = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
BF16 = {"kind": "transformers", "dtype": "bfloat16"}


def quiet() -> Console:
    return Console(quiet=True)


@pytest.fixture(scope="module")
def cut_recording():
    return measured_rollouts.record("demo", BF16, CUT, rows=2, tokens=48, seed=3)


def shifted(log_ratio: float, *, rows: int = 8, length: int = 64):
    rollout = torch.full((rows, length), -1.0)
    return rollout + log_ratio, rollout, torch.ones_like(rollout, dtype=torch.bool)


def test_a_stream_is_cut_into_whole_windows():
    log_pi = torch.arange(14.0).reshape(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 1] = False
    cut, _, streams = measured_numbers.windows(log_pi, log_pi, mask, 3)
    assert cut.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [10.0, 11.0, 12.0]]
    assert streams.tolist() == [0, 0, 1]


def test_clamped_weights_look_healthy_and_the_rule_finds_them():
    row = measured_numbers.at_length(*shifted(-0.5), 64)  # every log weight is -32
    assert row["t_times_kl"] == pytest.approx(32.0)
    assert row["ess"] == pytest.approx(1.0)
    assert row["saturated_low"] == 1.0
    assert row["low_weight"] == 1.0
    assert row["false_positive"] == 1


def test_the_rule_leaves_equal_weights_below_the_clamp_alone():
    row = measured_numbers.at_length(*shifted(-0.001), 64)
    assert row["ess"] == pytest.approx(1.0)
    assert row["saturated_low"] == 0.0
    assert row["false_positive"] == 0
    assert row["log_second_moment"] == pytest.approx(-2 * 0.064, abs=1e-5)


def test_a_narrow_two_sided_clip_makes_all_weights_alike_and_a_wide_one_leaves_one():
    rollout = torch.full((20, 4), -2.0)
    train = rollout - 1.0
    train[0] = rollout[0] + 1.0  # log weights: one of 4, nineteen of -4
    mask = torch.ones_like(rollout, dtype=torch.bool)
    narrow = measured_numbers.clipped(train, rollout, mask, 4, 1.5)
    wide = measured_numbers.clipped(train, rollout, mask, 4, 1e6)
    assert (narrow["at_lower"], narrow["at_upper"]) == (0.95, 0.05)
    assert narrow["ess"] > 0.85
    assert wide["at_lower"] == 0.0
    assert wide["ess"] == pytest.approx(0.05, rel=0.02)
    assert wide["share_of_largest"] > 0.99


def test_the_fit_finds_the_slope_of_the_law():
    chi2 = 0.002
    rows = [
        {"T": T, "chi2_token": chi2, "log_second_moment": T * math.log1p(chi2), "log_second_moment_error": 0.01}
        for T in (16, 64, 256, 1024)
    ]
    slope, error, expected, first, last = measured_rows.growth_fit(rows)
    assert slope == pytest.approx(math.log1p(chi2))
    assert expected == pytest.approx(math.log1p(chi2))
    assert error > 0
    assert (first, last) == (16, 256)  # at 1,024 the exponent is above one nat


def test_the_length_where_half_are_clamped_is_interpolated():
    rows = [{"T": T, "saturated_low": low, "saturated_high": 0.0} for T, low in ((16, 0.0), (64, 0.25), (256, 0.75))]
    assert measured_rows.half_clamped(rows) == pytest.approx(128.0)
    assert measured_rows.half_clamped(rows[:2]) is None


def test_replayed_kept_sets_repair_cut_rollouts_of_a_real_engine(cut_recording):
    model = measured_rollouts.policy_at("demo").model
    scores = measured_rollouts.train_log_probs(model, cut_recording)
    mask = cut_recording.tokens.response_mask
    kl = {
        mode: float((log_mu - log_pi)[mask].mean())
        for mode, log_pi, log_mu in measured_rollouts.sides(cut_recording, scores)
    }
    assert kl["raw"] < -0.01  # no KL: the reported log-probs belong to other samples
    assert kl["processed"] > 0.02
    assert abs(kl["replayed"]) < 0.005


def test_the_same_seed_makes_the_same_recording():
    first, again, other = (
        measured_rollouts.record("demo", BF16, CUT, rows=2, tokens=8, seed=seed).digest for seed in (3, 3, 4)
    )
    assert first == again != other


def test_head_and_tail_add_up_to_the_kl_and_equal_policies_have_none(cut_recording):
    model = measured_rollouts.policy_at("demo").model
    crude = measured_rollouts.rounded(model, 4)
    rows = measured_numbers.against_temperature(model, crude, cut_recording, (0.4, 1.0), 16)
    for row in rows:
        assert row["kl_head"] + row["kl_tail"] == pytest.approx(row["kl"])
    assert rows[0]["kl_head"] > rows[1]["kl_head"] > 1e-4
    assert measured_numbers.against_temperature(model, model, cut_recording, (1.0,), 16)[0]["kl"] < 1e-12


def test_rounding_leaves_few_levels_per_row():
    model = measured_rollouts.policy_at("demo").model
    row = dict(measured_rollouts.rounded(model, 3).named_parameters())["model.layers.0.mlp.up_proj.weight"][0]
    assert len(row.unique()) <= 7


def test_an_engine_that_is_not_there_is_skipped_with_its_reason():
    reason = measured_rollouts.unavailable({"kind": "vllm", "python": "nowhere/python"})
    assert reason is not None
    assert "vLLM is not installed" in reason
    assert "make test-vllm" in reason


def small_settings():
    settings = measured.settings_of(quick=True)
    return settings | {
        "rows": 2,
        "tokens": 32,
        "lengths": [8, 32],
        "stale": [0],
        "temperatures": [0.4, 1.0, 1.5, 2.0, 10.0],
        "engines": {"bf16": BF16},
        "samplings": {"1.0": {"temperature": 1.0}},
    }


def test_a_second_run_measures_nothing_again_and_the_page_is_whole(tmp_path):
    settings = small_settings()
    first = measured.run_study(settings, tmp_path, tmp_path, quiet(), command="test")
    second = measured.run_study(settings, tmp_path, tmp_path, quiet(), command="test")
    assert (first.done, first.reused, second.reused) == (3, 0, 3)
    assert first.rows.keys() == second.rows.keys() == {"grid", "temperature"}

    text = measured_page.page_text(tmp_path)
    assert "<<" not in text
    assert "3 of 3 cells" in text


def test_ctrl_c_keeps_what_is_done(tmp_path, monkeypatch):
    settings = small_settings()
    run_cell = measured.run_cell

    def interrupted(cell, runs):
        if cell.study == "temperature":
            raise KeyboardInterrupt
        return run_cell(cell, runs)

    monkeypatch.setattr(measured, "run_cell", interrupted)
    assert measured.run_study(settings, tmp_path, tmp_path, quiet(), command="test").interrupted
    monkeypatch.undo()
    assert measured.run_study(settings, tmp_path, tmp_path, quiet(), command="test").reused == 1


def test_the_committed_page_says_what_the_committed_tables_hold():
    assert (STUDY / "measured.md").read_text(encoding="utf-8") == measured_page.page_text(STUDY / "measured")
