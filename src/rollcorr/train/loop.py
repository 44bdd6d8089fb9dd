"""The run loop: start, resume or report a run; train, save, stop on request, and return a summary.

`run_recipe` runs every recipe; `Recipe` is the interface of one kind of training. The phases of a run, in order:

    lock        one process at a time, `rollcorr.run_directory.run_lock`
    begin       read the directory, check that this configuration can resume in it, `rollcorr.train.resume`
    build       the recipe: load, warm up, start the engine
    step 0      reference policy, first checkpoint, null, evaluation
    train       steps and checkpoints
    end         last checkpoint, evaluation, summary.json

A run can be killed at any point: the same command resumes it, with the same result. Therefore results of step 0 count
only once its checkpoint exists, and a checkpoint is written only after the logs of its steps are on the disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from rich.console import Console
from torch import nn

from rollcorr.config.secrets import redact_text
from rollcorr.engines.base import EngineError
from rollcorr.engines.transport.waiting import while_waiting
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.durable_files import remove_leftovers, write_text_durably
from rollcorr.run_directory.metrics_file import BadInputError, drop_later_steps
from rollcorr.run_directory.run_lock import run_lock
from rollcorr.run_directory.sinks import ConsoleProgress, JsonLines, ProgressColumn, Sink, show_line
from rollcorr.run_directory.tracker_sinks import Sinks
from rollcorr.train.checkpoint import (
    Checkpoint,
    NonFiniteWeightsError,
    TrainState,
    delete_older_checkpoints,
    save_checkpoint,
)
from rollcorr.train.reference_policy import REFERENCE_RECORD, keep_reference
from rollcorr.train.resume import Beginning, beginning_lines, end_lines, find_beginning, finished_summary
from rollcorr.train.run_config import RunConfig
from rollcorr.train.steps import SamplingCopy
from rollcorr.train.stop_requests import StopNow, StopRequests

if TYPE_CHECKING:
    from rollcorr.diagnostics import MismatchNull, PictureNull

Evaluation = Mapping[str, float]

EVALUATION_RECORD = "evaluation_before.json"
"""Record of a checkpoint: the quality before the first step, if it was measured."""

ENGINE_OPTIONS = ("rollout.engine", "rollout.dtype")
"""Options under which stored weights of an engine cannot be taken over, once they change."""

NULL_OPTIONS = (
    "actor", "device", "log.null", "rollout.dtype", "rollout.engine", "rollout.guidance_scale",
    "rollout.max_new_tokens", "rollout.noise_level", "rollout.num_steps", "rollout.sampling"
)  # fmt: skip
"""Options of which a null is one; it is measured anew once they change."""


class Trainer(Protocol):
    """The state of a recipe that a checkpoint contains in addition to the policy."""

    skipped_steps: int

    @property
    def model(self) -> nn.Module:
        """Return the trained model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return its optimizer."""

    @property
    def engine(self) -> SamplingCopy | None:
        """Return the engine that samples from it, or None without a copy of the weights."""


class Recipe(Protocol):
    """Interface between the run loop and one kind of training. A recipe implements the first four methods.

    Attributes:
        config_class: its configuration.
        columns: the metrics that the console shows.
        evaluation_text: format string of an evaluation, with metric names in braces.
        keeps_reference: later starts need the policy that the run started from, in RUN/reference.
        trainer: state that the loop saves and restores.
    """

    config_class: ClassVar[type[RunConfig]]
    columns: Sequence[ProgressColumn] = ()
    evaluation_text: str = ""
    keeps_reference: bool = False
    trainer: Trainer

    @classmethod
    def build(cls, config: Any, directory: RunDirectory, checkpoint: Checkpoint | None) -> Recipe:  # noqa: ANN401
        """Make the trainer from the configuration's policy, or from the policy in `checkpoint.path`.

        The loop restores the rest of a checkpoint: the optimizer, and an engine that lags behind. A request to stop
        interrupts this method at once, like a killed process. So it must not write into the run's directory.

        Args:
            config: the run's configuration.
            directory: the run's directory.
            checkpoint: checkpoint to resume from; optional. Without it, the run starts new.
        """

    def step(self, step: int) -> Mapping[str, float]:
        """Run training step `step` (1, 2, …) and return its metrics.

        It depends only on the weights, the optimizer and (seed, step), so a resumed run repeats it.
        """

    def save_policy(self, directory: Path) -> None:
        """Write the policy into a folder from which `build` reads it."""

    def evaluate(self, when: str) -> Evaluation | None:
        """Measure the policy "before" or "after" the training; the engine has its weights.

        Optional: returns None if not measured. A request to stop interrupts this method at once. The
        next start repeats it, so it must be deterministic.
        """
        return None

    def measure_null(self) -> MismatchNull | PictureNull | None:
        """Measure the mismatch of sampler and trainer while both have the weights of `build`.

        Optional: returns None if not measured. A request to stop interrupts this method at once. The
        next start repeats it, so it must be deterministic.

        Raises:
            BadInputError: this run has no null; the message gives the reason, and the run continues without it.
        """
        return None

    def write_extras(self, step: int) -> None:
        """Write further files of the newest step, for example its rollouts."""
        return

    def close(self) -> None:
        """Close processes and connections."""
        return


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a run.

    Attributes:
        run_dir: the run's directory.
        step: completed training steps that are saved.
        interrupted: it was stopped before its end.
        failure: message of an engine error, a disk error or non-finite weights that stopped the run; optional.
        engine_failed: the engine caused the failure.
        skipped_steps: optimizer steps skipped: a loss or gradient was not finite, or no token was kept.
        before: quality before the first training step; None if not measured.
        after: quality after the last training step; None if not measured.
    """

    run_dir: Path
    step: int
    interrupted: bool
    failure: str | None = None
    engine_failed: bool = False
    skipped_steps: int = 0
    before: Evaluation | None = None
    after: Evaluation | None = None


def run_recipe(
    recipe_class: type[Recipe],
    config: RunConfig,
    *,
    console: Console | None = None,
    sinks: str | Sequence[str | Sink] = (),
) -> Summary:
    """Start a run, resume it, or report that it is finished, depending on its directory and `config.resume`.

    Repeat the same call until it reports a finished run. A resumed run equals an uninterrupted one, bit for bit on the
    CPU.

    Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and `config.stop_after_minutes` finish the step, save, and return. They interrupt a
    warm-up or an evaluation at once; the next start repeats it. A second Ctrl-C stops at once. If the engine fails, the
    step is discarded and the run saves and returns. `Summary.failure` contains the message of an engine error, or of a
    failed write of a checkpoint or log; the last sound checkpoint stays.

    Args:
        recipe_class: the recipe.
        config: the run.
        console: where to show progress.
        sinks: metric sinks in addition to `config.log`: names such as "wandb", or objects with
            `write(step, metrics)` and `close()`. A sink that raises is reported and gets no further steps.

    Raises:
        RunInUseError: a second process runs in the directory.
        FileExistsError: the directory contains unrelated files, or a run although `resume` is false.
        FileNotFoundError: `resume` is true and there is no checkpoint, or a model or data file does not exist.
        ValueError: an option that a checkpoint fixes has changed, no checkpoint is valid, a model or data file cannot
            be read, or a launcher started several processes.
        ImportError: an extra is missing; the message names it.
        EngineError: the engine failed before the first step, or after the last.
        OSError: the directory cannot be written.
    """
    # Every process of a launcher would train the same run, and overwrite its files.
    # In an interactive SLURM shell the number of tasks is set, but no task is started: then SLURM_PROCID is missing.
    slurm = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if "SLURM_PROCID" in os.environ else ()
    launched = next((name for name in ("WORLD_SIZE", *slurm) if name in os.environ), "")
    world = os.environ.get(launched, "1")
    if world.isdigit() and int(world) > 1:
        fix = "without torchrun, or with --nproc_per_node 1" if launched == "WORLD_SIZE" else "with srun --ntasks 1"
        raise ValueError(f"{launched}={world}: a run is one process on one device, so start it {fix}")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    console, directory = console or Console(), RunDirectory(Path(config.run_dir))
    say = partial(show_line, console)

    with run_lock(directory.path), StopRequests(say, minutes=config.stop_after_minutes) as stop:
        beginning = find_beginning(config, directory)
        finished = finished_summary(directory, step=beginning.step, steps=config.steps)
        for line in beginning_lines(beginning, config, is_finished=finished is not None):
            say(line)
        if finished is not None:
            # The file may lack fields of this version, or have others.
            names = [field.name for field in dataclasses.fields(Summary) if field.name in finished]
            return Summary(**{name: finished[name] for name in names} | {"run_dir": directory.path})

        # Only the lock is written before the recipe is built, so an invalid option creates no run directory.
        try:
            with stop.at_once():
                recipe = recipe_class.build(config, directory, beginning.checkpoint)
        except StopNow:
            for line in end_lines(config, saved=beginning.saved, failure=None, stopped_by=stop.reason):
                say(line)
            return Summary(run_dir=directory.path, step=beginning.step, interrupted=True)

        with closing(recipe):
            return _Run(recipe, config, directory, beginning, stop).run(console, sinks)


class _CannotSaveError(Exception):
    """A log or a checkpoint could not be written; the message gives the cause."""


class _Run:
    """State of one run of a recipe.

    Attributes:
        step: completed steps.
        saved: step of the newest sound checkpoint; None without one.
        failure: message of the error that stopped the run; optional.
        engine_failed: the engine caused the failure.
        before: quality before the first step.
        after: quality after the last one.
    """

    def __init__(
        self, recipe: Recipe, config: RunConfig, directory: RunDirectory, beginning: Beginning, stop: StopRequests
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.directory = directory
        self.beginning = beginning
        self.stop = stop
        self.step = beginning.step
        self.saved = beginning.saved
        self.failure: str | None = None
        self.engine_failed = False
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

        # Text files that every checkpoint of this run contains.
        kept = {} if beginning.checkpoint is None else beginning.checkpoint.records
        self.records = {name: kept[name] for name in (EVALUATION_RECORD, REFERENCE_RECORD) if name in kept}
        self.records[directory.config.name] = dataclasses.replace(config, resume="auto").to_yaml()
        self.records[directory.history.name] = beginning.history.to_json()

    def run(self, console: Console, sinks: str | Sequence[str | Sink]) -> Summary:
        """Train to the end, or until something stops it."""
        lost = self._prepare_directory()

        progress = ConsoleProgress(console, self.recipe.columns, steps=self.config.steps, start=self.step)
        self.say = partial(show_line, console)
        asked = dict.fromkeys([*self.config.log.sinks, *(["tensorboard"] if self.config.log.tensorboard else [])])
        given = [sinks] if isinstance(sinks, str) else sinks
        with (
            closing(JsonLines(self.directory.metrics)) as self.lines,
            closing(
                Sinks([*given, *asked, progress], self.directory, self.step, report=lambda line, _: self.say(line))
            ) as self.sinks,
            while_waiting(say=self.say, stop_requested=lambda: self.stop.reason is not None),
        ):
            if lost:
                self.say(f"{self.directory.metrics} has no line of {len(lost)} steps; the first is step {lost[0]}")
            is_done = False
            try:
                if self.beginning.checkpoint is None:
                    self._save_start()
                self._measure_null()
                if self.beginning.checkpoint is not None:
                    _restore(self.recipe.trainer, self.beginning, self.say)
                    delete_older_checkpoints(self.directory.checkpoints, self.step, keep=self.config.checkpoint.keep)
                self._measure_initial_quality()
                if self._train():
                    self.after = self._measure_quality("after")
                    is_done = True
            except StopNow:  # from an evaluation, which the next start repeats
                pass
            except EngineError as error:  # from a wait for the engine outside a step, which a request to stop ended
                if self.stop.reason is None:
                    raise
                self.say(str(error))
            except _CannotSaveError as error:
                self.failure = str(error)

            summary = self._write_summary(interrupted=not is_done)
            stopped_by = None if is_done else self.stop.reason
            for line in end_lines(self.config, saved=self.saved, failure=self.failure, stopped_by=stopped_by):
                self.say(line)
        return summary

    def _prepare_directory(self) -> list[int]:
        """Write the run's identity, delete partial files, and return the steps whose metrics are lost."""
        # Written first: the history marks a run directory, so its remaining files can be overwritten.
        write_text_durably(self.directory.history, self.records[self.directory.history.name])
        write_text_durably(self.directory.config, self.records[self.directory.config.name])
        remove_leftovers(self.directory.path)

        # A summary marks a finished run, but this run continues.
        self.directory.summary.unlink(missing_ok=True)
        return drop_later_steps(self.directory, self.step)

    def _save_start(self) -> None:
        """Save the result of the warm-up, so that no later start repeats it."""
        with _translate_save_errors("the start"):
            if self.recipe.keeps_reference:
                self.records[REFERENCE_RECORD] = keep_reference(self.directory.reference, self.recipe.save_policy)
        self._save()

    def _measure_null(self) -> None:
        """Measure sampler against trainer before the engine's older weights are restored.

        The engine was just built from the trainer's weights, and has verified them on its probe batch. An
        existing null file is kept, even one that the user put there.
        """
        is_stale = any(change.name.startswith(NULL_OPTIONS) for change in self.beginning.changes)
        if not is_stale and (self.step > 0 or self.directory.null.exists()):
            return
        try:
            with self.stop.at_once(), _translate_save_errors("the null"):
                null = self.recipe.measure_null()
                if null is None:
                    return
                null.save(self.directory.null)
        except BadInputError as error:
            self.say(f"{self.directory.null.name} was not measured: {error}")
        else:
            self.say(f"{self.directory.null.name}: {null.in_words}")

    def _measure_initial_quality(self) -> None:
        """Measure the quality before the first step; the checkpoints store it."""
        if EVALUATION_RECORD in self.records:
            self.before = json.loads(self.records[EVALUATION_RECORD])
        elif self.step == 0:
            self.before = self._measure_quality("before")
            if self.before is not None:
                self.records[EVALUATION_RECORD] = json.dumps(self.before) + "\n"
                self._save()

    def _train(self) -> bool:
        """Train to the last step and save; return False if the run was stopped before."""
        last, every = self.config.steps, self.config.checkpoint.every
        while self.step < last and self.stop.reason is None:
            try:
                metrics = self.recipe.step(self.step + 1)
            except EngineError as error:  # raised while sampling, so the step has not changed the weights
                # A request to stop ends the wait for an engine with an error; report the request, not the error.
                if self.stop.reason is not None:
                    self.say(f"step {self.step + 1} was not trained on: {error}")
                    break
                self.failure = f"step {self.step + 1} was not trained on, the engine failed: {error}"
                self.engine_failed = True
                break

            self.step += 1
            try:
                # Write the file first, so that every step on the console is also in the file.
                with _translate_save_errors(f"the log of step {self.step}"):
                    self.lines.write(self.step, metrics)
                    self.recipe.write_extras(self.step)
                self.sinks.write(self.step, metrics)
            except Exception as error:
                # The weights include this step. Do not save them without its log line: no start would repeat the step.
                if not isinstance(error, _CannotSaveError):
                    self._save()
                raise
            if every and self.step % every == 0 and self.step < last:
                self._save()

        if self.step != self.saved:
            self.say(f"saved {self._save()}")
        return self.step >= last

    def _save(self) -> Path:
        """Write a checkpoint of everything that the next step depends on, after the logs of the steps before."""
        trainer = self.recipe.trainer
        version, weights = self.step, None

        # Weights are stored only for an engine that lags behind: any other gets the policy's.
        if trainer.engine is not None and trainer.engine.weight_version != self.step:
            version = trainer.engine.weight_version
            try:
                weights = trainer.engine.export_weights()
            except (EngineError, OSError) as error:
                self.say(
                    f"the engine's weights, version {version}, are lost ({error}); it goes on with version {self.step}"
                )
                version = self.step

        with _translate_save_errors(f"step {self.step}"):
            self.lines.flush()
            self.sinks.flush()
            self.directory.flush_logs()
            path = save_checkpoint(
                self.directory.checkpoints,
                self.recipe.save_policy,
                trainer.optimizer,
                TrainState(step=self.step, engine_version=version, skipped_steps=trainer.skipped_steps),
                records=self.records,
                engine_weights=weights,
                keep=self.config.checkpoint.keep,
            )
        self.saved = self.step
        return path

    def _measure_quality(self, when: str) -> Evaluation | None:
        """Return the quality of the current policy."""
        trainer = self.recipe.trainer
        if not self.config.log.evaluate:
            return None
        with self.stop.at_once(), _translate_save_errors(f"the evaluation {when} the training"):
            if trainer.engine is not None and trainer.engine.weight_version != self.step:
                trainer.engine.update_weights(trainer.model, version=self.step)
            evaluation = self.recipe.evaluate(when)
        if evaluation is not None:
            self.say(f"{when} training: {self.recipe.evaluation_text.format(**evaluation)}")
        return evaluation

    def _write_summary(self, *, interrupted: bool) -> Summary:
        """Return the outcome of the run and write summary.json, which marks a finished run."""
        summary = Summary(
            run_dir=self.directory.path,
            step=self.saved or 0,
            interrupted=interrupted,
            failure=None if self.failure is None else redact_text(self.failure),
            engine_failed=self.engine_failed,
            skipped_steps=self.recipe.trainer.skipped_steps,
            before=self.before,
            after=self.after,
        )
        text = json.dumps(asdict(summary) | {"run_dir": str(self.directory.path)}, indent=2)
        try:
            write_text_durably(self.directory.summary, text + "\n")
        except OSError as error:
            self.failure = self.failure or str(error)
            summary = dataclasses.replace(summary, interrupted=True, failure=self.failure)
        return summary


@contextmanager
def _translate_save_errors(what: str) -> Iterator[None]:
    """Convert a disk error or non-finite weights to `_CannotSaveError`, which ends the run."""
    try:
        yield
    except (OSError, NonFiniteWeightsError) as error:
        raise _CannotSaveError(f"{what} could not be saved: {error}") from error


def _restore(trainer: Trainer, beginning: Beginning, say: Callable[[str], None]) -> None:
    """Restore a checkpoint except the policy; apply changed options."""
    checkpoint = beginning.checkpoint
    assert checkpoint is not None

    # The stored optimizer state contains options such as the weight decay; set the changed ones again.
    # Keep the stored value of the rest, because a recipe may have changed them, as a schedule does.
    changed = {change.name.rpartition(".")[2] for change in beginning.changes}
    wanted = [{name: group[name] for name in group if name in changed} for group in trainer.optimizer.param_groups]
    trainer.optimizer.load_state_dict(checkpoint.optimizer)
    for group, options in zip(trainer.optimizer.param_groups, wanted, strict=True):
        group.update(options)
    trainer.skipped_steps = checkpoint.state.skipped_steps

    if trainer.engine is None or checkpoint.engine_weights is None:
        return
    if any(change.name.startswith(ENGINE_OPTIONS) for change in beginning.changes):
        say(
            f"the engine starts with the policy's weights, version {trainer.engine.weight_version}, because its "
            "options changed"
        )
    else:
        trainer.engine.import_weights(checkpoint.engine_weights, version=checkpoint.state.engine_version)
