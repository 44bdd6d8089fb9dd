"""The record of a run: flushed line by line, strict JSON, readable after a crash."""

import json
import math
from contextlib import closing

import pytest
from rich.console import Console

from rollcorr.run_directory import (
    ConsoleProgress,
    JsonLines,
    ProgressColumn,
    RunDirectory,
    Sinks,
    drop_later_steps,
    read_metrics,
)

METRICS = {"reward/mean": 0.5, "rollout_corr/k3_kl": 1e-5, "rollout_corr/max_viable_length": math.inf}
COLUMNS = (
    ProgressColumn("reward", "reward/mean", "{:.3f}"),
    ProgressColumn("k3", "rollout_corr/k3_kl", "{:.1e}"),
    ProgressColumn("ESS", "rollout_corr/rollout_is_eff_sample_size", "{:.3f}"),
)


def test_each_step_is_on_disk_at_once_and_infinity_is_null(tmp_path):
    with closing(Sinks([JsonLines(tmp_path / "metrics.jsonl")])) as log:
        log.write(1, METRICS)
        (line,) = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row == {"step": 1, "reward/mean": 0.5, "rollout_corr/k3_kl": 1e-5, "rollout_corr/max_viable_length": None}


def test_outside_a_terminal_lines_are_printed(tmp_path):
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        with closing(Sinks([ConsoleProgress(Console(file=file, width=60), COLUMNS, steps=30)])) as log:
            for step in range(1, 31):
                log.write(step, METRICS)
        file.flush()
    lines = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert [line.split()[1] for line in lines] == ["1/30", "10/30", "20/30", "30/30"]
    assert "reward 0.500" in lines[0]
    assert "k3 1.0e-05" in lines[0]
    assert "ESS –" in lines[0]


def test_in_a_terminal_the_newest_steps_stay_on_screen(tmp_path):
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        console = Console(file=file, width=120, force_terminal=True)
        progress = ConsoleProgress(console, COLUMNS, steps=20)
        with closing(Sinks([progress])) as log:
            for step in range(1, 13):
                log.write(step, METRICS)
            progress.say("a message")
    shown = (tmp_path / "out").read_text(encoding="utf-8")
    assert "12/20" in shown
    assert "a message" in shown
    assert "0.500" in shown


def test_a_half_written_last_line_is_passed_over_and_any_other_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    drop_later_steps(RunDirectory(tmp_path), 1)
    assert path.read_text(encoding="utf-8") == '{"step": 1}\n'
    path.write_text('{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: not JSON"):
        read_metrics(path)
