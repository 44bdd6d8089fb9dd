"""Trackers: their calls, the owner of the run, and the error without the package. Fakes replace the packages."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import textwrap
import types

import pytest
from recording_sinks import ERRORS, Broken, Recording

from rollcorr import Monitor
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.tracker_sinks import NAMED_SINKS

METRICS = {"reward/mean": 0.5, "rollout_corr/k3_kl": math.inf}


class Calls(list):
    """Record calls and their arguments."""

    def of(self, name, result=None):
        def call(*args, **options):
            self.append((name, *args, options))
            return result

        return call


@pytest.fixture
def calls():
    return Calls()


def stand_in(monkeypatch, name, **members):
    module = types.ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


def use(name, tmp_path):
    sink = NAMED_SINKS[name](RunDirectory(tmp_path), 0)
    sink.write(7, METRICS)
    sink.close()


def test_wandb_logs_in_a_run_of_the_directory_and_ends_it(monkeypatch, calls, tmp_path):
    run = types.SimpleNamespace(log=calls.of("log"), finish=calls.of("finish"))
    stand_in(monkeypatch, "wandb", run=None, init=calls.of("init", run))
    use("wandb", tmp_path)
    assert calls == [
        ("init", {"name": tmp_path.name, "dir": str(tmp_path)}),
        ("log", METRICS, {"step": 7}),
        ("finish", {}),
    ]


def test_wandb_joins_the_run_of_the_program_and_leaves_it_open(monkeypatch, calls, tmp_path):
    run = types.SimpleNamespace(log=calls.of("log"), finish=calls.of("finish"))
    stand_in(monkeypatch, "wandb", run=run, init=calls.of("init"))
    use("wandb", tmp_path)
    assert calls == [("log", {"monitor/step": 7, **METRICS}, {})]


@pytest.mark.parametrize("is_active", [False, True])
def test_mlflow_gets_finite_numbers_and_ends_its_own_run_only(monkeypatch, calls, tmp_path, is_active):
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    stand_in(
        monkeypatch,
        "mlflow",
        active_run=lambda: run if is_active else None,
        start_run=calls.of("start", run),
        log_metrics=calls.of("log"),
        end_run=calls.of("end"),
    )
    use("mlflow", tmp_path)
    logged = ("log", {"reward/mean": 0.5}, {"step": 7, "run_id": "r1"})
    own = [("start", {"run_name": tmp_path.name}), logged, ("end", {})]
    assert calls == ([logged] if is_active else own)


def test_trackio_gets_finite_numbers(monkeypatch, calls, tmp_path):
    stand_in(monkeypatch, "trackio", init=calls.of("init"), log=calls.of("log"), finish=calls.of("finish"))
    use("trackio", tmp_path)
    assert calls == [
        ("init", {"project": "rollcorr", "name": tmp_path.name}),
        ("log", {"reward/mean": 0.5}, {"step": 7}),
        ("finish", {}),
    ]


def test_a_line_for_each_step_goes_to_the_standard_output(capsys, tmp_path):
    use("stdout", tmp_path)
    assert capsys.readouterr().out == "step 7  reward/mean 0.5  rollout_corr/k3_kl inf\n"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_without_its_package_a_sink_names_the_extra(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs the package {name}: pip install 'rollcorr\[{name}\]'"):
        Monitor(tmp_path, sinks=[name])


def test_every_named_sink_that_needs_a_package_has_an_extra():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"\n{name} = [" in text for name in NAMED_SINKS if name not in ("stdout", "tensorboard"))


def test_an_unknown_sink_is_answered_with_those_that_there_are(tmp_path):
    with pytest.raises(ValueError, match="no sink is called 'wanb'; there are tensorboard, wandb"):
        Monitor(tmp_path, sinks="wanb")


@pytest.mark.parametrize("error", [*ERRORS, KeyboardInterrupt("a tracker's")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["write", "close"])
def test_a_failing_sink_ends_no_monitored_run(tmp_path, caplog, method, error):
    broken, kept = Broken(method, error), Recording()

    def train():
        with Monitor(tmp_path, sinks=[kept, broken, kept]) as monitor:
            monitor.step(reward=1.0)
            monitor.step(reward=2.0)
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        train()
    assert broken.steps == ([1, "closed"] if method == "write" else [1, 2, "closed"])
    assert kept.steps == [1, 1, 2, 2, "closed", "closed"]
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 2
    assert not (tmp_path / "run.lock").exists()
    assert f"Broken failed and gets no further steps: {error}" in caplog.text


def test_a_strict_monitor_raises_what_a_sink_raises(tmp_path):
    with Monitor(tmp_path, sinks=[Broken("write", ConnectionError("away"))], strict=True) as monitor:
        with pytest.raises(ConnectionError, match="away"):
            monitor.step(reward=1.0)
        assert monitor.step(reward=2.0) == {"reward": 2.0}


def test_tensorboard_is_a_sink_of_the_monitor(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra train is not installed")
    with Monitor(tmp_path, sinks=["tensorboard"]) as monitor:
        monitor.step(reward=1.0)
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_an_error_of_a_trackers_own_kind_leaves_nothing_open(monkeypatch, tmp_path):
    class UsageError(Exception):
        pass

    def refuse(**options):
        raise UsageError("no key")

    stand_in(monkeypatch, "wandb", run=None, init=refuse)
    with pytest.raises(UsageError, match="no key"):
        Monitor(tmp_path, sinks=["wandb"])


PROGRAM = """
    import math, sys
    from rollcorr import Monitor
    with Monitor(sys.argv[1], sinks=[sys.argv[2]]) as monitor:
        monitor.step(reward=[1.0, 2.0])
        monitor.step(reward=[3.0, math.nan])
        assert monitor.flush() and len(monitor._sinks._working) == 1, "it was dropped"
"""


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_real_package_takes_steps_offline(tmp_path, name):
    """Runs where the package is installed; the tests above run everywhere. A process of its own, for its threads."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'rollcorr[{name}]'")
    own = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "run"), name]
    done = subprocess.run(command, env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    if name == "wandb":
        assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
