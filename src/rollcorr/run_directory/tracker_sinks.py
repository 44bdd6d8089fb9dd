"""Sinks of trackers that have packages of their own, and `Sinks`, by which every run writes to its sinks.

`NAMED_SINKS` lists every sink that can be chosen by its name, as in `rollcorr.Monitor(..., sinks=["wandb"])` or
`log.sinks: [wandb]`. A tracker's package is imported when its sink is made, and is behind an extra. `write` and
`close` are called in one thread, which may differ from the one that makes the sink.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.sinks import Sink, TensorBoard

logger = logging.getLogger("rollcorr.run_directory")

SHOWN = ("reward/mean", "rollout_corr/k3_kl", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_eff_sample_size")
"""Metrics of a line on the standard output, where a step has them."""


class WeightsAndBiases:
    """Weights & Biases. A run that the program has begun already is used, and left open; otherwise one is begun here.

    In a run of the program's own, the steps are its own too: the number of the step is the metric `monitor/step`.
    Offline, with WANDB_MODE=offline, the files are in the run's directory.

    Args:
        directory: the run's directory.
        start: steps that are done already.

    Raises:
        ImportError: the package is missing; the message names the extra.
    """

    def __init__(self, directory: RunDirectory, start: int = 0) -> None:
        wandb = _package("wandb")
        self._is_own = wandb.run is None
        self._run = wandb.run or wandb.init(name=directory.path.name, dir=str(directory.path))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        if self._is_own:
            self._run.log(dict(metrics), step=step)
        else:
            self._run.log({"monitor/step": step, **metrics})

    def close(self) -> None:
        """End the run, if it was begun here."""
        if self._is_own:
            self._run.finish()


class MLflow:
    """MLflow. A run that the program has begun already is used, and left open; otherwise the first step begins one.

    A number that is not finite is left out, because MLflow's data bases refuse some of them.

    Args:
        directory: the run's directory.
        start: steps that are done already.

    Raises:
        ImportError: the package is missing; the message names the extra.
    """

    def __init__(self, directory: RunDirectory, start: int = 0) -> None:
        self._mlflow = _package("mlflow")
        active = self._mlflow.active_run()
        self._name, self._is_own = directory.path.name, False
        self._run_id = None if active is None else active.info.run_id

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        # MLflow's active run belongs to a thread, so a run of our own begins in the thread that also ends it.
        if self._run_id is None:
            self._run_id, self._is_own = self._mlflow.start_run(run_name=self._name).info.run_id, True
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step, run_id=self._run_id)

    def close(self) -> None:
        """End the run, if it was begun here."""
        if self._is_own:
            self._mlflow.end_run()


class Trackio:
    """Trackio: a run of its own, in the project `rollcorr`. A number that is not finite is left out.

    Args:
        directory: the run's directory.
        start: steps that are done already.

    Raises:
        ImportError: the package is missing; the message names the extra.
    """

    def __init__(self, directory: RunDirectory, start: int = 0) -> None:
        self._trackio = _package("trackio")
        self._trackio.init(project="rollcorr", name=directory.path.name)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        self._trackio.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """End the run."""
        self._trackio.finish()


class StandardOutput:
    """One line for each step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line."""
        sys.stdout.write(step_line(step, metrics) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing to do."""


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """A step in one line: the metrics of `SHOWN` that it has."""
    return "  ".join([f"step {step}", *(f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics)])


NAMED_SINKS: dict[str, Callable[[RunDirectory, int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
    "stdout": lambda directory, start: StandardOutput(),
}
"""Name → sink, made from the run's directory and the number of steps that are done already."""


def check_sink_name(name: str) -> None:
    """Check that `NAMED_SINKS` has a sink of a name.

    Raises:
        ValueError: it does not; the message lists the names.
    """
    if name not in NAMED_SINKS:
        raise ValueError(f"no sink is called {name!r}; there are {', '.join(NAMED_SINKS)}, or give an object")


class Sinks:
    """Sinks that cannot end a run: an exception is logged, and the sink gets no further steps.

    Args:
        sinks: objects, or names of `NAMED_SINKS`; each gets every step, in the order given.
        directory: of the run.
        start: steps that are done already.
        report: called with a line and the error of each sink that fails; defaults to an entry of the log.

    Raises:
        ValueError: there is no sink of that name.
        ImportError: its package is missing; the message names the extra. A tracker may raise errors of its own here.
    """

    def __init__(
        self,
        sinks: str | Sequence[str | Sink],
        directory: RunDirectory,
        start: int = 0,
        *,
        report: Callable[[str, BaseException], object] | None = None,
    ) -> None:
        self._report = report or (lambda line, _: logger.error("%s", line))
        self._sinks: list[Sink] = []
        self._working: list[Sink] = []
        try:
            for sink in (sinks,) if isinstance(sinks, str) else sinks:
                if isinstance(sink, str):
                    check_sink_name(sink)
                    self._sinks.append(NAMED_SINKS[sink](directory, start))
                else:
                    self._sinks.append(sink)
        except BaseException:
            self.close()
            raise
        self._working = list(self._sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give a step to every sink that has not failed.

        Args:
            step: number of the step.
            metrics: name → number.
        """
        for sink in self._working:
            self._call(sink, f"step {step}: ", "write", step, dict(metrics))

    def flush(self) -> None:
        """Call `flush` of each sink that has it: the steps so far are on the disk then."""
        for sink in self._working:
            if hasattr(sink, "flush"):
                self._call(sink, "", "flush")

    def close(self) -> None:
        """Close all, the last one first, also those that have failed."""
        for sink in reversed(self._sinks):
            self._call(sink, "at the end: ", "close")
        self._sinks, self._working = [], []

    def _call(self, sink: Sink, when: str, method: str, *values: object) -> None:
        """Call a method of a sink. A program that a tracker wants to end goes on as well."""
        try:
            getattr(sink, method)(*values)
        except BaseException as error:
            # Ctrl-C comes to the main thread. In a different one, it is the sink that raises KeyboardInterrupt.
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and not isinstance(error, (Exception, SystemExit)):
                raise
            self._working = [working for working in self._working if working is not sink]
            self._report(f"{when}{type(sink).__name__} failed and gets no further steps: {error}", error)


def _package(name: str) -> Any:  # noqa: ANN401 - a module without types
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"the sink {name!r} needs the package {name}: pip install 'rollcorr[{name}]'") from error
