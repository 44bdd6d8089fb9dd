"""A third recipe in a few lines: fitting a number. The run loop saves, stops and resumes it too."""

import io
import json
import signal
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from recording_sinks import ERRORS, Broken, Recording
from rich.console import Console

from rollcorr.run_directory import read_metrics, read_run
from rollcorr.run_directory.sinks import ProgressColumn
from rollcorr.train import Recipe, RunConfig, derived_generator, latest_checkpoint, read_config, run_recipe


@dataclass(frozen=True, kw_only=True)
class NumberConfig(RunConfig):
    """Options of the toy."""

    recipe: Literal["number"] = "number"
    run_dir: str = "runs/number"
    target: float = 3.0


class NumberRecipe(Recipe):
    """Move a parameter toward noisy observations of a number."""

    config_class = NumberConfig
    columns = (ProgressColumn("loss", "loss", "{:.3f}"),)
    evaluation_text = "the number is {number:.3f}"

    def __init__(self, config, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.config = config
        self.trainer = SimpleNamespace(model=model, optimizer=optimizer, skipped_steps=0, engine=None)

    @classmethod
    def build(cls, config, directory, checkpoint):
        model = torch.nn.ParameterList([torch.zeros(())])
        if checkpoint is not None:
            model.load_state_dict(torch.load(checkpoint.path / "number.pt"))
        return cls(config, model)

    def step(self, step):
        noise = torch.randn((), generator=derived_generator(self.config.seed, "noise", step))
        loss = (self.trainer.model[0] - self.config.target - 0.1 * noise).square()
        loss.backward()
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        return {"loss": loss.item()}

    def save_policy(self, directory):
        torch.save(self.trainer.model.state_dict(), directory / "number.pt")

    def evaluate(self, when):
        return {"number": self.trainer.model[0].item()}


def run(path, *overrides, console=None, **others):
    config = read_config(None, [f"run_dir={path}", "steps=6", "log.tensorboard=false", *overrides], NumberConfig)
    return run_recipe(NumberRecipe, config, console=console or Console(quiet=True), **others)


def test_a_recipe_trains_is_interrupted_resumes_and_equals_an_uninterrupted_run(tmp_path, monkeypatch):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run(whole)

    step = NumberRecipe.step
    monkeypatch.setattr(
        NumberRecipe, "step", lambda self, n: (n == 4 and signal.raise_signal(signal.SIGINT), step(self, n))[1]
    )
    stopped = run(parted)
    assert (stopped.step, stopped.interrupted) == (4, True)
    monkeypatch.undo()
    run(parted)

    assert read_metrics(parted / "metrics.jsonl") == read_metrics(whole / "metrics.jsonl")
    numbers = [torch.load(latest_checkpoint(path / "checkpoints") / "number.pt")["0"] for path in (whole, parted)]
    assert torch.equal(*numbers)


def test_a_recipe_is_evaluated_and_its_run_reads_back(tmp_path):
    summary = run(tmp_path, "log.evaluate=1", "target=-2")
    assert summary.before == {"number": 0}
    assert summary.after["number"] == pytest.approx(-0.6, abs=0.05)  # AdamW moves by about lr per step
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["after"] == summary.after
    assert [row["step"] for row in read_run(tmp_path).series] == [1, 2, 3, 4, 5, 6]


def assert_recorded(sink, path):
    """Check that a sink got every line of the metrics file, and was closed last."""
    rows = read_metrics(path / "metrics.jsonl")
    assert [(step, metrics["loss"]) for step, metrics in sink.calls[:-1]] == [
        (row["step"], row["loss"]) for row in rows
    ]
    assert sink.calls[-1] == "closed"


def test_a_sink_of_ones_own_gets_every_step_and_is_closed(tmp_path):
    memory = Recording()
    run(tmp_path, sinks=[memory])
    assert_recorded(memory, tmp_path)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["write", "flush", "close"])
def test_a_failing_sink_ends_no_training(tmp_path, method, error):
    broken, memory = Broken(method, error, step=3), Recording()
    shown = io.StringIO()
    summary = run(tmp_path, "checkpoint.every=4", console=Console(file=shown, width=200), sinks=[broken, memory])
    assert (summary.step, summary.interrupted, summary.failure) == (6, False, None)
    assert_recorded(memory, tmp_path)
    assert broken.steps[-1] == "closed"
    assert f"Broken failed and gets no further steps: {error}" in shown.getvalue()
    assert not (tmp_path / "run.lock").exists()


def test_an_error_between_two_steps_saves_first(tmp_path, monkeypatch):
    def write_extras(self, step):
        if step == 3:
            raise ValueError("a picture of the wrong size")

    monkeypatch.setattr(NumberRecipe, "write_extras", write_extras)
    with pytest.raises(ValueError, match="wrong size"):
        run(tmp_path / "parted", "checkpoint.every=0")
    assert latest_checkpoint(tmp_path / "parted" / "checkpoints").name == "step_000003"
    monkeypatch.undo()
    run(tmp_path / "parted", "checkpoint.every=0")
    run(tmp_path / "whole")
    parted, whole = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("parted", "whole"))
    assert parted == whole


def test_a_sink_is_chosen_by_its_name(tmp_path, capsys):
    run(tmp_path / "file", "log.sinks=[stdout]")
    run(tmp_path / "code", sinks=["stdout"])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"step {step}" for step in (1, 2, 3, 4, 5, 6)] * 2
    with pytest.raises(ValueError, match="no sink is called 'wanb'; there are tensorboard, wandb"):
        run(tmp_path / "wrong", "log.sinks=[wanb]")
    assert not (tmp_path / "wrong").exists()
