"""`rollcorr info`: which kernel is in use, why another is not, and which extras are missing."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

import rollcorr
from rollcorr.cli import app
from rollcorr.diagnostics import installation
from rollcorr.diagnostics.installation import inspect_installation
from rollcorr.kernels.correction.cpu import library


def test_the_table_names_versions_kernels_and_extras(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    for text in (rollcorr.__version__, torch.__version__, "reference", "torch", "eager torch in blocks", "cpu"):
        assert text in result.output


def test_json_says_which_instruction_set_is_in_use():
    result = CliRunner().invoke(app, ["info", "--json"])
    kernels = {kernel["name"]: kernel for kernel in json.loads(result.output)["kernels"]}
    level, reason = library.status()
    assert kernels["cpu"]["usable"] == (level is not None)
    assert kernels["cpu"]["note"].endswith(level or reason)


def test_an_unusable_kernel_comes_with_its_reason(monkeypatch):
    monkeypatch.setattr("rollcorr.kernels.correction.dispatch.status", lambda: (None, "there is [no] compiler"))
    kernel = next(kernel for kernel in inspect_installation()["kernels"] if kernel["name"] == "cpu")
    assert (kernel["usable"], kernel["note"]) == (False, "there is [no] compiler")
    output = CliRunner().invoke(app, ["info"], env={"COLUMNS": "200"}).output
    assert "[no]" in output
    assert "corrections of tensors on the CPU run in torch: the same results, but more slowly" in output


@pytest.mark.parametrize("quote", ["'", '"'])
def test_extras_are_those_of_the_package_with_what_they_miss(monkeypatch, quote):
    def extra(name):
        return f"extra == {quote}{name}{quote}"

    declared = [
        "torch>=2.6",
        f"torch>=2; {extra('one')}",
        f"no-such-package>=1,<2; {extra('one')}",
        f"no-such-kernel>=3; sys_platform == 'linux' and {extra('two')}",
        f"rollcorr[one]; {extra('all')}",
        f"no-such-tool; {extra('dev')}",
    ]
    monkeypatch.setattr(installation.metadata, "requires", lambda name: declared)
    assert inspect_installation()["extras"] == [
        {"name": "one", "missing": ["no-such-package"]},
        {"name": "two", "missing": ["no-such-kernel"]},
    ]


def test_a_package_that_is_only_on_the_path_has_no_extras(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation.metadata, "requires", absent)
    assert inspect_installation()["extras"] == []
