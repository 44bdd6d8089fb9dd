"""`rollcorr conformance`: exit codes, what is printed, and an interrupt."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollcorr.cli import app

THEIRS = Path(__file__).parents[1] / "conformance" / "their_correction.py"


def run(*arguments):
    return CliRunner().invoke(app, ["conformance", *arguments], env={"COLUMNS": "200"})


def test_a_failing_function_exits_with_1():
    result = run(f"{THEIRS}:correct_batch")
    assert result.exit_code == 1
    assert 'fail             2  "sequence" is the product' in result.output
    assert result.output.splitlines()[-1] == "4 pass, 9 fail, 2 not applicable, 0 error"


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # restores the path of modules afterwards
    code = "def weights(train, rollout, mask):\n    return {'weights': (train - rollout).exp().clamp(max=1e4)}\n"
    Path("their_module.py").write_text(code, encoding="utf-8")
    result = run("their_module:weights")
    assert result.exit_code == 1, result.output  # NaN at a valid token
    assert "pass             1  token weights" in result.output


@pytest.mark.parametrize(
    ("where", "message"), [("no_such_module:f", "cannot be loaded"), (f"{THEIRS}:torch", "is module, not a function")]
)
def test_a_function_that_is_not_there_exits_with_2(where, message):
    result = run(where)
    assert result.exit_code == 2
    assert message in result.output


def test_a_call_error_exits_with_2(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def f(train, rollout, mask):\n    raise RuntimeError('no')\n", encoding="utf-8")
    result = run(f"{file}:f")
    assert result.exit_code == 2
    assert "error" in result.output


def test_an_interrupt_keeps_the_finished_grades(tmp_path):
    file = tmp_path / "interrupted.py"
    code = "def f(train, rollout, mask, *, level='token'):\n    if level != 'token':\n        raise KeyboardInterrupt\n"
    file.write_text(f"{code}    return {{'weights': (train - rollout).exp()}}\n", encoding="utf-8")
    result = run(f"{file}:f")
    assert result.exit_code == 130
    assert "pass             1  token weights" in result.output
    assert "interrupted after 1 of 15 properties: 1 pass" in result.output
