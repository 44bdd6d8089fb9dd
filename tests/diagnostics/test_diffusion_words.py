"""A report on denoising steps speaks of pictures and steps: terminal, page and JSON use no term of language models."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from test_diffusion_rules import write_log

from rollcorr import check_logs, health
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.diagnostics import null_of_logs
from rollcorr.diagnostics.health.health_check import judge
from rollcorr.diagnostics.numbers import STEP_HEADLINES, shown_metrics
from rollcorr.diagnostics.report import check_report, run_report, write_report
from rollcorr.diagnostics.report import html_page as report
from rollcorr.diagnostics.report.console import show_health, to_json
from rollcorr.diagnostics.report.html_page import caption
from rollcorr.diagnostics.report.plots import STEP_PANELS, over_timesteps, panels_of
from rollcorr.run_directory.stored_run import read_run

FORBIDDEN = re.compile(
    r"token|response|perplexity|\bppl|t\s?×\s?kl|temperature|top-?p\b|top-?k\b|vocabulary|\bsequence|\bhead\b",
    re.IGNORECASE,
)
BROKEN = {
    "token_count": 400.0,
    "sequence_count": 200.0,
    "kl": 0.3,
    "k3_kl": 0.3,
    "chi2_token": 9.0,
    "chi2_seq": 9.0,
    "ppl_ratio": 3.0,
    "log_ppl_abs_diff": 3.0,
    "t_times_kl": 40.0,
    "max_viable_length": 3.0,
    "kl_joint": 12.0,
    "k3_kl_joint": 11.0,
    "exact_kl_mean": 11.0,
    "exact_kl_max": 30.0,
    "rejected_ratio": 0.6,
    "rollout_rs_masked_fraction": 0.6,
    "rollout_rs_seq_masked_fraction": 0.6,
    "rollout_rs_step_kl_masked_fraction": 0.6,
    "rollout_is_mean": 3.0,
    "rollout_is_std": 4.0,
    "rollout_is_max": 2.0,
    "rollout_is_eff_sample_size": 0.1,
    "rollout_is_veto_fraction": 0.5,
    "rollout_is_catastrophic_token_fraction": 0.5,
    "rollout_is_seq_max_deviation": 4.0,
    "rollout_is_low_weight_fraction": 0.9,
    "saturated_low_fraction": 0.9,
    "saturated_high_fraction": 0.05,
    "capped_fraction": 0.1,
    "zero_probability_count": 3.0,
    "nonfinite_count": 2.0,
    "actor/zeroed_fraction_negative": 0.975,
    "actor/zeroed_fraction_positive": 0.02,
    "actor/skipped_steps": 3.0,
    "reward/mean": 0.4,
    "log/contradicted_zero_count": 3.0,
    "log/token_id_share": 0.4,
}
SEQUENCE = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1")


class Words(HTMLParser):
    """What a reader of a page sees, without the configuration: its keys are the options' own names."""

    def __init__(self, html):
        super().__init__()
        self.text, self.hidden = "", 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in ("style", "pre")
        self.text += "".join(f" {value}" for name, value in attrs if name in ("alt", "title"))

    def handle_endtag(self, tag):
        self.hidden -= tag in ("style", "pre")

    def handle_data(self, data):
        self.text += "" if self.hidden else f" {data}"


def on_terminal(shown, **more):
    console = Console(file=io.StringIO(), width=4000)
    show_health(console, shown, **more)
    return console.file.getvalue()


def in_json(shown):
    """Every text of the JSON, and the names of the metrics; the fields of a finding are those of every finding."""
    document = json.loads(to_json(shown))
    texts = [text for finding in document["findings"] for text in finding.values() if isinstance(text, str)]
    evidence = [name for finding in document["findings"] for name in finding["evidence"]]
    return [*texts, *evidence, *document["metrics"], *document["not_judged"], document["expected_from"]]


def no_word_of_tokens(text):
    assert FORBIDDEN.findall(text) == []


def write_run(path, metrics, *, steps=24, config="recipe: flow_grpo\nrollout_correction: {}\n"):
    path.mkdir()
    breakdown = {f"rollout_corr/log_prob_abs_diff/t_{t:g}": 1e-4 for t in (1000.0, 750.0)}
    lines = []
    for step in range(1, steps + 1):
        grown = {name: value * (9 if step > 12 else 1) for name, value in breakdown.items()}
        lines.append(json.dumps({"step": step, **metrics, **grown}))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (path / "config.yaml").write_text(config, encoding="utf-8")
    return path


@pytest.fixture
def _no_figures(monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr(report, "to_png", lambda _: b"PNG")


def named(metrics, prefix="rollout_corr/"):
    return {name if "/" in name else prefix + name: value for name, value in metrics.items()}


@pytest.mark.usefixtures("_no_figures")
def test_a_broken_run_is_reported_in_words_of_pictures(tmp_path):
    data = run_report(read_run(write_run(tmp_path / "run", named(BROKEN))))
    assert {"step_divergence", "one_sided_gradients", "growth_by_timestep", "skipped_updates"} <= {
        finding.code for finding in data.health.findings
    }
    page = Words(write_report(data, tmp_path / "out").read_text(encoding="utf-8")).text
    for text in (page, on_terminal(data.health, subject=data.title, remarks=data.remarks), *in_json(data.health)):
        no_word_of_tokens(text)
    for label in STEP_HEADLINES.values():
        assert label in page


@pytest.mark.usefixtures("_no_figures")
@pytest.mark.parametrize("kl", [0.02, 11.0])
def test_a_checked_log_is_reported_in_words_of_pictures(tmp_path, kl):
    result = check_logs([write_log(tmp_path / "log.parquet", kl=kl)])
    page = Words(write_report(check_report(result), tmp_path / "out").read_text(encoding="utf-8")).text
    shown = on_terminal(result.health, subject="", remarks=result.remarks)
    for text in (page, shown, *in_json(result.health), *result.remarks):
        no_word_of_tokens(text)
    assert "200 pictures" in page
    assert json.loads(to_json(result.health))["metrics"]["step_count"] == 400


@pytest.mark.parametrize("metrics", [{}, {"token_count": 0.0}, {"k3_kl": 1e-4, "sequence_count": 3.0}, BROKEN])
@pytest.mark.parametrize("config", [None, SEQUENCE])
def test_what_is_not_judged_is_said_in_words_of_pictures(metrics, config):
    shown = health(metrics, config, diffusion=True)
    assert shown.verdict != "healthy"
    for text in (on_terminal(shown, subject=""), *in_json(shown)):
        no_word_of_tokens(text)


def test_ranges_of_language_models_are_silent_on_denoising_steps():
    found = {finding.metric for finding in health(BROKEN, SEQUENCE, diffusion=True).findings}
    assert {"exact_kl_mean", "nonfinite_count", "rollout_is_eff_sample_size", "rollout_is_mean"} <= found
    assert not found & {"kl", "chi2_token", "t_times_kl", "capped_fraction", "rollout_is_veto_fraction"}
    assert "kl" in {finding.metric for finding in health(BROKEN, SEQUENCE).findings}


def test_a_run_without_a_null_is_not_judged():
    run = [{"step": s, "token_count": 96.0, "sequence_count": 48.0, "kl": 1e-6, "k3_kl": 1e-8} for s in range(1, 21)]
    for prefix in ("rollout_corr/", "actor/rollout_corr/"):
        steps = [{**named(step, prefix), "step": step["step"], f"{prefix}exact_kl_mean": 0.02} for step in run]
        shown = health(steps, diffusion=True)
        assert shown.verdict == "not judged"
        assert "unchanged since steps 1 to 5" in shown.not_judged[0]
    assert health(run[:3], diffusion=True).verdict == "not judged"
    without = health(run, diffusion=True)
    assert without.verdict == "not judged"
    assert "unchanged since steps 1 to 5" in without.not_judged[0]


def test_j_stands_beside_what_the_exact_kl_implies():
    shown = health({"token_count": 96.0, "kl": 1e-6, "kl_joint": 0.03, "exact_kl_mean": 0.02}, diffusion=True)
    assert shown.expected == {"k3_kl_joint": 0.02}

    # J of a step has variance 2 KL: over 96 steps the mean is off by sqrt(0.04 / 96) = 0.0204.
    assert shown.expected_ranges["kl_joint"] == pytest.approx((0.02 - 1.96 * 0.02041, 0.02 + 1.96 * 0.02041), abs=1e-4)
    assert "k3_kl_joint" not in health({"kl": 1e-6, "exact_kl_mean": 2.0}, diffusion=True).expected
    assert health({"kl": 1e-6}, diffusion=True).expected == {}


def test_a_log_without_the_exact_kl_is_not_judged(tmp_path):
    null = null_of_logs([write_log(tmp_path / "null.parquet", kl=0.01, seed=1)])
    for name, with_kl, verdict in (("a", True, "healthy"), ("b", False, "not judged")):
        path = write_log(tmp_path / f"{name}.parquet", kl=0.01, with_kl=with_kl)
        assert check_logs([path], null=null).health.verdict == verdict


def test_the_counts_of_denoising_steps_are_named_for_them():
    values = {"token_count": 4.0, "sequence_count": 2.0, "ppl_ratio": 1.0, "exact_kl_mean": 0.1, "perf/x_seconds": 1.0}
    wanted = {"step_count": 4.0, "picture_count": 2.0, "exact_kl_mean": 0.1, "perf/x_seconds": 1.0}
    assert shown_metrics(values, diffusion=True) == wanted
    assert shown_metrics(values, diffusion=False) == values


def test_the_breakdown_is_over_the_timesteps():
    series = {f"log_prob_abs_diff/t_{t}": [(s, t * 1e-6 * (s > 20)) for s in range(1, 41)] for t in (1000, 750)}
    found = over_timesteps(series)
    assert found["by_timestep/last"] == [(750.0, pytest.approx(7.5e-4)), (1000.0, pytest.approx(1e-3))]
    assert found["by_timestep/first"] == [(750.0, 0.0), (1000.0, 0.0)]
    (panel,) = (panel for panel in STEP_PANELS if panel.name == "by_timestep")
    assert caption(panel, found) == "0.001 at 1000, 7.50e−04 at 750"
    assert over_timesteps({"kl": [(1, 0.1)]}) == {}


def test_the_accuracies_have_a_panel_where_they_were_measured():
    names = [panel.name for panel in panels_of({"picture/color_accuracy": [(1, 0.5)]}, diffusion=True)]
    assert names == [*(panel.name for panel in STEP_PANELS), "accuracy", "reward"]
    assert panels_of({}, diffusion=True)[-2:] == (STEP_PANELS[-1], panels_of({}, diffusion=False)[-1])


def test_an_engines_stand_in_for_minus_infinity_is_missing(tmp_path):
    from rollcorr import RolloutBatch, RolloutLogWriter

    log_prob = torch.full((32, 2), 0.3)
    batch = RolloutBatch.from_padded(
        torch.ones(32, 2, dtype=torch.bool),
        rollout_log_prob=torch.where(torch.arange(64).view(32, 2) == 5, -9999.0, log_prob),
        old_log_prob=log_prob + 1e-6,
        dimensions=768,
        exact_kl=torch.full((32, 2), 0.01),
    )
    with RolloutLogWriter(tmp_path / "log.parquet") as writer:
        writer.write(batch)
    result = check_logs([tmp_path / "log.parquet"])
    assert result.metrics["rollout_corr/nonfinite_count"] == 1
    assert abs(result.metrics["rollout_corr/kl_joint"]) < 0.01
    no_word_of_tokens(on_terminal(result.health, subject="", remarks=result.remarks))


def test_the_judge_of_a_running_run_asks_the_same_rules():
    from rollcorr.diagnostics.health.evidence import Evidence

    found = judge(Evidence(current={"token_count": 4.0, "kl": 0.5}, diffusion=True), broken=["kl"])
    assert found == ()
