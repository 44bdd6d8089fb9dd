"""The page: self-contained, complete, escaped, and right with gaps."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from rollcorr.core.metric_registry import PREFIX
from rollcorr.diagnostics.report.curves import PANELS, REWARD, series_by_name
from rollcorr.diagnostics.report.html_page import reward_gain, write_report
from rollcorr.diagnostics.report.report_data import run_report
from rollcorr.run_directory.stored_run import read_run

HEALTHY = {"token_count": 4000.0, "kl": 2e-4, "k3_kl": 1e-4, "chi2_token": 2e-4, "ppl_ratio": 1.0002}
HEALTHY |= {"rollout_is_mean": 1.0, "rollout_is_eff_sample_size": 0.999, "rollout_rs_masked_fraction": 0.0}


class Page(HTMLParser):
    """Every address and every text of a page."""

    def __init__(self, html):
        super().__init__()
        self.addresses, self.words, self.tags = [], [], []
        self.feed(html.partition("<body>")[2].partition("<script")[0])
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href", "xlink:href")]

    def handle_data(self, data):
        self.words.append(data)


def write(path, steps, *, config="rollout_correction: {rollout_is: token}\n", **changes):
    path.mkdir(exist_ok=True)
    values = {PREFIX + name: value for name, value in (HEALTHY | changes).items()}
    lines = [json.dumps({"step": s, "reward/mean": 0.8 + 0.01 * s, **values}) for s in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "config.yaml").write_text(config)
    return path


def page_of(run, output):
    data = run_report(read_run(run))
    return Page(write_report(data, output).read_text(encoding="utf-8")), data


def test_a_report_is_one_file_with_every_panel(tmp_path):
    page, _ = page_of(write(tmp_path / "run", 12, rollout_rs_masked_fraction=0.01), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.html"]
    assert page.tags.count("figure") == len((*PANELS, REWARD))


def test_empty_charts_become_one_line(tmp_path):
    run = write(tmp_path / "run", 12, rollout_is_mean=math.nan, rollout_is_eff_sample_size=math.nan)
    page, _ = page_of(run, tmp_path / "out")
    assert page.tags.count("figure") == len((*PANELS, REWARD)) - 3
    assert "Not drawn: Mean importance weight (no importance weights" in page.text
    assert "Vetoed and rejected share (0 at every step)" in page.text


def test_old_weights_name_the_setting_that_keeps_them(tmp_path):
    steps = [{"step": s, PREFIX + "token_count": 4000.0} for s in range(1, 19)]
    steps = [step | {PREFIX + "k3_kl": 1e-4 * 1.5 ** step["step"], "engine/staleness": step["step"]} for step in steps]
    run = write(tmp_path / "run", 1, config="rollout:\n  refresh_every: 1000\n")
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    page, data = page_of(run, tmp_path / "out")
    fix = "lower rollout.refresh_every: it is 1000, so the sampler gets new weights every 1000 steps; else: "
    assert data.health.warnings[0].fix.startswith(fix)
    assert f"fix {fix}" in page.text
    assert "times its start" in data.health.warnings[0].limit
    assert "first passed the limit at step" in data.health.warnings[0].reason
    assert page.text.index("Updates that the sampler is behind") < page.text.index("KL(rollout")


def test_the_page_asks_nothing_of_the_network(tmp_path):
    page, _ = page_of(write(tmp_path / "run", 3), tmp_path / "out")
    assert all(address.startswith("#") for address in page.addresses)
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    own = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://(?!github.com/leeoniya)|//cdn|@import|url\((?!#|data:image/jpeg)|<link", own)
    assert "connect-src 'none'" in html


def test_the_verdict_is_said_before_anything_else(tmp_path):
    page, _ = page_of(write(tmp_path / "run", 12), tmp_path / "out")
    places = [page.text.index(text) for text in ("not judged", "In numbers", "All metrics of step 12")]
    assert places == sorted(places)
    assert "unchanged since steps 1 to 5; the start was not judged" in page.text
    assert "Findings" not in page.text


def test_every_finding_is_shown_with_value_limit_reason_and_fix(tmp_path):
    run = write(tmp_path / "run", 12, kl=0.4, chi2_token=3.5, nonfinite_count=7.0, rollout_is_eff_sample_size=0.1)
    page, data = page_of(run, tmp_path / "out")
    assert len(data.health.warnings) == 4
    for finding in data.health.warnings:
        for part in (finding.title, finding.metric, finding.limit, finding.reason, finding.fix):
            assert part in page.text
    assert "4 findings" in page.text
    assert "first at step 1, 12 steps in all" in page.text


def test_all_metrics_of_the_last_step_come_with_their_definition(tmp_path):
    page, _ = page_of(write(tmp_path / "run", 2, rollout_rs_seq_mean_k3_mean=0.004), tmp_path / "out")
    assert "tm(−d), estimates KL(μ‖π)" in page.text
    assert "mean(seq_mean_k3)" in page.text
    assert "reward/mean" in page.text


def allowed_scripts(html):
    """The scripts of a page by their hashes, and the hashes of its policy."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return hashes, re.findall(r"'sha256-([^']+)'", re.search("script-src ([^;]*)", policy)[1])


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_hostile_names_and_text_stay_text(tmp_path):
    run = write(tmp_path / "<img src=x onerror=alert(1)>", 2, config=f"rollout_correction: null # {HOSTILE}\n")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 3, HOSTILE: 1.0, PREFIX + HOSTILE: 2.0}) + "\n")
    page, _ = page_of(run, tmp_path / "out")
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert HOSTILE in page.text
    assert HOSTILE not in html
    hashes, allowed = allowed_scripts(html)
    assert hashes == allowed
    assert len(hashes) == 1


@pytest.mark.parametrize("steps", [1, 500])
def test_short_and_long_runs_are_shown(tmp_path, steps):
    page, _ = page_of(write(tmp_path / "run", steps), tmp_path / "out")
    assert f"All metrics of step {steps}" in page.text


def test_a_run_without_mismatch_metrics_still_shows_its_reward(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.5, "note": "x", "bad": NaN, "none": null}\n')
    page, data = page_of(run, tmp_path / "out")
    assert "nothing was measured" in page.text
    assert "No mismatch metrics were logged" in page.text
    assert "mean reward 1.5000" in page.text
    assert not data.health.healthy


def test_remarks_about_the_input_are_shown(tmp_path):
    run = write(tmp_path / "run", 3)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "kl')
    page, _ = page_of(run, tmp_path / "out")
    assert "the last line of metrics.jsonl (line 4) is cut off" in page.text


def test_the_reward_gain_by_hand():
    steps = [{"step": s, "reward/mean": value} for s, value in enumerate([0.0, 1.0, 2.0, 3.0, 4.0])]
    gain = reward_gain(steps)
    assert (gain["first"], gain["last"], gain["gain"], gain["window"]) == (0.5, 3.5, 3.0, 2)
    assert gain["error"] == pytest.approx((0.5 / 2 + 0.5 / 2) ** 0.5)
    assert reward_gain(steps[:3]) is None
    assert reward_gain([]) is None
    twenty_five = [{"reward/mean": float(s)} for s in range(25)]
    assert reward_gain(twenty_five)["gain"] == 15.0


def test_series_leave_out_steps_without_tokens_but_keep_their_reward():
    steps = [{"step": 1, PREFIX + "token_count": 0, PREFIX + "kl": 0.0, "reward/mean": 1.0}]
    steps += [{"step": 2, PREFIX + "token_count": 5, PREFIX + "kl": 0.1, "reward/mean": 2.0}]
    series = series_by_name(steps)
    assert series["kl"].tolist() == [[2, 0.1]]
    assert series["reward/mean"].tolist() == [[1, 1.0], [2, 2.0]]
