"""How many package files, functions and calls a reader has to follow through a call."""

import importlib.util
import sys
from pathlib import Path

import pytest

from rollcorr.kernels.correction import implementations

TOOL = Path(__file__).parents[1] / "tools" / "trace_files.py"


@pytest.fixture(scope="module")
def trace_files():
    spec = importlib.util.spec_from_file_location("trace_files", TOOL)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("call", ["correct", "torch", "summary", "step", "check"])
def test_a_call_stays_within_its_limits(trace_files, call):
    if call == "correct" and not implementations()["cpu"][0]:
        pytest.skip("the compiled kernel was not built")
    found = trace_files.measure(call)
    assert found.files > 3
    assert found.above(trace_files.LIMITS[call]) == [], "\n".join(found.names)


def test_limits_are_those_that_were_decided(trace_files):
    assert trace_files.LIMITS["correct"] == {"files": 8, "functions": 28, "calls": 40}
    assert trace_files.LIMITS["torch"]["functions"] == 110
    assert trace_files.LIMITS["summary"]["calls"] == 200


def test_functions_calls_and_depth_by_hand(trace_files):
    from rollcorr.core import divergence

    def two_calls():
        divergence.k1(-1.0)
        divergence.k1(-2.0)

    found = trace_files.trace(two_calls)
    assert (found.names, found.functions, found.calls, found.depth) == (["core/divergence.py"], 1, 2, 1)


def test_the_tool_runs_without_the_compiled_library(trace_files, monkeypatch, capsys):
    monkeypatch.setattr(trace_files, "implementations", lambda: {"cpu": (False, "there is no compiler")})
    monkeypatch.setitem(trace_files.CALLS, "step", trace_files.summary_call)
    assert trace_files.main() == 0
    assert "correct: not measured, there is no compiler" in capsys.readouterr().out


def test_files_that_are_only_imported_do_not_count(trace_files):
    def imports_and_calls_nothing():
        import rollcorr.integrations.verl.parity  # noqa: F401

    trace_files.trace(imports_and_calls_nothing)
    assert trace_files.trace(imports_and_calls_nothing).names == []
