"""`rollcorr report RUN`: written files, output, and exit codes."""

import json
import sys

import pytest
from typer.testing import CliRunner

import rollcorr.diagnostics.report as report_package
from rollcorr.cli import app
from rollcorr.core.metric_registry import PREFIX

HEALTHY = {"token_count": 4000.0, "kl": 2e-4, "k3_kl": 1e-4, "chi2_token": 2e-4, "rollout_is_mean": 1.0}


@pytest.fixture
def run(tmp_path):
    """Make a run directory of three steps; changes are metrics."""

    def make(**changes):
        metrics = {PREFIX + name: value for name, value in (HEALTHY | changes).items()}
        lines = [json.dumps({"step": step, "reward/mean": 1.0, **metrics}) + "\n" for step in (1, 2, 3)]
        path = tmp_path / "run"
        path.mkdir()
        (path / "metrics.jsonl").write_text("".join(lines))
        (path / "config.yaml").write_text("algorithm: {rollout_correction: {rollout_is: token}}\n")
        return path

    return make


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_run_without_findings_gives_a_page_in_its_folder_and_exit_code_3(run):
    path = run()
    result = invoke(path)
    assert result.exit_code == 3
    assert result.stdout.startswith("not judged: ")
    assert result.stdout.splitlines()[2] == "Run run: 3 steps, the last is 3"
    assert f"report: {path / 'report' / 'report.html'}" in result.stdout
    assert "\x1b" not in result.stdout


def test_findings_give_exit_code_1_and_the_page_still(run, tmp_path):
    result = invoke(run(kl=0.5, rollout_is_std=3.0), "-o", tmp_path / "elsewhere")
    assert result.exit_code == 1
    assert result.stdout.startswith("unhealthy: KL is too far from 0\nfix: ")
    assert "\n2 findings  Run " in result.stdout
    finding = (
        "KL is too far from 0: kl 0.5, limit −0.1 to 0.1, from noise alone −3.40e−04 to 5.40e−04; first at step 1, "
        "3 steps in all"
    )
    assert finding in result.stdout
    assert "KL is too far from 0" in (tmp_path / "elsewhere" / "report.html").read_text(encoding="utf-8")


def test_a_run_with_rollouts_is_told_how_to_ask_the_tokens_unless_it_is_healthy(run, tmp_path):
    path = run(kl=0.5)
    asks = f"rollouts are logged: `rollcorr check {path}`"
    assert asks not in " ".join(invoke(path).stdout.split()), "there are none"
    (path / "rollouts").mkdir()
    (path / "rollouts" / "step_000001.parquet").touch()
    shown = invoke(path)
    assert asks in " ".join(shown.stdout.split())
    assert asks in (path / "report" / "report.html").read_text(encoding="utf-8")
    assert asks in " ".join(json.loads(invoke(path, "--json").stdout)["remarks"])


@pytest.fixture(params=["jinja2"])
def without_figures(request, monkeypatch):
    """As if one package of the extra `report` were not installed."""
    for name in [request.param, *(name for name in sys.modules if name.startswith(f"{request.param}."))]:
        monkeypatch.setitem(sys.modules, name, None)

    # The page's modules are imported once more, whatever earlier tests have loaded.
    for module in ("html_page",):
        monkeypatch.delitem(sys.modules, f"{report_package.__name__}.{module}", raising=False)
    monkeypatch.delitem(vars(report_package), "write_report", raising=False)
    return "reports need Jinja2"


def test_without_the_extra_there_is_a_verdict_and_its_exit_code_and_a_line_that_says_what_to_install(
    run, without_figures
):
    path = run(kl=0.5)
    for arguments in ((path,), (path, "--json")):
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert result.stderr == f"no page: {without_figures}: pip install 'rollcorr[report]'\n"
        assert "unhealthy" in result.stdout
    assert json.loads(result.stdout)["report"] is None
    assert not (path / "report").exists()


def test_without_the_extra_a_page_that_was_asked_for_is_bad_input(run, tmp_path, without_figures):
    result = invoke(run(), "-o", tmp_path / "page")
    assert result.exit_code == 2
    assert result.stderr == f"error: {without_figures}: pip install 'rollcorr[report]'\n"
    assert result.stdout == ""


def test_json_is_for_machines(run):
    result = invoke(run(kl=0.5), "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["verdict"] == "unhealthy"
    assert document["report"].endswith("report.html")
    (finding,) = document["findings"]
    assert (finding["metric"], finding["first_step"], finding["steps"]) == ("kl", 1, 3)


def test_diffusion_rules_warn_on_request(tmp_path, run):
    path = run(rollout_is_max=2.0)
    assert invoke(path).exit_code == 3
    result = invoke(path, "--diffusion")
    assert result.exit_code == 1
    assert "pinned at the threshold" in result.stdout


def test_bad_input_gives_exit_code_2_and_says_what_to_do(tmp_path):
    result = invoke(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "is not a run directory; give the folder that holds metrics.jsonl" in result.stderr
    (tmp_path / "metrics.jsonl").write_text("oops\n")
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "has no whole line (1 line was left out; metrics.jsonl:1: not JSON" in result.stderr
    assert not (tmp_path / "report").exists()


def test_an_output_that_cannot_be_written_gives_exit_code_2(run, tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke(run(), "-o", tmp_path / "file" / "folder")
    assert result.exit_code == 2
    assert "Not a directory" in result.stderr


def test_no_link_in_a_run_makes_the_report_write_somewhere_else(run, tmp_path):
    path, mine = run(), tmp_path / "mine"
    mine.write_text("precious")
    (path / "report").mkdir()
    (path / "report" / "report.html").symlink_to(mine)
    assert invoke(path).exit_code == 3
    assert mine.read_text() == "precious"
    assert "<html" in (path / "report" / "report.html").read_text(encoding="utf-8")

    (path / "report").rename(tmp_path / "elsewhere")
    (path / "report").symlink_to(tmp_path / "elsewhere")
    result = invoke(path)
    assert result.exit_code == 2
    assert "report is a symbolic link; name a folder for the report with --output" in result.output
