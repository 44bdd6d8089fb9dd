"""`rollcorr check LOG…`: output, written files, and exit codes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from rollcorr import health
from rollcorr.cli import app
from rollcorr.cli.app import share_memory
from rollcorr.diagnostics import read_null
from rollcorr.diagnostics.log_check import tally as module
from rollcorr.diagnostics.null import noise_of
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

DRAWN = {"sampling": {"temperature": 1.0, "logprobs": "processed"}}


@pytest.fixture
def log(tmp_path):
    """Make a log of two steps with a mismatch of the given size."""

    def make(noise, name="log.parquet", seed=0, **changes):
        generator = torch.Generator().manual_seed(seed)
        with RolloutLogWriter(tmp_path / name) as writer:
            for step in (1, 2):
                rollout = -3 * torch.rand(16, 20, generator=generator) - 1
                train = (rollout + noise * torch.randn(16, 20, generator=generator)).clamp(max=-0.01)
                columns = {"rollout_log_prob": rollout, "old_log_prob": train, "step": step} | DRAWN | changes
                writer.write(RolloutBatch.from_padded(torch.ones(16, 20), **columns))
        return tmp_path / name

    return make


def measure(*arguments):
    return CliRunner().invoke(app, ["null", *map(str, arguments)])


def invoke(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_null_of_few_tokens_is_written_and_says_how_many_it_needs_and_why(log, tmp_path):
    done = measure(log(0.01), "-o", tmp_path / "null.json")
    assert done.exit_code == 0
    assert "640 tokens in 32 sequences are too few to judge weights by: the spread" in done.stderr
    assert "at least 1,000 tokens in 8 sequences, and better 10,000 tokens" in done.stderr

    # A verdict with it is the same.
    judged = health({"token_count": 5000.0, "k3_kl": 1e-4}, null=noise_of(read_null(tmp_path / "null.json")))
    assert (
        "null.json (unvetted) has too few tokens (640 in 32 sequences; at least 1,000 in 8 are needed)"
        in judged.not_judged[0]
    )

    done = measure(log(0.01, "a.parquet"), log(0.01, "b.parquet", seed=1), "-o", tmp_path / "larger.json")
    assert "note: 1,280 tokens in 64 sequences show what is typical, and hardly what is rare" in done.stdout
    done = measure(*(log(0.01, f"{i}.parquet", seed=i) for i in range(16)), "-o", tmp_path / "good.json")
    assert "hardly what is rare" not in done.output


def test_a_log_that_is_like_its_null_gives_exit_code_0(log, tmp_path):
    null = tmp_path / "null.json"
    done = measure(log(0.01, "a.parquet"), log(0.01, "b.parquet", seed=1), "-o", null)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{null}: 64 sequences, 1,280 tokens, k3 ")

    result = invoke(log(0.01, seed=2), "--null", null)
    assert result.exit_code == 0
    assert result.stdout.startswith("healthy  32 sequences in 1 file")
    without = log(0.01, "unknown.parquet", seed=2, sampling=None)
    unknown = invoke(without, "--null", null)
    assert unknown.exit_code == 3
    first, fix = unknown.stdout.splitlines()[:2]
    assert first == "not judged: log-probs agree; whether tokens were drawn from them is not judged"
    assert fix.startswith("fix: record the sampling settings: the column `sampling` of the log")
    assert invoke(log(0.1, "large.parquet", seed=2), "--null", null).exit_code == 1


def test_a_null_is_not_overwritten_and_bad_input_gives_exit_code_2(log, tmp_path):
    path, null = log(0.01), tmp_path / "null.json"
    assert measure(path, "-o", null, "--steps", "2:2").stdout.startswith(f"{null}: 16 sequences")
    again = measure(path, "-o", null)
    assert (again.exit_code, "give --overwrite" in again.stderr) == (2, True)
    assert measure(path, "-o", null, "--overwrite").exit_code == 0
    for arguments, message in (
        (["--null", tmp_path / "nowhere.json"], "rollcorr null LOG"),
        (["--null", path], "no JSON"),
        (["--null-steps", "2"], "steps are FIRST:LAST"),
        (["--null-steps", "1:1", "--null", null], "exclude each other"),
    ):
        refused = invoke(path, *arguments)
        assert (refused.exit_code, message in refused.stderr) == (2, True), arguments


def test_a_log_without_a_null_is_not_judged_and_gives_exit_code_3(log):
    result = invoke(log(0.01))
    assert result.exit_code == 3
    first, fix, subject = result.stdout.splitlines()[:3]
    assert first == "not judged: there is no null, and there are no earlier steps to compare with"
    assert fix.startswith("fix: give `rollcorr check` --null FILE (`rollcorr null` writes one), or --null-steps")
    assert subject == "32 sequences in 1 file"
    assert "weights not judged" in result.stdout
    assert "note: π is the column old_log_prob" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_findings_give_exit_code_1(log):
    result = invoke(log(1.5))
    assert result.exit_code == 1
    assert "token-level χ² is too high" in result.stdout


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_jsonl_logs_and_several_files_are_read(log, name):
    result = invoke(log(0.01), log(0.01, name))
    assert result.exit_code == 3
    assert result.stdout.splitlines()[2] == "64 sequences in 2 files"


def test_a_preset_or_a_configuration_file_says_what_to_measure(log, tmp_path):
    path = log(0.05)
    geometric = json.loads(invoke(path, "--preset", "decoupled_geo_rs", "--json").stdout)
    assert geometric["metrics"]["rollout_rs_seq_mean_k1_seq_masked_fraction"] > 0.8
    assert "the rejection band is narrower than the mismatch" in {f["title"] for f in geometric["findings"]}
    old = tmp_path / "old.yaml"
    old.write_text("algorithm: {rollout_is_threshold: 2.0, rollout_is: true, rollout_is_level: sequence}\n")
    sequence = json.loads(invoke(path, "--config", old, "--json").stdout)
    assert "rollout_is_log_max" in sequence["metrics"], "sequence weights"


def test_a_report_is_written_on_request(log, tmp_path):
    result = invoke(log(0.01), "-o", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert result.exit_code == 3
    assert f"report: {tmp_path / 'out' / 'report.html'}" in result.stdout
    assert "Rollout log log.parquet" in page
    assert "rollout_token_veto_threshold: 0.0001" in page, "the configuration that was measured"


def test_json_is_for_machines(log):
    document = json.loads(invoke(log(0.01), "--json").stdout)
    assert (document["verdict"], document["rows"], document["train_column"]) == ("not judged", 32, "old_log_prob")
    assert (document["interrupted"], document["report"]) == (False, None)
    assert document["metrics"]["token_count"] == 640
    assert [finding["code"] for finding in document["hypotheses"]] == ["matched"]


def test_densities_are_allowed_for_diffusion(log):
    path = log(0.01, rollout_log_prob=torch.full((16, 20), 1.0), old_log_prob=torch.full((16, 20), 1.01))
    assert invoke(path).exit_code == 1
    assert invoke(path, "--diffusion").exit_code == 3


def test_the_training_side_can_be_chosen(log):
    path = log(0.01, log_prob=torch.full((16, 20), -9.0))
    assert invoke(path).exit_code == 3
    assert invoke(path, "--train-column", "log_prob").exit_code == 1


def test_several_workers_print_the_same(log, tmp_path):
    for name in ("first.parquet", "second.parquet"):
        log(1.5, name)
    alone, both = invoke(tmp_path), invoke(tmp_path, "--workers", 2)
    assert (both.stdout, both.exit_code, both.stderr) == (alone.stdout, 1, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_a_sign_gets_a_question_mark(log, encoding):
    command = [sys.executable, "-m", "rollcorr", "check", log(1.5)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, encoding=encoding, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    assert "note: ? is the column old_log_prob" in done.stdout


def test_ctrl_c_prints_what_was_seen_and_gives_exit_code_130(log, monkeypatch):
    real, calls = module.validate_batch, []

    def interrupt(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(batch)

    monkeypatch.setattr(module, "validate_batch", interrupt)
    result = invoke(log(0.01), log(0.01, "second.parquet"))
    assert result.exit_code == 130
    assert "\n32 sequences in 2 files" in result.stdout
    assert "interrupted: this covers 32 of 64 rows only" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.parquet"], "no rollout log here"),
        (["LOG", "--preset", "token_si"], "token_is"),
        (["LOG", "--preset", "token_is", "--config", "x.yaml"], "exclude each other"),
        (["LOG", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["LOG", "--train-column", "advantages"], "old_log_prob or log_prob"),
        (["LOG", "--workers", "0"], "workers=0; give 1 or more"),
        (["LOG", "--workers", "2", "--ray", "local"], "workers=2 with a Ray cluster"),
        (["BROKEN"], "not a whole Parquet file"),
    ],
)
def test_bad_input_gives_exit_code_2_and_says_what_is_wrong(log, tmp_path, arguments, message):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is no log")
    paths = {"LOG": log(0.01), "BROKEN": tmp_path / "broken.parquet"}
    result = invoke(*(paths.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["null", "-o", "null.json"], ["check"]])
def test_a_run_that_kept_no_rollouts_is_told_how_to_keep_them(tmp_path, command):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout_corr/kl": 0.01}\n', encoding="utf-8")
    result = CliRunner().invoke(app, [*command, str(tmp_path)], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    for part in ("this run kept no rollouts", "rollouts=RolloutSample() of the Monitor", "or name rollout logs"):
        assert part in result.output


def test_a_column_of_the_wrong_length_is_named_with_file_and_row(tmp_path):
    rows = [{"rollout_log_prob": [-1.0, -2.0], "old_log_prob": [-1.0, -2.0]}, {"rollout_log_prob": [-1.0]}]
    rows[1]["old_log_prob"] = [-1.0, -2.0]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = invoke(path)
    assert result.exit_code == 2
    assert "row 1" in result.stderr
    assert str(path) in result.stderr


def test_with_keep_going_a_bad_file_is_named_and_the_rest_is_judged(log, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is no log")
    good = log(0.01)
    assert invoke(good, tmp_path / "broken.parquet").exit_code == 2
    result = invoke(good, tmp_path / "broken.parquet", "--keep-going")
    assert result.exit_code == 3
    assert "this is the verdict on part of the log: 1 file could not be read" in result.stdout
    assert "note: left out: " in result.stdout
    assert invoke(log(1.5, "bad.jsonl"), tmp_path / "broken.parquet", "--keep-going").exit_code == 1
    document = json.loads(invoke(good, tmp_path / "broken.parquet", "--keep-going", "--json").stdout)
    (problem,) = document["unreadable"]
    assert "broken.parquet" in problem


def test_arrow_shares_the_systems_memory_unless_the_user_chose_or_it_is_loaded(monkeypatch):
    name = "ARROW_DEFAULT_MEMORY_POOL"
    for loaded, chosen, then in ((False, None, "system"), (False, "mimalloc", "mimalloc"), (True, None, None)):
        with monkeypatch.context() as here:
            here.setenv(name, chosen or "")
            if chosen is None:
                here.delenv(name)
            if loaded:
                here.setitem(sys.modules, "pyarrow", sys)
            else:
                here.delitem(sys.modules, "pyarrow", raising=False)
            share_memory()
            assert os.environ.get(name) == then
