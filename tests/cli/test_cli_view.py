"""`rollcorr view`: the page of runs and logs as a file, and served while a run grows."""

import base64
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zlib

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("jinja2", reason="the extra report is not installed")
pytest.importorskip("pyarrow", reason="the extra log is not installed")

from rollcorr.cli import app
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def invoke(*arguments):
    return CliRunner().invoke(app, ["view", *map(str, arguments)], env={"COLUMNS": "200"})


def add_steps(run, first, last, **metrics):
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in range(first, last + 1):
            values = {"rollout_corr/token_count": 4000.0, "rollout_corr/k3_kl": 1e-4 * step, "rollout_corr/kl": 1e-4}
            file.write(json.dumps({"step": step, "reward/mean": 0.5, **values, **metrics}) + "\n")


def write_rollouts(run, prompt="2 + 2 ="):
    rows = [
        {"step": 1, "response_ids": [1, 2], "rollout_log_prob": [-1.0, -0.5], "old_log_prob": [-1.0, -9.5]},
        {"step": 1, "response_ids": [3, 0], "rollout_log_prob": [-1.0, -0.5], "old_log_prob": [-1.0, -0.6]},
    ]
    with RolloutLogWriter(run / "rollouts" / "step_000001.parquet") as log:
        log.write(RolloutBatch.from_rows([row | {"prompt": prompt} for row in rows]))


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("rollout_correction: {rollout_is: token}\n")
    add_steps(path, 1, 3)
    write_rollouts(path)
    return path


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_has_verdict_curves_and_tokens(run, tmp_path):
    shown = invoke(run, "-o", tmp_path / "page.html")
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    places = [page.index(text) for text in ('class="verdict', 'id="curves"', 'id="viewer"', 'id="details"')]
    assert places == sorted(places)
    (tokens,) = data_of(page)["tokens"]
    assert (tokens["sequences"], tokens["shown"], tokens["run"]) == (2, 2, "run")
    assert "run: 2 of 2 sequences. Above 10,000 sequences" in page


def test_several_runs_share_a_page(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    add_steps(other, 1, 4)
    assert invoke(run, other, "-o", tmp_path / "page.html").exit_code == 0
    page = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page["runs"] == ["run", "other"]
    assert [part["run"] for part in page["tokens"]] == ["run"]


@pytest.mark.parametrize(("flag", "prompts", "ids"), [("--text", ["2 + 2 ="] * 2, 4), ("--no-text", [[], []], 1)])
def test_report_and_compare_write_this_page(run, tmp_path, flag, prompts, ids):
    """With the same tokens; the ids of `--no-text` are all −1."""
    for command in (["report", str(run)], ["compare", str(run), str(run)]):
        assert CliRunner().invoke(app, [*command, flag, "-o", str(tmp_path)]).exit_code in (0, 3)
    for name in ("report.html", "comparison.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert 'id="viewer"' in page
        assert "image/png" not in page
        tokens = data_of(page)["tokens"][0]
        assert tokens["prompts"] == prompts
        packed = zlib.decompress(base64.b64decode(tokens["id"].partition(":")[2]))
        assert len(set(np.frombuffer(packed, np.uint8).reshape(4, -1)[0].tolist())) == ids


def test_a_rollout_log_has_a_page(run, tmp_path):
    assert invoke(run / "rollouts" / "step_000001.parquet", "-o", tmp_path / "page.html").exit_code == 0
    assert "Rollout log step_000001.parquet" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_hostile_texts_stay_text(run, tmp_path, monkeypatch):
    """Of prompts, tokens, metric names and run names; a name of a run has no slash."""
    run = run.rename(tmp_path / "<script>alert(1)<img src=x onerror=alert(1)>")
    add_steps(run, 4, 5, **{HOSTILE: 1.0})
    (run / "rollouts" / "step_000001.parquet").unlink()
    write_rollouts(run, prompt=HOSTILE)
    monkeypatch.setattr("rollcorr.diagnostics.report.view_page.token_decoder", lambda directory: lambda token: HOSTILE)
    assert invoke(run, "--tokenizer", tmp_path, "-o", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    (tokens,) = data_of(page)["tokens"]
    assert tokens["prompts"] == [HOSTILE, HOSTILE]
    assert set(tokens["texts"].values()) == {HOSTILE}
    assert tokens["run"] == run.name
    assert HOSTILE in {chart["title"] for chart in data_of(page)["charts"]}
    assert "<img" not in page.partition("<body>")[2].replace("\\u003c", "").partition("<script type")[0]
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 2


def test_a_folder_without_a_tokenizer_is_bad_input(run, tmp_path):
    shown = invoke(run, "--tokenizer", tmp_path)
    assert shown.exit_code == 2
    assert f"{tmp_path} holds no tokenizer" in shown.stderr


def test_help_states_the_rule_and_an_example():
    text = " ".join(re.sub(r"[│\s]+", " ", invoke("--help").stdout).split())
    assert "Above 10,000 sequences or 1,250,000 tokens" in text
    assert "rollcorr view RUN --live --port 8017" in text


def test_pages_need_no_matplotlib(run, tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from typer.testing import CliRunner\n"
        "from rollcorr.cli import app\n"
        f"print(CliRunner().invoke(app, ['view', {str(run)!r}, '-o', {str(tmp_path / 'view.html')!r}]).exit_code,\n"
        f"      CliRunner().invoke(app, ['report', {str(run)!r}]).exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "3"]
    assert (tmp_path / "view.html").stat().st_size > 50_000
    assert (run / "report" / "report.html").exists()


def get(address, host=None):
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def test_a_live_page_follows_the_run(run):
    """Also: another host's name is refused, and Ctrl-C ends with exit code 130 and no traceback."""
    command = [sys.executable, "-m", "rollcorr", "view", str(run), "--live", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        address = re.search(r"http://[\d.]+:\d+", server.stdout.readline())[0]
        page = get(address)
        assert "3 steps, the last is 3" in page
        assert data_of(page)["live"] is True
        before = get(f"{address}/version")
        add_steps(run, 4, 5)
        assert get(f"{address}/version") != before
        assert "5 steps, the last is 5" in get(address)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address, host="attacker.example:80")

        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
        assert server.returncode == 130
        assert "Traceback" not in errors


def test_a_port_in_use_names_the_port_and_the_option(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shown = invoke(run, "--live", "--port", port)
    assert shown.exit_code == 2
    assert f"port {port} of 127.0.0.1 is in use" in shown.stderr
    assert "--port" in shown.stderr
