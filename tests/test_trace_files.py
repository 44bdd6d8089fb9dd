"""How many package files a reader has to open to follow a call."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "trace_files.py"


@pytest.fixture(scope="module")
def trace_files():
    spec = importlib.util.spec_from_file_location("trace_files", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("call", ["correct", "step"])
def test_a_call_goes_through_few_files(trace_files, call):
    files = trace_files.measure(call)
    assert len(files) > 3
    assert len(files) <= trace_files.LIMITS[call], "\n".join(files)


def test_files_that_are_only_imported_do_not_count(trace_files):
    def imports_and_calls_nothing():
        import rollcorr.integrations.verl.parity  # noqa: F401

    trace_files.files_of(imports_and_calls_nothing)
    assert trace_files.files_of(imports_and_calls_nothing) == []
