"""What a run says at its beginning and its end: where it stands, and what the same command does next."""

from __future__ import annotations

from rollcorr.train.resume import Beginning
from rollcorr.train.run_config import RunConfig


def beginning_lines(beginning: Beginning, config: RunConfig, *, is_finished: bool) -> list[str]:
    """What was found in the run's directory.

    Args:
        beginning: where the run begins.
        config: the run.
        is_finished: nothing is left to do.
    """
    lines = [f"passed over: {line}" for line in beginning.damaged]
    if is_finished:
        lines.append(f"finished: step {beginning.step} of {config.steps} is done; the same command with more continues")
    elif beginning.checkpoint is not None:
        lines.append(f"continuing after step {beginning.step} of {config.steps}, from {beginning.checkpoint.path}")

    effect = "changed, without effect because no step is left" if is_finished else "changed since this run began"
    return [*lines, *(f"{effect}: {change}" for change in beginning.changes)]


def end_lines(config: RunConfig, *, saved: int | None, failure: str | None, stopped_by: str | None) -> list[str]:
    """Why a run ended, and what the same command does next.

    Args:
        config: the run.
        saved: step of the newest sound checkpoint; None if there is none.
        failure: what failed; None if nothing did.
        stopped_by: what asked to stop before the end; None if nothing did.
    """
    if failure is not None:
        return [f"stopped: {failure}", _next(config, saved)]
    if stopped_by is not None:
        return [f"stopped by {stopped_by} after step {saved or 0} of {config.steps}", _next(config, saved)]
    return [f"finished: {saved} of {config.steps} steps; the same command reports this and trains nothing"]


def _next(config: RunConfig, saved: int | None) -> str:
    command = "the same command without resume=false" if config.resume is False else "the same command"
    if saved is None:
        return f"{command} starts again, because nothing is saved yet"
    if saved >= config.steps:
        return f"{command} repeats the evaluation and trains nothing"
    return f"{command} continues after step {saved}"
