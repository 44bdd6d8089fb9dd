"""`rollcorr import SOURCE… -o TARGET`, and `rollcorr check` on foreign files: output and remaining files."""

import json
import signal
import textwrap

import pytest
from processes import run_python
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.rollout_log import RolloutLogError, convert_log, read_rollout_log


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


@pytest.fixture
def theirs(tmp_path):
    """A JSONL file with names of its own."""
    rows = [{"rollout_log_probs": [-1.0, -0.5], "old_log_probs": [-1.01, -0.5], "score": n % 2} for n in range(600)]
    path = tmp_path / "theirs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


NAMES = "rollout_log_prob=rollout_log_probs,old_log_prob=old_log_probs,reward=score"


@pytest.mark.parametrize("target", ["log.parquet", "log.jsonl.gz"])
def test_import_writes_the_versioned_log(theirs, tmp_path, target):
    result = invoke("import", theirs, "-o", tmp_path / target, "--columns", NAMES)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path / target}: 600 sequences\n"
    (first, *_) = read_rollout_log(tmp_path / target)
    assert first.values("reward").tolist()[:2] == [0.0, 1.0]
    assert invoke("check", tmp_path / target).exit_code == 3, "there is no null"


def test_check_reads_the_file_with_the_same_names(theirs):
    result = invoke("check", theirs, "--columns", NAMES, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["rows"] == 600


@pytest.mark.parametrize("command", ["check", "import"])
def test_without_names_the_error_gives_the_option_to_use(theirs, tmp_path, command):
    target = ["-o", tmp_path / "log.parquet"] if command == "import" else []
    result = invoke(command, theirs, *target)
    assert result.exit_code == 2
    assert "the file has " in result.stderr
    option = result.stderr.split("use --columns ")[1].strip()
    assert invoke(command, theirs, *target, "--columns", option).exit_code == {"check": 3, "import": 0}[command]


@pytest.mark.parametrize("command", ["check", "import"])
def test_a_wrong_option_is_answered_in_one_line(theirs, tmp_path, command):
    target = ["-o", tmp_path / "log.parquet"] if command == "import" else []
    for options, message in (
        (["--columns", "rollout_log_probs=rollout_log_prob"], "our name stands on the left"),
        (["--limit", "rows"], "limit rows must be a whole number"),
    ):
        result = invoke(command, theirs, *target, *options)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_failed_import_leaves_nothing(theirs, tmp_path):
    with theirs.open("a") as file:
        file.write("{broken\n")
    result = invoke("import", theirs, "-o", tmp_path / "new" / "log.parquet", "--columns", NAMES)
    assert result.exit_code == 2
    assert "line 601 is not JSON" in result.stderr
    assert list((tmp_path / "new").iterdir()) == []


def test_an_existing_target_and_a_target_of_another_form_cost_no_reading(theirs, tmp_path):
    (tmp_path / "log.parquet").write_bytes(b"mine")
    result = invoke("import", theirs, "-o", tmp_path / "log.parquet", "--columns", NAMES)
    assert (result.exit_code, "exists" in result.stderr) == (2, True)
    assert (tmp_path / "log.parquet").read_bytes() == b"mine"
    assert invoke("import", theirs, "-o", tmp_path / "log.parquet", "--columns", NAMES, "--overwrite").exit_code == 0
    result = invoke("import", theirs, "-o", tmp_path / "log.pt")
    assert "a rollout log ends in .parquet, .jsonl, .jsonl.gz" in result.stderr


def test_the_second_of_two_sources_without_log_probs_is_named(theirs, tmp_path):
    names = {"rollout_log_prob": "rollout_log_probs"}
    (tmp_path / "second.jsonl").write_text('{"old_log_probs": [1.0]}\n')
    with pytest.raises(RolloutLogError, match=r"second\.jsonl: no column rollout_log_prob"):
        convert_log(
            [theirs, tmp_path / "second.jsonl"],
            tmp_path / "log.jsonl",
            column_names=names,
            required=["rollout_log_prob"],
        )
    assert not (tmp_path / "log.jsonl").exists()


def test_progress_tells_the_rows_of_all_sources(theirs, tmp_path):
    told = []
    names = {"rollout_log_prob": "rollout_log_probs"}
    convert_log(
        theirs, tmp_path / "log.parquet", column_names=names, on_rows=lambda rows, total: told.append((rows, total))
    )
    assert told == [(256, 600), (256, 600), (88, 600)]


INTERRUPTED = """
    import os, signal, sys
    import rollcorr.rollout_log.writer as writer
    from rollcorr.cli import app

    whole = writer.RolloutLogWriter.write
    def write(log, batch):
        whole(log, batch)
        os.kill(os.getpid(), signal.SIGINT)
    writer.RolloutLogWriter.write = write
    app(sys.argv[1:])
"""


def test_ctrl_c_leaves_nothing_and_exits_with_130(theirs, tmp_path):
    target = tmp_path / "new" / "log.parquet"
    ended = run_python(textwrap.dedent(INTERRUPTED), "import", theirs, "-o", target, "--columns", NAMES)
    assert ended.returncode == 128 + signal.SIGINT
    assert "was not written" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(target.parent.iterdir()) == []
