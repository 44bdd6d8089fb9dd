"""`rollcorr convert-config`: the new YAML and the account go to different places; bad input ends with 2."""

import pytest
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.config.documents import load_yaml

OLD = """\
algorithm:
  gamma: 1.0
  rollout_is_threshold: 2.0
  rollout_is: true
  rollout_is_level: token
  rollout_is_mode: mask
trainer:
  steps: 3
"""


def run(*arguments):
    return CliRunner().invoke(app, ["convert-config", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(OLD, encoding="utf-8")
    return path


def test_the_new_yaml_goes_to_standard_output_and_the_account_to_standard_error(old):
    result = run(old)
    assert result.exit_code == 0
    new = load_yaml(result.stdout)
    assert new["algorithm"]["gamma"] == 1.0
    assert new["algorithm"]["rollout_correction"]["rollout_rs"] == "token_k1"
    assert new["trainer"] == {"steps": 3}
    assert "schema 2025-10" in result.stderr
    assert "mask mode rejects on the token ratio" in result.stderr
    assert "note: Metrics" in result.stderr


def test_the_new_yaml_goes_to_the_file_asked_for(old, tmp_path):
    new = tmp_path / "new.yaml"
    result = run(old, "-o", new)
    assert (result.exit_code, result.stdout) == (0, "")
    again = run(new)
    assert again.exit_code == 0
    assert load_yaml(again.stdout) == load_yaml(new.read_text(encoding="utf-8"))
    assert "schema newest" in again.stderr


def test_a_bare_band_of_an_unquoted_file_survives(tmp_path):
    path = tmp_path / "bare.yaml"
    path.write_text("rollout_rs: token_k1\nrollout_rs_threshold: 0.5_2\n", encoding="utf-8")
    section = load_yaml(run(path).stdout)["algorithm"]["rollout_correction"]
    assert section["rollout_rs_threshold"] == "0.5_2"


def test_a_warning_of_the_configuration_is_shown(tmp_path):
    path = tmp_path / "inert.yaml"
    path.write_text("rollout_is: sequence\nbypass_mode: true\n", encoding="utf-8")
    result = run(path)
    assert result.exit_code == 0
    assert "warning: rollout_is='sequence'" in result.stderr


def test_the_schema_can_be_given(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text("rollout_is_threshold: 2.0\n", encoding="utf-8")
    section = load_yaml(run(path, "--schema", "2025-10").stdout)["algorithm"]["rollout_correction"]
    assert (section["rollout_is"], section["apply_is"]) == ("token", False)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("rollout_iss: token\n", (), "Did you mean 'rollout_is'?"),
        ("a: [1\n", (), "not a YAML document"),
        ("- 1\n", (), "must be a mapping"),
        ("", (), "must be a mapping"),
        ("rollout_is: token\n", ("--schema", "2024"), "schema must be one of"),
        ("rollout_is: token\n", ("-o", "missing/folder/new.yaml"), "missing/folder"),
    ],
)
def test_bad_input_ends_with_two_and_the_reason(tmp_path, text, arguments, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    result = run(path, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_missing_or_binary_file_ends_with_two(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    for path in (tmp_path / "absent.yaml", binary):
        result = run(path)
        assert result.exit_code == 2
        assert path.name in result.stderr


def test_help_teaches_with_an_example():
    result = run("--help")
    assert result.exit_code == 0
    assert "rollcorr convert-config old.yaml -o new.yaml" in result.stdout
