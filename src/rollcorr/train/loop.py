"""The run loop: start or resume, train, save, stop on Ctrl-C, and say what came out.

`run_recipe` serves every recipe. What differs between two kinds of training is behind `Recipe`.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from rich.console import Console
from torch import nn

from rollcorr.engines.base import EngineError
from rollcorr.engines.transport.waiting import while_waiting
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.sinks import OPTIONAL_SINKS, ConsoleProgress, JsonLines, ProgressColumn, Sink, Sinks
from rollcorr.run_directory.stored_run import drop_later_steps
from rollcorr.train.checkpoint import Checkpoint, TrainState, latest_checkpoint, load_checkpoint, save_checkpoint
from rollcorr.train.config_file import changed_options, read_config
from rollcorr.train.run_config import RunConfig
from rollcorr.train.steps import SamplingCopy

Evaluation = Mapping[str, float]


class Trainer(Protocol):
    """What a recipe trains with; all that a checkpoint holds besides the policy."""

    skipped_steps: int

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What trains it."""

    @property
    def engine(self) -> SamplingCopy | None:
        """What samples from it; None when nothing holds a copy of the weights."""


class Recipe(Protocol):
    """One kind of training, as the run loop sees it. A recipe subclasses this and fills in the first four methods.

    Attributes:
        config_class: its configuration.
        columns: the metrics that the console shows.
        evaluation_text: how an evaluation reads, with its names in braces.
        trainer: what the loop saves and restores.
    """

    config_class: ClassVar[type[RunConfig]]
    columns: Sequence[ProgressColumn] = ()
    evaluation_text: ClassVar[str] = ""
    trainer: Trainer

    @classmethod
    def build(cls, config: Any, directory: RunDirectory, checkpoint: Checkpoint | None) -> Recipe:  # noqa: ANN401
        """Make the trainer, from the configuration's policy or from that in `checkpoint.path`.

        The loop restores the rest of a checkpoint: the optimizer, and an engine that lags behind.
        """

    def step(self, step: int) -> Mapping[str, float]:
        """Run training step `step` (1, 2, …) and return its metrics.

        It depends on the weights, the optimizer and (seed, step) alone, so that a resumed run repeats it.
        """

    def save_policy(self, directory: Path) -> None:
        """Write the policy into a folder from which `build` reads it."""

    def evaluate(self, when: str) -> Evaluation | None:
        """Measure the policy "before" or "after" the training; the engine has its weights. None: not measured."""
        return None

    def write_extras(self, step: int) -> None:
        """Write what else the newest step leaves, for example its rollouts."""
        return

    def close(self) -> None:
        """Let go of processes and connections."""
        return


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to.

    Attributes:
        run_dir: where everything is.
        step: completed training steps.
        interrupted: it was stopped before its last step.
        failure: why the engine failed, if that stopped the run; else None.
        skipped_steps: optimizer steps left out: a loss or gradient was not finite, or nothing was kept.
        before: quality before the first training step; None if it was not measured.
        after: quality after the last one; None if it was not measured.
    """

    run_dir: Path
    step: int
    interrupted: bool
    failure: str | None
    skipped_steps: int
    before: Evaluation | None
    after: Evaluation | None


def run_recipe(
    recipe_class: type[Recipe], config: RunConfig, *, console: Console | None = None, sinks: Sequence[Sink] = ()
) -> Summary:
    """Train from the start, or from the newest checkpoint when `config.resume`.

    Ctrl-C (or SIGTERM) finishes the step, saves, and returns; a second one stops at once. An engine that fails in a
    step costs that step: nothing is trained on it, the run saves and returns, and `Summary.failure` says why. A resumed
    run equals an uninterrupted one, on the CPU to the last bit.

    Args:
        recipe_class: what to train.
        config: the run.
        console: where to show progress.
        sinks: where the metrics go besides what `config.log` names; closed at the end.

    Raises:
        FileExistsError: the directory holds a run already and `resume` is false.
        FileNotFoundError: there is nothing to resume from, or a model or data file does not exist.
        ValueError: a model, checkpoint or data file cannot be read.
        ImportError: an extra is missing; the message names it.
        EngineError: the engine failed before the first step, or after the last.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)

    # Nothing is written before the recipe is built: a wrong option must not leave a directory behind.
    directory = RunDirectory(Path(config.run_dir))
    checkpoint, changes = _find_checkpoint(config, directory)
    recipe = recipe_class.build(config, directory, checkpoint)
    start = 0 if checkpoint is None else _restore(recipe.trainer, checkpoint)
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.config.write_text(config.to_yaml(), encoding="utf-8")
    drop_later_steps(directory, start)

    # The file is first: when a step is shown, it is on disk.
    opened: list[Sink] = [JsonLines(directory.metrics), *sinks]
    opened += [make(directory, start) for name, make in OPTIONAL_SINKS.items() if getattr(config.log, name)]
    progress = ConsoleProgress(console or Console(), recipe.columns, steps=config.steps, start=start)
    with (
        closing(recipe),
        closing(Sinks([*opened, progress])) as log,
        _interruption(progress.say) as stop_requested,
        while_waiting(say=progress.say, stop_requested=stop_requested),
    ):
        for change in changes:
            progress.say(f"changed since this run began: {change}")
        run = _Run(recipe, config, directory, log, progress.say)
        before = run.measure_before(is_new=checkpoint is None)
        step, failure = run.train(start, stop_requested)

        if step > start or checkpoint is None:
            progress.say(f"saved {run.save(step)}")
        interrupted = step < config.steps
        if interrupted:
            command = f"rollcorr train {directory.config} resume=true"
            progress.say(f"stopped after step {step} of {config.steps}; go on with: {command}")
        after = None if interrupted else run.measure("after", step)

    summary = Summary(
        run_dir=directory.path,
        step=step,
        interrupted=interrupted,
        failure=failure,
        skipped_steps=recipe.trainer.skipped_steps,
        before=before,
        after=after,
    )
    text = json.dumps(asdict(summary) | {"run_dir": str(directory.path)}, indent=2)
    directory.summary.write_text(text + "\n", encoding="utf-8")
    return summary


@dataclass(frozen=True, eq=False)
class _Run:
    """A recipe between its first and its last step."""

    recipe: Recipe
    config: RunConfig
    directory: RunDirectory
    log: Sinks
    say: Callable[[str], None]

    def train(self, step: int, stop_requested: Callable[[], bool]) -> tuple[int, str | None]:
        """Train from a step on; returns the last completed step, and what the engine died of, if it did."""
        last, every = self.config.steps, self.config.checkpoint.every
        while step < last and not stop_requested():
            try:
                metrics = self.recipe.step(step + 1)
            except EngineError as error:  # raised while sampling, so nothing of this step has reached the weights
                failure = f"step {step + 1} was not trained on, the engine failed: {error}"
                self.say(failure)
                return step, failure

            step += 1
            self.log.write(step, metrics)
            self.recipe.write_extras(step)
            if every and step % every == 0 and step < last:
                self.save(step)
        return step, None

    def save(self, step: int) -> Path:
        """Write a checkpoint of everything that the next step depends on."""
        trainer = self.recipe.trainer
        version, weights = step, None

        # Weights are stored only for an engine that lags behind: any other gets the policy's.
        if trainer.engine is not None and trainer.engine.weight_version != step:
            version = trainer.engine.weight_version
            try:
                weights = trainer.engine.export_weights()
            except EngineError as error:
                self.say(f"the engine's weights, version {version}, are lost ({error}); it goes on with version {step}")
                version = step

        return save_checkpoint(
            self.directory.checkpoints,
            self.recipe.save_policy,
            trainer.optimizer,
            TrainState(step=step, engine_version=version, skipped_steps=trainer.skipped_steps),
            engine_weights=weights,
            keep=self.config.checkpoint.keep,
        )

    def measure_before(self, *, is_new: bool) -> Evaluation | None:
        """The quality before the first step; a resumed run remembers it."""
        path = self.directory.evaluation_before
        if not is_new:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        evaluation = self.measure("before", 0)
        if evaluation is not None:
            path.write_text(json.dumps(evaluation) + "\n", encoding="utf-8")
        return evaluation

    def measure(self, when: str, step: int) -> Evaluation | None:
        """The quality of the policy as it is after a step."""
        trainer = self.recipe.trainer
        if not self.config.log.evaluate:
            return None
        if trainer.engine is not None and trainer.engine.weight_version != step:
            trainer.engine.update_weights(trainer.model, version=step)
        evaluation = self.recipe.evaluate(when)
        if evaluation is not None:
            self.say(f"{when} training: {self.recipe.evaluation_text.format(**evaluation)}")
        return evaluation


def _find_checkpoint(config: RunConfig, directory: RunDirectory) -> tuple[Checkpoint | None, list[str]]:
    """What to resume from, and which options changed since then; refuses to mix two runs.

    Raises:
        FileExistsError: the directory holds a run already and `resume` is false.
        FileNotFoundError: there is nothing to resume from.
        ValueError: the checkpoint cannot be read.
    """
    newest, place = latest_checkpoint(directory.checkpoints), f"run_dir {str(directory.path)!r}"
    if config.resume and newest is None:
        raise FileNotFoundError(f"{place} has no checkpoint to resume from: leave out resume=true")
    if not config.resume and (newest is not None or directory.metrics.is_file()):
        way = "add resume=true to go on with it" if newest is not None else "delete it (it has no checkpoint)"
        raise FileExistsError(f"{place} holds a run already: {way}, or choose another run_dir")
    if newest is None:
        return None, []

    saved = directory.config
    changes = changed_options(read_config(saved, (), type(config)), config) if saved.is_file() else []
    return load_checkpoint(newest, device=config.device), changes


def _restore(trainer: Trainer, checkpoint: Checkpoint) -> int:
    """Everything in a checkpoint but the policy; returns its step."""
    trainer.optimizer.load_state_dict(checkpoint.optimizer)
    trainer.skipped_steps = checkpoint.state.skipped_steps
    if trainer.engine is not None and checkpoint.engine_weights is not None:
        trainer.engine.import_weights(checkpoint.engine_weights, version=checkpoint.state.engine_version)
    return checkpoint.state.step


@contextmanager
def _interruption(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after the step; the second acts as usual."""
    requested = False
    previous: dict[int, Any] = {}

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True
        for signal_number, handler in previous.items():
            # A background job starts with Ctrl-C ignored; asked twice, it stops at once all the same.
            ignores_ctrl_c = signal_number == signal.SIGINT and handler == signal.SIG_IGN
            signal.signal(signal_number, signal.default_int_handler if ignores_ctrl_c else handler)
        say("stopping after this step (once more to stop at once, losing it)")

    if threading.current_thread() is threading.main_thread():  # Python delivers signals there only
        previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)
