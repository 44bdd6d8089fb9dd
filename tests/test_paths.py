"""Public functions accept paths as text, Path and any path-like object."""

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import rollcorr
from rollcorr.diagnostics import check_logs, null_of_logs, read_null, run_report, write_report
from rollcorr.rollout_log import JsonlSource, LogSource, ParquetSource, PickledSource
from rollcorr.run_directory import read_metrics, read_run
from rollcorr.run_directory.metrics_file import GrowingMetrics
from rollcorr.run_directory.sinks import JsonLines
from tests.diagnostics.null_logs import rollouts, write_rows

ROOMS = ["rollcorr", *(f"rollcorr.{room.name}" for room in pkgutil.iter_modules(rollcorr.__path__) if room.ispkg)]
ROOMS.remove("rollcorr.cli")
"""Front doors. Those of the commands are for typer, which makes a Path of a text."""
OF_A_PLUGIN = {LogSource, JsonlSource, ParquetSource, PickledSource}
"""What the library calls, always with a Path."""


class Somewhere:
    """A path-like object that is neither a text nor a Path."""

    def __init__(self, path):
        self._path = str(path)

    def __fspath__(self):
        return self._path


def public_functions():
    """(name, function) of every public function, and of every public method and constructor."""
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            found = getattr(module, name)
            if inspect.isfunction(found):
                yield f"{room}.{name}", found
            if not inspect.isclass(found) or found in OF_A_PLUGIN:
                continue
            for method, member in vars(found).items():
                function = getattr(member, "__func__", member)
                made = method == "__init__" and not dataclasses.is_dataclass(found)
                if (made or not method.startswith("_")) and inspect.isfunction(function):
                    yield f"{room}.{name}.{method}", function


def test_no_public_function_asks_for_a_path_object():
    """Dataclasses and recipes may require a Path; functions that users call also accept text."""
    asked = {
        f"{name}({parameter.name})"
        for name, function in public_functions()
        for parameter in inspect.signature(function).parameters.values()
        if str(parameter.annotation) in ("Path", "Path | None")
    }
    assert asked == {
        "rollcorr.train.Recipe.save_policy(directory)",
    }


@pytest.mark.parametrize("form", [str, Path, Somewhere])
def test_a_log_a_null_a_run_and_a_report_are_found_by_any_path(tmp_path, form):
    log = form(write_rows(tmp_path / "log.parquet", rollouts(rows=16, length=80)))
    null = null_of_logs(log)
    null.save(form(tmp_path / "null.json"))
    assert check_logs(log, null=read_null(form(tmp_path / "null.json"))).files == (str(tmp_path / "log.parquet"),)

    metrics = form(tmp_path / "run" / "metrics.jsonl")
    (tmp_path / "run").mkdir()
    with_lines = JsonLines(metrics)
    with_lines.write(1, {"rollout_corr/kl": 0.01})
    with_lines.close()
    assert read_metrics(metrics) == [{"step": 1, "rollout_corr/kl": 0.01}]
    assert len([*GrowingMetrics(metrics).new_steps()]) == 1
    page = write_report(run_report(read_run(form(tmp_path / "run"))), form(tmp_path / "page"))
    assert page == tmp_path / "page" / "report.html"
