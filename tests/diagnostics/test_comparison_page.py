"""The page of a comparison: every run, what differs between them, their curves, and what policies answered."""

import json
import math
import re

import pytest
import yaml

from rollcorr.diagnostics.report import (
    Panel,
    ShownResponse,
    ShownSample,
    comparison_report,
    config_differences,
    write_comparison,
)
from rollcorr.diagnostics.report.plots import COMPARED, DARK, LIGHT, draw_runs
from rollcorr.run_directory import read_run

PANELS = {panel.name: panel for panel in COMPARED}


def make_run(path, *, k3, reward, **options):
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"run_dir": str(path), "rollout": options}), encoding="utf-8")
    with (path / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, 13):
            mismatch = {"token_count": 4000.0, "kl": k3 * step, "k3_kl": k3 * step, "rollout_rs_masked_fraction": 0.0}
            metrics = {f"rollout_corr/{name}": value for name, value in mismatch.items()}
            file.write(json.dumps({"step": step, "reward/mean": reward, **metrics}) + "\n")
    return read_run(path)


@pytest.fixture
def runs(tmp_path):
    return [
        make_run(tmp_path / "fresh", k3=1e-5, reward=0.9, refresh_every=1),
        make_run(tmp_path / "old <b>", k3=0.05, reward=0.1, refresh_every=8),
    ]


def words(page):
    text = re.sub(r"data:image[^\"]*", "", page.read_text(encoding="utf-8"))
    return " ".join(re.sub(r"<[^>]+>", " ", text.partition("</style>")[2]).split())


def test_the_page_has_each_run_its_verdict_its_finding_and_what_differs(runs, blank_figures, tmp_path):
    page = write_comparison(comparison_report(runs), tmp_path / "page")
    text = words(page)
    assert page.name == "comparison.html"
    assert "old &lt;b&gt;" in text
    assert "<b>" not in page.read_text(encoding="utf-8")
    assert "rollout.refresh_every 1 8" in text
    assert "run_dir" not in text
    assert "KL is too far from 0" in text
    assert "reward/mean 0.9 0.1" in text.replace("0.9000", "0.9")


def test_figures_are_those_of_metrics_that_are_not_always_0(runs, blank_figures, tmp_path):
    write_comparison(comparison_report(runs), tmp_path / "page")
    assert {path.stem for path in (tmp_path / "page").glob("*.png")} == {"reward", "k3"}


def test_the_page_shows_sentences_roles_curves_and_responses_that_it_is_given(runs, blank_figures, tmp_path):
    panel = Panel(name="accuracy", title="Accuracy of both", curves={"accuracy": ""}, absent="")
    answer = ShownResponse(title="after", text="2+2=5", right=False, wrong_from=4)
    data = comparison_report(
        runs,
        title="Two runs",
        conclusions=("The first is better.",),
        roles=("with new weights", "with old ones"),
        extra=((panel, {"fresh": [(0, 0.5)], "old <b>": [(0, 0.25), (1, math.nan)]}),),
        samples=(ShownSample(prompt="2+2=", answer="4", responses=(answer,)),),
    )
    page = write_comparison(data, tmp_path / "page")
    text = words(page)
    for shown in ("Two runs", "The first is better.", "with old ones", "Accuracy of both", "after : wrong"):
        assert shown in text.replace("after:", "after :") + page.read_text(encoding="utf-8")
    assert "2+2=<mark>5</mark>" in page.read_text(encoding="utf-8")
    assert "fresh 0.5; old &lt;b&gt; 0.25" in page.read_text(encoding="utf-8")


def test_a_role_for_each_run_or_for_none(runs):
    with pytest.raises(ValueError, match="a role for each of the 2 runs"):
        comparison_report(runs, roles=("one",))


def test_options_differ_by_their_dotted_names():
    texts = ["seed: 0\nrollout: {a: 1, b: {c: x}}", "seed: 0\nrollout: {a: 2, b: {c: x}}", ""]
    assert config_differences(texts[:2]) == {"rollout.a": ("1", "2")}
    assert config_differences(texts)["rollout.b.c"] == ("x", "x", "–")
    assert config_differences(["run_dir: a", "run_dir: b"]) == {}


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_a_run_keeps_its_color_where_another_lacks_the_metric(theme):
    both = draw_runs(PANELS["k3"], {"a": [(1, 1e-5), (2, 1e-5)], "b": [(1, 0.1), (2, 0.2)]}, theme)
    alone = draw_runs(PANELS["k3"], {"a": [], "b": [(1, 0.1), (2, 0.2)]}, theme)
    (of_b,) = (line for line in both.axes[0].get_lines() if line.get_label() == "b")
    (still,) = (line for line in alone.axes[0].get_lines() if line.get_label() == "b")
    assert of_b.get_color() == still.get_color() == theme.curves[1]
    assert both.axes[0].get_yscale() == "log"
    low, high = both.axes[0].get_ylim()
    assert low < 1e-5 < 0.2 < high


def test_more_runs_than_colors_differ_by_their_dashes():
    runs = {str(number): [(1, 0.1), (2, 0.2)] for number in range(len(LIGHT.curves) + 1)}
    lines = [line for line in draw_runs(PANELS["reward"], runs).axes[0].get_lines() if line.get_label() in runs]
    looks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(looks) == len(runs)
