"""`make demo`: short runs of the full driver, and sentences that match the measurements."""

import importlib.util
import io
import json
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rollcorr.run_directory.directory import RunDirectory

pytest.importorskip("ctranslate2", reason="the extra ctranslate2 is not installed")
pytest.importorskip("matplotlib", reason="the extra report is not installed")
html_page = pytest.importorskip("rollcorr.diagnostics.report.html_page", reason="the extra report is not installed")

DEMO = Path(__file__).parents[2] / "experiments" / "demo"
TINY = [
    "steps=2",
    "task.additions=1",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=20",
    "optim.mini_batch_size=2",
    "checkpoint.every=2",
]


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo_driver", DEMO / "demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny_root(demo, tmp_path_factory):
    """Every run of the demo, two steps long, with a null."""
    root = tmp_path_factory.mktemp("demo")
    demo.NULL_ROWS = 2
    demo.measure_demo_null(root / "null.json")
    for run in demo.RUNS:
        assert demo.run_here(run, root, TINY, problems=4) == 0
    return root


def quiet():
    return Console(file=io.StringIO(), width=200)


def test_two_steps_of_every_run_make_the_page(demo, tiny_root, capsys):
    assert demo.main(["--page", "--root", str(tiny_root)]) == 0
    printed = capsys.readouterr().out
    assert [line[:3] for line in printed.splitlines() if line[:2] in ("1.", "2.", "3.", "4.", "5.")] == [
        f"{number}. " for number in range(1, 6)
    ]
    page = tiny_root / "page" / "comparison.html"
    assert str(page) in printed

    text = page.read_text(encoding="utf-8")
    for run in demo.RUNS:
        assert run.role.split(".")[0] in text
        metrics = [json.loads(line) for line in RunDirectory(tiny_root / run.name).metrics.read_text().splitlines()]
        assert [step["step"] for step in metrics] == [1, 2]
    assert "rollout.refresh_every" in text
    assert "Accuracy on held-out problems" in text
    first_screen = [
        text.index(part) for part in ('class="summary"', 'id="held_out"', "<h2>The runs", "<h2>In sentences")
    ]
    assert first_screen == sorted(first_screen)
    assert text.count('id="held_out"') == 1


def test_a_run_that_is_done_is_not_trained_again(demo, tiny_root):
    metrics = RunDirectory(tiny_root / "healthy").metrics
    before = metrics.read_bytes()
    assert demo.run_here(demo.RUNS[0], tiny_root, TINY, problems=4) == 0
    assert metrics.read_bytes() == before


def test_the_runs_differ_in_the_sampler_and_the_correction_alone(demo, tmp_path):
    healthy, fault, uncorrected, corrected = (run.config(tmp_path) for run in demo.RUNS)
    as_healthy = replace(fault.rollout, refresh_every=healthy.rollout.refresh_every)
    assert replace(fault, run_dir=healthy.run_dir, rollout=as_healthy) == healthy
    assert uncorrected.rollout == corrected.rollout
    assert replace(corrected, run_dir=uncorrected.run_dir, algorithm=uncorrected.algorithm) == uncorrected


def test_a_change_counts_from_two_standard_errors(demo):
    def change(before, after):
        return demo._change({"held_out": [[0, before], [40, after]], "problems": 100})

    # The standard error of the difference is 0.07 at a half of 100 problems each.
    assert change(0.5, 0.7) == "rises from 50 % to 70 %"
    assert change(0.5, 0.01) == "falls from 50 % to 1 %"
    assert change(0.5, 0.6) == "stays at 50 % (in the end 60 %)"


def test_a_page_needs_every_run(demo, tmp_path, capsys):
    assert demo.main(["--page", "--root", str(tmp_path)]) == 2
    assert "not done: healthy, fault, uncorrected, corrected" in capsys.readouterr().out


def processes(**code):
    return {name: [sys.executable, "-S", "-c", text] for name, text in code.items()}


def test_commands_run_some_at_a_time_and_a_failure_is_told(demo, tmp_path):
    commands = processes(first="pass", second="print('out of paper'); raise SystemExit(2)", third="pass")
    assert demo.run_side_by_side(commands, tmp_path, jobs=2, console=quiet(), steps=1) == {
        "first": 0,
        "second": 2,
        "third": 0,
    }
    told = quiet()
    assert demo._show_failures({"second": 2}, tmp_path, told) == 2
    assert "out of paper" in told.file.getvalue()


def test_a_stop_reaches_what_runs_and_starts_nothing_more(demo, tmp_path):
    wait = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(600)"
    )
    console = quiet()

    def stop_when_ready():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=stop_when_ready).start()
    codes = demo.run_side_by_side(processes(running=wait, waiting="pass"), tmp_path, jobs=1, console=console, steps=1)
    assert codes["running"] == demo.STOPPED
    assert "waiting" not in codes
    assert demo._show_failures({name: code for name, code in codes.items() if code}, tmp_path, console) == 130
    assert "the same command goes on" in console.file.getvalue()
