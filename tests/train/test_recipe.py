"""A third recipe in a few lines: fitting a number. The run loop saves, stops and resumes it like the others."""

import json
import signal
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from rich.console import Console

from rollcorr.run_directory import ProgressColumn, read_metrics, read_run
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


class Memory:
    """A sink of one's own: keeps the losses, and in the end that it was closed."""

    def __init__(self):
        self.told = []

    def write(self, step, metrics):
        self.told.append((step, metrics["loss"]))

    def close(self):
        self.told.append("closed")


def run(path, *overrides, **others):
    config = read_config(None, [f"run_dir={path}", "steps=6", "log.tensorboard=false", *overrides], NumberConfig)
    return run_recipe(NumberRecipe, config, console=Console(quiet=True), **others)


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


def test_a_sink_of_ones_own_gets_every_step_and_is_closed(tmp_path):
    memory = Memory()
    run(tmp_path, sinks=[memory])
    assert memory.told == [*((row["step"], row["loss"]) for row in read_metrics(tmp_path / "metrics.jsonl")), "closed"]
