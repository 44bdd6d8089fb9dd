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
from rollcorr.run_directory import read_run


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
    text = page.read_text(encoding="utf-8").partition("<body>")[2].partition("<script")[0]
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def test_the_page_has_each_run_its_verdict_its_finding_and_what_differs(runs, tmp_path):
    page = write_comparison(comparison_report(runs), tmp_path / "page")
    text = words(page)
    assert page.name == "comparison.html"
    assert "old &lt;b&gt;" in text
    assert "<b>" not in page.read_text(encoding="utf-8").replace("<b>rollcorr</b>", "").replace("<figcaption><b>", "")
    assert "rollout.refresh_every 1 8" in text
    assert "run_dir" not in text
    assert "KL is too far from 0" in text
    assert "reward/mean 0.9 0.1" in text.replace("0.9000", "0.9")


def test_charts_leave_out_metrics_that_are_0(runs, tmp_path):
    page = write_comparison(comparison_report(runs), tmp_path / "page")
    assert re.findall(r'<figure id="([^"]+)"', page.read_text(encoding="utf-8")) == ["reward", "k3"]
    assert [path.name for path in page.parent.iterdir()] == ["comparison.html"]


def test_the_page_shows_sentences_roles_curves_and_responses_that_it_is_given(runs, tmp_path):
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


def test_a_run_keeps_its_color_where_another_lacks_the_metric(tmp_path):
    """A curve takes its color from its place, so a run without the metric keeps an empty one."""
    runs = [make_run(tmp_path / "a", k3=0.0, reward=0.0), make_run(tmp_path / "b", k3=0.1, reward=0.5)]
    page = write_comparison(comparison_report(runs), tmp_path / "page").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["runs"] == ["a", "b"]
    assert all([curve["label"] for curve in chart["curves"]] == ["a", "b"] for chart in data["charts"])


def test_a_corrected_run_says_why_it_is_unhealthy(runs, tmp_path):
    """The reason is in the cell of the verdict."""
    mended = tmp_path / "mended"
    make_run(mended, k3=0.05, reward=0.9)
    (mended / "config.yaml").write_text("rollout_correction: {rollout_is: sequence}\n", encoding="utf-8")
    page = write_comparison(comparison_report([*runs, read_run(mended)]), tmp_path / "page").read_text(encoding="utf-8")
    cells = re.findall(r"<td>(.*?)</td>", re.search(r"<tr><td>verdict</td>(.*?)</tr>", page)[1])
    assert [cell.count("which makes up for the mismatch but does not remove it") for cell in cells] == [0, 0, 1]
    assert all("unhealthy" in cell for cell in cells[1:])
