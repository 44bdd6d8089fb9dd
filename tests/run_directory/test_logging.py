"""The record of a run: flushed line by line, strict JSON, readable after a crash."""

import errno
import io
import json
import math
import resource
from contextlib import closing

import pytest
from rich.console import Console

from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.metrics_file import drop_later_steps, read_metrics
from rollcorr.run_directory.sinks import ConsoleProgress, JsonLines, ProgressColumn, TensorBoard, show_line

METRICS = {"reward/mean": 0.5, "rollout_corr/k3_kl": 1e-5, "rollout_corr/max_viable_length": math.inf}
COLUMNS = (
    ProgressColumn("reward", "reward/mean", "{:.3f}"),
    ProgressColumn("k3", "rollout_corr/k3_kl", "{:.1e}"),
    ProgressColumn("ESS", "rollout_corr/rollout_is_eff_sample_size", "{:.3f}"),
)


def test_each_step_is_on_disk_at_once_and_infinity_is_null(tmp_path):
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
        log.write(1, METRICS)
        (line,) = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row == {"step": 1, "reward/mean": 0.5, "rollout_corr/k3_kl": 1e-5, "rollout_corr/max_viable_length": None}


def test_outside_a_terminal_lines_are_printed(tmp_path):
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        with closing(ConsoleProgress(Console(file=file, width=60), COLUMNS, steps=30)) as log:
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
        with closing(progress):
            for step in range(1, 13):
                progress.write(step, METRICS)
            show_line(console, "a message")
    shown = (tmp_path / "out").read_text(encoding="utf-8")
    assert "12/20" in shown
    assert "a message" in shown
    assert "0.500" in shown


def test_a_broken_line_is_left_out_and_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    drop_later_steps(RunDirectory(tmp_path), 1)
    assert path.read_text(encoding="utf-8") == '{"step": 1}\n'
    assert caplog.text == ""
    path.write_text('{"st\n{"step": 2}\n')
    assert read_metrics(path) == [{"step": 2}]
    assert "metrics.jsonl:1 is left out: not JSON" in caplog.text


def test_only_what_a_killed_run_left_is_removed(tmp_path):
    directory = RunDirectory(tmp_path)
    for folder in (directory.rollouts, directory.images):
        folder.mkdir()
    mine = [directory.rollout_log(step) for step in (1, 2, 1_000_000)]
    mine += [directory.rollouts / ".step_000001.parquet.tmp-12-abcd", directory.images / ".before.png.partial"]
    mine += [directory.rollouts / ".rank_00003_step_000001.parquet.tmp-12-abcd", directory.rollout_log(2, rank=3)]
    mine += [tmp_path / ".config.yaml.partial", tmp_path / ".history.json.partial"]
    others = [directory.rollouts / "step_two.parquet", directory.rollouts / "step_000003.txt", tmp_path / ".a.partial"]
    others += [directory.rollout_log(1, rank=3), directory.rollouts / "my_step_000003.parquet"]
    for path in (*mine, *others):
        path.touch()
    drop_later_steps(directory, 1)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {directory.rollout_log(1), *others}


def test_lines_before_the_step_stay_to_the_letter_and_lost_ones_are_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1e-05}\n{"step": 2, \x00\xff\n{"step":3,"a":null}\n{"step": 4}\n{"step": 5}')
    assert drop_later_steps(RunDirectory(tmp_path), 3) == [2]
    assert path.read_bytes() == b'{"step": 1, "a": 1e-05}\n{"step":3,"a":null}\n'
    path.unlink()
    assert drop_later_steps(RunDirectory(tmp_path), 2) == [1, 2]


class Full:
    """A disk that fails after ten bytes of a line."""

    def __init__(self, file, *, truncates=True):
        self.file = file
        self.truncates = truncates
        self.room = 10

    def write(self, line):
        if self.room:
            room, self.room = self.room, 0
            return self.file.write(line[:room])
        raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, size):
        if not self.truncates:
            raise OSError(errno.EIO, "Input/output error")
        self.file.truncate(size)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("truncates", [True, False])
def test_a_failed_line_leaves_whole_lines_only(tmp_path, monkeypatch, truncates):
    """Where the part cannot be removed at once, the next write does so."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write(1, {})
    whole = path.read_bytes()
    monkeypatch.setattr(lines, "_file", Full(lines._file, truncates=truncates))
    with pytest.raises(OSError, match="No space left"):
        lines.write(2, {"a": 1.0})
    assert path.read_bytes() == (whole if truncates else whole + b'{"step": 2')
    assert read_metrics(path) == [{"step": 1}]
    lines.write(2, {"a": 1.0})
    lines.close()
    assert path.read_bytes() == whole + b'{"step": 2, "a": 1.0}\n'


def test_a_new_line_is_never_glued_to_a_part(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start, expected in (("", ""), ('{"st', ""), ('{"step": 1}\n{"st', '{"step": 1}\n'), ("x" * 200_000, "")):
        path.write_text(start)
        with closing(JsonLines(path)) as lines:
            lines.write(2, {})
        assert path.read_text(encoding="utf-8") == expected + '{"step": 2}\n'


def test_a_console_that_is_gone_stops_nothing(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    for options in ({}, {"force_terminal": True}):
        console = Console(file=Gone(), **options)
        progress = ConsoleProgress(console, COLUMNS, steps=2)
        show_line(console, "a message")
        progress.write(1, METRICS)
        progress.close()


def test_events_of_steps_that_are_computed_again_are_hidden(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory(tmp_path)
    for start, steps in ((0, {1: 1.0, 2: 2.0}), (0, {1: 3.0, 2: 4.0, 3: 5.0}), (1, {2: 6.0, 3: 7.0})):
        with closing(TensorBoard(directory, start)) as events:
            for step, value in steps.items():
                events.write(step, {"a": value})
            events.flush()
    read = EventAccumulator(str(directory.tensorboard))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("a")] == [(1, 3.0), (2, 6.0), (3, 7.0)]


@pytest.mark.parametrize("make", [lambda directory: JsonLines(directory.metrics), TensorBoard])
def test_a_full_disk_is_reported_with_the_file_and_its_bytes(tmp_path, make):
    sink = make(RunDirectory(tmp_path))
    sink.write(1, {"loss": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, limits[1]))
    try:
        with pytest.raises(OSError, match=r"(metrics.jsonl|events\S+) was not written \(File too large\): \d+ bytes"):
            sink.write(2, {f"loss {number}": 1.0 for number in range(20)})
        sink.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
