"""The same command starts a run, continues it, or reports it; files of other runs are rejected."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from rich.console import Console
from test_recipe import NumberConfig, NumberRecipe

from rollcorr.run_directory import read_metrics, read_run
from rollcorr.run_directory import sinks as sinks_module
from rollcorr.train import checkpoint as checkpoint_module
from rollcorr.train import latest_checkpoint, load_config, read_config, run_recipe
from rollcorr.train import loop as loop_module

SHORT = ("steps=6", "checkpoint.every=2", "log.tensorboard=false", "log.evaluate=1")


@pytest.fixture
def number(tmp_path):
    """Run the recipe that fits a number; return its summary and its output."""

    def run(*overrides, run_dir=tmp_path / "run", recipe=NumberRecipe):
        config = read_config(None, [f"run_dir={run_dir}", *SHORT, *overrides], NumberConfig)
        with (tmp_path / "told.txt").open("w", encoding="utf-8") as file:
            summary = run_recipe(recipe, config, console=Console(file=file, width=300))
        return summary, (tmp_path / "told.txt").read_text(encoding="utf-8")

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of an uninterrupted run."""
    path = tmp_path_factory.mktemp("whole")
    config = read_config(None, [f"run_dir={path / 'run'}", *SHORT], NumberConfig)
    run_recipe(NumberRecipe, config, console=Console(quiet=True))
    return outcome(path / "run")


def outcome(run_dir):
    """Everything that a run computed."""
    path = latest_checkpoint(run_dir / "checkpoints")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return (
        read_metrics(run_dir / "metrics.jsonl"),
        torch.load(path / "number.pt")["0"].item(),
        torch.load(path / "optimizer.pt", weights_only=True)["state"],
        {name: value for name, value in summary.items() if name != "run_dir"},
    )


class Killed(Exception):  # noqa: N818
    """Ends the process, as far as the run can tell."""


def killed_at(method, at):
    """The recipe, ended when a method is called for the time `at`; also counts the calls."""
    calls = []

    def ended(self, *arguments):
        calls.append(arguments)
        if len(calls) == at:
            raise Killed
        return getattr(NumberRecipe, method)(self, *arguments)

    return type("Ended", (NumberRecipe,), {method: ended}), calls


@pytest.mark.parametrize(
    ("method", "at"),
    [("evaluate", 1), ("save_policy", 1), ("step", 1), ("step", 4), ("save_policy", 3), ("evaluate", 2)],
)
def test_the_same_command_goes_on_after_a_crash_anywhere(number, tmp_path, method, at, whole):
    recipe, _ = killed_at(method, at)
    with pytest.raises(Killed):
        number(recipe=recipe)
    number()
    assert outcome(tmp_path / "run") == whole


def test_the_same_command_reports_a_finished_run_and_trains_nothing(number, tmp_path):
    first, told = number()
    assert "finished: 6 of 6 steps; the same command reports this and trains nothing" in told
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    recipe, built = killed_at("__init__", 1)
    again, told = number(recipe=recipe)
    assert (again, built) == (first, [])
    assert "finished: step 6 of 6 is done" in told
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_more_steps_continue_a_finished_run(number, tmp_path, whole):
    number("steps=4")
    summary, told = number("steps=6")
    assert "continuing after step 4 of 6" in told
    assert "changed since this run began: steps: 4 → 6" in told
    assert outcome(tmp_path / "run") == whole
    assert summary.before == {"number": 0}


def test_what_a_recipe_changed_in_its_optimizer_is_continued(number, tmp_path):
    """A schedule that moves the learning rate step by step has it in the checkpoint only."""

    class Slower(NumberRecipe):
        def step(self, step):
            self.trainer.optimizer.param_groups[0]["lr"] *= 0.5
            return super().step(step)

    number(run_dir=tmp_path / "whole", recipe=Slower)
    number("steps=3", recipe=Slower)
    number(recipe=Slower)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_finished_run_says_that_a_change_comes_too_late(number):
    number()
    _, told = number("target=1")
    assert "changed, without effect because no step is left: target: 3.0 → 1.0" in told


def test_the_evaluation_at_the_end_is_repeated_alone(number, tmp_path):
    number()
    (tmp_path / "run" / "summary.json").write_text('{"step": 6, "inter')
    recipe, steps = killed_at("step", 1)
    summary, _ = number(recipe=recipe)
    assert (summary.step, summary.interrupted, steps) == (6, False, [])
    assert summary.after is not None


@pytest.mark.parametrize("damage", ["empty", "gone", "cut", "another"])
def test_a_damaged_configuration_does_not_matter_to_the_same_command(number, tmp_path, damage, whole):
    config = tmp_path / "run" / "config.yaml"
    recipe, _ = killed_at("step", 4)
    with pytest.raises(Killed):
        number(recipe=recipe)
    text = config.read_text(encoding="utf-8")
    damaged = {"empty": "", "cut": text[: len(text) // 2], "another": text.replace("target: 3.0", "target: 9.0")}
    config.unlink() if damage == "gone" else config.write_text(damaged[damage], encoding="utf-8")

    number()
    assert outcome(tmp_path / "run") == whole
    assert config.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", ["", "recipe: grpo\nrun_dir: elsewhere\n"])
def test_a_damaged_configuration_is_refused_when_it_is_given(number, tmp_path, text):
    number()
    (tmp_path / "run" / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config.yaml names run_dir .* which is not its own directory"):
        load_config(tmp_path / "run" / "config.yaml")


def test_a_configuration_of_a_run_names_its_own_directory(micro_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.json").touch()
    config = tmp_path / "run" / "config.yaml"
    config.write_text(micro_config().to_yaml(), encoding="utf-8")
    assert load_config(config).run_dir == str(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"is not its own directory: add run_dir=.*moved"):
        load_config(tmp_path / "moved" / "config.yaml")
    assert load_config(tmp_path / "moved" / "config.yaml", ["run_dir=new"]).run_dir == "new"


def test_files_that_a_run_would_write_over_are_refused_and_others_are_left(number, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm-1.out").write_text("mine")
    number()
    assert (tmp_path / "run" / "slurm-1.out").read_text() == "mine"

    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        other = tmp_path / f"with {name}"
        other.mkdir()
        (other / name).write_text("mine: true\n")
        with pytest.raises(FileExistsError, match=f"{name}.* Choose another run_dir"):
            number(run_dir=other)
        assert {path.name: path.read_text() for path in other.iterdir()} == {name: "mine: true\n"}


def test_a_configuration_that_says_the_same_may_lie_in_the_directory(number, tmp_path):
    number("steps=3")
    text = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"config\.yaml"):
        number("steps=4", run_dir=tmp_path / "new")
    assert number("steps=3", run_dir=tmp_path / "new")[0].step == 3


def test_a_run_whose_checkpoints_are_lost_is_not_started_over(number, tmp_path):
    number()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(FileExistsError, match=r"a run without checkpoints: .*metrics\.jsonl has steps of it"):
        number()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 6


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(number, tmp_path, whole):
    recipe, _ = killed_at("step", 5)
    with pytest.raises(Killed):
        number(recipe=recipe)
    (tmp_path / "run" / "checkpoints" / "step_000004" / "number.pt").write_bytes(b"")
    _, told = number()
    assert "passed over: " in told
    assert "step_000004" in told
    assert "continuing after step 2 of 6" in told
    assert outcome(tmp_path / "run") == whole


def test_a_run_without_a_sound_checkpoint_is_refused(number, tmp_path):
    number()
    for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
        (path / "state.json").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no sound checkpoint to go on from: .*step_000006.*; .*step_000004"):
        number("steps=9")


def test_checkpoints_of_another_run_are_refused(number, tmp_path):
    number(run_dir=tmp_path / "other")
    number("steps=4")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match=r"step_000006 belongs to run \w+, and .*history.json to run \w+: move"):
        number()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4


def test_a_lost_history_is_taken_from_the_checkpoint(number, tmp_path):
    number("steps=4")
    text = (tmp_path / "run" / "history.json").read_text(encoding="utf-8")
    (tmp_path / "run" / "history.json").write_text(text.replace('"target": 3.0', '"target": 4.0'), encoding="utf-8")
    number("steps=5")
    assert json.loads((tmp_path / "run" / "history.json").read_text(encoding="utf-8"))["run"] == json.loads(text)["run"]


def test_resume_false_only_starts_and_resume_true_only_continues(number, tmp_path):
    with pytest.raises(FileNotFoundError, match="leave out resume=true"):
        number("resume=true")
    assert number("resume=false", "steps=2")[0].step == 2
    with pytest.raises(FileExistsError, match="leave out resume=false to go on with it"):
        number("resume=false")
    assert number("resume=true")[0].step == 6


def test_changes_and_their_hashes_are_kept_in_the_checkpoint_and_beside_it(number, tmp_path):
    number("steps=2")
    number("steps=4", "target=2")
    number("steps=5")
    text = (latest_checkpoint(tmp_path / "run" / "checkpoints") / "records" / "history.json").read_text("utf-8")
    assert text == (tmp_path / "run" / "history.json").read_text(encoding="utf-8")
    history = json.loads(text)
    assert history["first_options"]["target"] == 3.0
    assert [(entry["after_step"], [change["name"] for change in entry["changes"]]) for entry in history["entries"]] == [
        (2, ["steps", "target"]),
        (4, ["steps", "target"]),
    ]
    assert len({history["sha256"], *(entry["sha256"] for entry in history["entries"])}) == 3
    assert read_run(tmp_path / "run").remarks[-2:] == (
        "options changed after step 2: steps: 2 → 4; target: 3.0 → 2.0",
        "options changed after step 4: steps: 4 → 5; target: 2.0 → 3.0",
    )


def test_a_start_that_was_cut_short_takes_new_options(number, tmp_path):
    recipe, _ = killed_at("save_policy", 1)
    with pytest.raises(Killed):
        number(recipe=recipe)
    _, told = number("target=-2")
    assert "target: 3.0 → -2.0" in told
    number("target=-2", run_dir=tmp_path / "whole")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_the_summary_of_a_finished_run_goes_when_the_run_continues(number, tmp_path):
    """Killed at its new end, the run would be reported as finished with the numbers of the policy before."""
    number()
    summary = tmp_path / "run" / "summary.json"
    seen = []

    class Looking(NumberRecipe):
        def step(self, step):
            seen.append(summary.exists())
            return super().step(step)

    number("steps=8", recipe=Looking)
    assert seen == [False, False]
    assert json.loads(summary.read_text(encoding="utf-8"))["step"] == 8


# Signals and the deadline.


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
@pytest.mark.parametrize("when", ["build", "before", "after"])
def test_a_warm_up_or_an_evaluation_stops_at_once_and_is_repeated(number, tmp_path, monkeypatch, name, when, whole):
    passed = []

    def stopped(now):
        if now == when:
            signal.raise_signal(getattr(signal, name))
            passed.append(now)

    class Stopped(NumberRecipe):
        def __init__(self, *arguments):
            stopped("build")
            super().__init__(*arguments)

        def evaluate(self, now):
            stopped(now)
            return super().evaluate(now)

    summary, told = number(recipe=Stopped)
    assert (summary.interrupted, summary.step, passed) == (True, 6 if when == "after" else 0, [])
    assert f"stopped by {name}" in told
    next_start = {
        "build": "starts again, because nothing is saved yet",
        "before": "continues after step 0",  # the warm-up's result is kept
        "after": "repeats the evaluation",
    }
    assert next_start[when] in told
    number()
    assert outcome(tmp_path / "run") == whole


def test_other_signals_after_the_first_do_not_keep_a_run_from_saving(number, tmp_path, monkeypatch):
    """Schedulers send SIGUSR1 some time before SIGTERM, and several kinds at once."""

    class Signalled(NumberRecipe):
        def step(self, step):
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
                signal.raise_signal(number)
            return super().step(step)

    summary, told = number(recipe=Signalled)
    assert (summary.step, summary.interrupted) == (1, True)
    assert told.count("stopping after this step") == 1
    assert "stopped by SIGUSR1 after step 1 of 6\nthe same command continues after step 1" in told


def test_a_hang_up_that_is_ignored_stays_ignored(number):
    class HungUp(NumberRecipe):
        def step(self, step):
            signal.raise_signal(signal.SIGHUP)
            return super().step(step)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert number(recipe=HungUp)[0].step == 6
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_deadline_saves_and_the_same_command_goes_on(number, tmp_path, whole):
    class Late(NumberRecipe):
        def step(self, step):
            if step == 3:
                signal.raise_signal(signal.SIGALRM)
            return super().step(step)

    summary, told = number("stop_after_minutes=600", recipe=Late)
    assert (summary.step, summary.interrupted) == (3, True)
    assert "stopped by stop_after_minutes after step 3 of 6" in told
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    number("stop_after_minutes=600")
    assert outcome(tmp_path / "run") == whole


def test_the_deadline_arrives_by_itself(number):
    """The timer of the system, whatever the run is doing then."""
    summary, told = number("steps=1000000000", "checkpoint.every=0", "stop_after_minutes=0.002")
    assert summary.interrupted
    assert f"stopped by stop_after_minutes after step {summary.step} of 1000000000" in told


def test_a_deadline_that_is_over_stops_without_any_signal(number, monkeypatch):
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    summary, told = number("stop_after_minutes=1e-9")
    assert (summary.step, summary.interrupted) == (0, True)
    assert "stopped by stop_after_minutes" in told


@pytest.mark.parametrize("value", ["0", "-1", ".nan"])
def test_a_deadline_is_positive(value):
    with pytest.raises(ValueError, match=r"stop_after_minutes must be (> 0|a finite number)"):
        read_config(None, [f"stop_after_minutes={value}"], NumberConfig)


def test_a_launcher_of_several_processes_is_refused(number, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2: a run is one process .* without torchrun"):
        number()
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert number()[0].step == 6


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "2"},
        {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "2", "WORLD_SIZE": "1", "SLURM_PROCID": "0"},
    ],
    ids=["shell of salloc", "one task of srun", "world of one"],
)
def test_one_process_under_slurm_trains(number, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert number()[0].step == 6


# The disk, and weights that must not be saved.


def test_weights_that_are_not_finite_stop_the_run_and_are_not_saved(number, tmp_path):
    class Broken(NumberRecipe):
        def step(self, step):
            metrics = super().step(step)
            if step == 3:
                with torch.no_grad():
                    self.trainer.model[0].fill_(torch.nan)
            return metrics

    summary, told = number(recipe=Broken)
    assert (summary.step, summary.interrupted, summary.engine_failed) == (2, True, False)
    assert "NaN or infinite" in summary.failure
    assert "the same command continues after step 2" in told
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000002"


@pytest.mark.parametrize("place", ["metrics", "checkpoint", "summary"])
def test_a_full_disk_ends_the_run_in_one_sentence_and_the_same_command_goes_on(
    number, tmp_path, monkeypatch, place, whole
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if place == "metrics":
            patched.setattr(sinks_module.JsonLines, "write", full)
        elif place == "checkpoint":
            save = checkpoint_module.save_checkpoint
            saved = lambda *a, **k: full() if a[3].step else save(*a, **k)  # noqa: E731
            patched.setattr(loop_module, "save_checkpoint", saved)
        else:
            write = loop_module.write_text_durably
            patched.setattr(
                loop_module, "write_text_durably", lambda p, t: full() if p.name == "summary.json" else write(p, t)
            )
        summary, told = number()
    assert summary.interrupted
    assert "No space left on device" in summary.failure
    assert (summary.step, "stopped: " in told) == (6 if place == "summary" else 0, True)

    number()
    assert outcome(tmp_path / "run") == whole


def test_logs_are_on_the_disk_before_the_checkpoint_of_their_step(number, tmp_path, monkeypatch):
    """A power cut may keep a renamed checkpoint and lose unsynced data."""
    events = []
    fsync, save = os.fsync, loop_module.save_checkpoint

    def recorded_fsync(handle):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def recorded_save(*arguments, **others):
        events.append(arguments[3].step)
        return save(*arguments, **others)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(loop_module, "save_checkpoint", recorded_save)
    number("log.tensorboard=true")
    for step in (2, 4, 6):
        since = events[events.index(step - 2) : events.index(step)]
        assert "metrics.jsonl" in since
        assert "run" in since
        assert any(name.startswith("events.out") for name in since if isinstance(name, str))
