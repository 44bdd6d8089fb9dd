"""`rollcorr info`, and the command as a module. tests/diagnostics/test_installation.py tests its report."""

import json
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import rollcorr
from rollcorr.cli import PANELS, app

ROOT = Path(__file__).parents[2]


def test_json_names_the_version_and_every_kernel():
    result = CliRunner().invoke(app, ["info", "--json"])
    assert result.exit_code == 0
    told = json.loads(result.output)
    assert told["versions"]["rollcorr"] == rollcorr.__version__
    assert [kernel["name"] for kernel in told["kernels"]] == ["reference", "torch", "cpu", "triton"]


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "rollcorr", "--help"], capture_output=True, text=True, check=True)
    assert "convert-config" in done.stdout


def test_the_version_is_written_once():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"{rollcorr.__version__}\n")
    assert re.search(r"(?m)^version = \"", (ROOT / "pyproject.toml").read_text(encoding="utf-8")) is None
    assert f"version: {rollcorr.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_command_has_its_place_in_the_help():
    """The first group is for who has just installed the package."""
    assert {command.name for command in app.registered_commands} == {n for names in PANELS.values() for n in names}
    shown = CliRunner().invoke(app, ["--help"]).stdout
    places = [shown.index(f" {panel} ") for panel in PANELS]
    assert places == sorted(places)
