"""What every recipe's run does around its steps: find what to resume from, and stop on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rollcorr.run_directory.run_logger import RunLogger
from rollcorr.train.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint
from rollcorr.train.config_file import RunConfig, changed_options, load_config


class SessionConfig(RunConfig, Protocol):
    """The options that every recipe has."""

    @property
    def run_dir(self) -> str:
        """Directory of the run."""
        ...

    @property
    def resume(self) -> bool:
        """Whether to go on from the newest checkpoint."""
        ...

    @property
    def device(self) -> str:
        """Where the policy is."""
        ...


def resume_command(config: SessionConfig) -> str:
    """The command that goes on with a run."""
    return f"rollcorr train {Path(config.run_dir) / 'config.yaml'} resume=true"


def find_checkpoint(config: SessionConfig, run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """What to resume from, and which options changed since then; refuses to mix two runs.

    Raises:
        FileExistsError: the directory holds a run already and `resume` is false.
        FileNotFoundError: there is nothing to resume from.
        ValueError: the checkpoint cannot be read.
    """
    newest = latest_checkpoint(run_dir / "checkpoints")
    if config.resume and newest is None:
        raise FileNotFoundError(f"run_dir {str(run_dir)!r} has no checkpoint to resume from: leave out resume=true")
    if not config.resume and (newest is not None or (run_dir / "metrics.jsonl").is_file()):
        way = "add resume=true to go on with it" if newest is not None else "delete it (it has no checkpoint)"
        raise FileExistsError(f"run_dir {str(run_dir)!r} holds a run already: {way}, or choose another run_dir")
    if newest is None:
        return None, []
    saved = run_dir / "config.yaml"
    changes = changed_options(load_config(saved, (), type(config)), config) if saved.is_file() else []
    return load_checkpoint(newest, device=config.device), changes


@contextmanager
def interruption(log: RunLogger) -> Iterator[Callable[[], bool]]:
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
        log.say("stopping after this step (once more to stop at once, losing it)")

    if threading.current_thread() is threading.main_thread():  # Python delivers signals there only
        previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)
