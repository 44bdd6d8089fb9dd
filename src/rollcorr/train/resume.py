"""Decide where a run begins from its directory, check that it can resume there, and format its messages."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcorr.config.documents import load_yaml
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.train.checkpoint import Checkpoint, has_checkpoints, newest_sound_checkpoint
from rollcorr.train.option_changes import (
    OptionChange,
    RunHistory,
    compared_options,
    find_changes,
    options_of,
    refuse_fixed,
)
from rollcorr.train.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The starting point of a run.

    Attributes:
        checkpoint: checkpoint to resume from; optional. A new run has no checkpoint.
        history: identity of the run, with the changes below.
        changes: options that differ from the checkpoint's, or from an interrupted start.
        damaged: one line for each skipped checkpoint.
    """

    checkpoint: Checkpoint | None
    history: RunHistory
    changes: list[OptionChange]
    damaged: list[str]

    @property
    def step(self) -> int:
        """Return the number of completed steps."""
        return 0 if self.checkpoint is None else self.checkpoint.state.step

    @property
    def saved(self) -> int | None:
        """Return the step of the newest sound checkpoint, or None without one."""
        return None if self.checkpoint is None else self.checkpoint.state.step


def find_beginning(config: RunConfig, directory: RunDirectory) -> Beginning:
    """Decide where a run begins. Partial checkpoints are deleted; no other file changes.

    Raises:
        FileExistsError: `resume` is false and the directory contains a run, or it contains unrelated files.
        FileNotFoundError: `resume` is true and there is no checkpoint.
        ValueError: no checkpoint is sound, a fixed option was changed, or files of two runs are mixed.
    """
    place = f"run_dir {str(directory.path)!r}"
    stored = None
    with suppress(OSError, ValueError):  # missing or damaged: the checkpoints contain a copy
        stored = RunHistory.from_json(directory.history.read_text(encoding="utf-8"))
    if not has_checkpoints(directory.checkpoints):
        return _begin_without_checkpoint(config, directory, stored)
    if config.resume is False:
        raise FileExistsError(
            f"{place} holds a run already: leave out resume=false to go on with it, or choose another run_dir"
        )

    checkpoint, damaged = newest_sound_checkpoint(directory.checkpoints)
    if checkpoint is None:
        raise ValueError(f"{place} has no sound checkpoint to go on from: {'; '.join(damaged)}")
    try:
        history = RunHistory.from_json(checkpoint.records[directory.history.name])
    except (KeyError, ValueError) as error:
        reason = "is missing" if isinstance(error, KeyError) else f"cannot be used: {error}"
        raise ValueError(
            f"{checkpoint.path} has no configuration to compare with, its {directory.history.name} {reason}. Start "
            f"another run from its policy with model.path={checkpoint.path}"
        ) from error
    if stored is not None and stored.run != history.run:
        raise ValueError(
            f"{checkpoint.path} belongs to run {history.run}, and {directory.history} to run {stored.run}: move the "
            "one that does not belong there to another directory"
        )

    changes = find_changes(history.options, config)
    refuse_fixed(changes, str(directory.path))
    return Beginning(
        checkpoint=checkpoint,
        history=history.changed(changes, after_step=checkpoint.state.step),
        changes=changes,
        damaged=damaged,
    )


def finished_summary(directory: RunDirectory, *, step: int, steps: int) -> dict[str, Any] | None:
    """Return summary.json if it records the end of a run with all steps done, else None.

    Args:
        directory: the run's directory.
        step: step of the newest checkpoint.
        steps: total steps of the run.
    """
    if step < steps:
        return None
    try:
        summary = json.loads(directory.summary.read_text(encoding="utf-8"))
        is_finished = summary["step"] == step and not summary["interrupted"] and summary["failure"] is None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return summary if is_finished else None


def _begin_without_checkpoint(config: RunConfig, directory: RunDirectory, stored: RunHistory | None) -> Beginning:
    """Begin a run without checkpoints: a new or an interrupted start. Unrelated files raise `FileExistsError`."""
    place = f"run_dir {str(directory.path)!r}"
    if config.resume is True:
        raise FileNotFoundError(f"{place} has no checkpoint to resume from: leave out resume=true to start a run")

    # A run writes a checkpoint before it logs a step. Here the checkpoints were lost: this is no interrupted start.
    if directory.metrics.is_file() and directory.metrics.stat().st_size:
        raise FileExistsError(
            f"{place} holds a run without checkpoints: {directory.metrics} has steps of it. Choose another run_dir, or "
            "move the directory away"
        )
    if stored is None:
        unrelated = [
            path.name
            for path in directory.written
            if path.exists() and not _is_null_or_same_config(path, directory, config)
        ]
        if unrelated:
            raise FileExistsError(
                f"{place} holds files that are not of a run and would be written over: {', '.join(unrelated)}. Choose "
                "another run_dir, or move them away"
            )
        history = RunHistory.begin(compared_options(config))
        return Beginning(checkpoint=None, history=history, changes=[], damaged=[])

    if config.resume is False:
        raise FileExistsError(
            f"{place} holds the start of a run: leave out resume=false to start it again, or choose another run_dir"
        )
    changes = find_changes(stored.options, config)
    refuse_fixed(changes, str(directory.path))

    # No step was trained under the old options, so the run begins with the new ones.
    history = replace(RunHistory.begin(compared_options(config)), run=stored.run)
    return Beginning(checkpoint=None, history=history, changes=changes, damaged=[])


def _is_null_or_same_config(path: Path, directory: RunDirectory, config: RunConfig) -> bool:
    """Return whether a file is a null, which is kept, or a config.yaml with the same options."""
    if path != directory.config:
        return path == directory.null
    try:
        return options_of(load_yaml(path.read_text(encoding="utf-8"))) == compared_options(config)
    except (OSError, ValueError, AttributeError):
        return False


def beginning_lines(beginning: Beginning, config: RunConfig, *, is_finished: bool) -> list[str]:
    """Return messages about the contents of the run's directory.

    Args:
        beginning: where the run begins.
        config: the run.
        is_finished: the run is complete.
    """
    lines = [f"passed over: {line}" for line in beginning.damaged]
    if is_finished:
        lines.append(f"finished: step {beginning.step} of {config.steps} is done; give more steps to continue")
    elif beginning.checkpoint is not None:
        lines.append(f"continuing after step {beginning.step} of {config.steps}, from {beginning.checkpoint.path}")

    effect = "changed, without effect because no step is left" if is_finished else "changed since this run began"
    return [*lines, *(f"{effect}: {change}" for change in beginning.changes)]


def end_lines(config: RunConfig, *, saved: int | None, failure: str | None, stopped_by: str | None) -> list[str]:
    """Return messages: why the run ended, and the effect of repeating the command.

    Args:
        config: the run.
        saved: step of the newest sound checkpoint; None without one.
        failure: message of the error; optional.
        stopped_by: source of a request to stop before the end; optional.
    """
    if failure is not None:
        return [f"stopped: {failure}", _describe_next_start(config, saved)]
    if stopped_by is not None:
        return [
            f"stopped by {stopped_by} after step {saved or 0} of {config.steps}",
            _describe_next_start(config, saved),
        ]
    return [f"finished: {saved} of {config.steps} steps; the same command reports this and trains nothing"]


def _describe_next_start(config: RunConfig, saved: int | None) -> str:
    command = "the same command without resume=false" if config.resume is False else "the same command"
    if saved is None:
        return f"{command} starts again, because nothing is saved yet"
    if saved >= config.steps:
        return f"{command} repeats the evaluation and trains nothing"
    return f"{command} continues after step {saved}"
