"""Sinks for trackers with their own packages, and `Sinks`, which calls all sinks of a run.

`NAMED_SINKS` contains every sink that can be chosen by name, as in `rollcorr.Monitor(..., sinks=["wandb"])` or
`log.sinks: [wandb]`. A tracker's package is an optional dependency, imported when its sink is constructed. `write` and
`close` are called in one thread, which may differ from the constructor's thread.
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

SHOWN = (
    "reward/mean",
    "rollout_corr/k3_kl",
    "rollout_corr/k3_kl_lag0",
    "rollout_corr/k3_kl_staleness",
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_eff_sample_size",
)
"""Metrics in a line on the standard output, if a step has them."""


class WeightsAndBiases:
    """Sink for Weights & Biases. It uses the program's active run and keeps it open; by default it starts its own run.

    The program's active run has its own step counter, so the step is logged as the metric `monitor/step`. With
    WANDB_MODE=offline, the files are in the run's directory.

    Args:
        directory: the run's directory.
        start: number of completed steps; defaults to 0.

    Raises:
        ImportError: the package is missing; the message names the extra.
    """

    def __init__(self, directory: RunDirectory, start: int = 0) -> None:
        wandb = _import_package("wandb")
        self._is_own = wandb.run is None
        self._run = wandb.run or wandb.init(name=directory.path.name, dir=str(directory.path))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        if self._is_own:
            self._run.log(dict(metrics), step=step)
        else:
            self._run.log({"monitor/step": step, **metrics})

    def close(self) -> None:
        """End the run if this sink started it."""
        if self._is_own:
            self._run.finish()


class MLflow:
    """Sink for MLflow. It uses the program's active run and keeps it open; otherwise the first step starts a run.

    Non-finite numbers are skipped, because some of MLflow's databases reject them.

    Args:
        directory: the run's directory.
        start: number of completed steps; defaults to 0.

    Raises:
        ImportError: the package is missing; the message names the extra.
    """

    def __init__(self, directory: RunDirectory, start: int = 0) -> None:
        self._mlflow = _import_package("mlflow")
        active = self._mlflow.active_run()
        self._name, self._is_own = directory.path.name, False
        self._run_id = None if active is None else active.info.run_id

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        # MLflow's active run belongs to a thread, so start our run in the thread that also ends it.
        if self._run_id is None:
            self._run_id, self._is_own = self._mlflow.start_run(run_name=self._name).info.run_id, True
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step, run_id=self._run_id)

    def close(self) -> None:
        """End the run if this sink started it."""
        if self._is_own:
            self._mlflow.end_run()


class Trackio:
    """Sink for Trackio. It starts its own run in the project `rollcorr`. Non-finite numbers are skipped.

    Args:
        directory: the run's directory.
        start: number of completed steps; defaults to 0.

    Raises:
        ImportError: the package is missing; the message names the extra.
    """

    def __init__(self, directory: RunDirectory, start: int = 0) -> None:
        self._trackio = _import_package("trackio")
        self._trackio.init(project="rollcorr", name=directory.path.name)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        self._trackio.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """End the run."""
        self._trackio.finish()


class StandardOutput:
    """Sink that prints one line per step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line."""
        sys.stdout.write(step_line(step, metrics) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Close the sink: no action is needed."""


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """Format a step as one line with its metrics of `SHOWN`."""
    return "  ".join([f"step {step}", *(f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics)])


NAMED_SINKS: dict[str, Callable[[RunDirectory, int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
    "stdout": lambda directory, start: StandardOutput(),
}
"""Name → callable that constructs the sink from the run's directory and the number of completed steps."""


def check_sink_name(name: str) -> None:
    """Check that `NAMED_SINKS` contains a name.

    Raises:
        ValueError: the name is unknown; the message lists the names.
    """
    if name not in NAMED_SINKS:
        raise ValueError(f"no sink is called {name!r}; there are {', '.join(NAMED_SINKS)}, or give an object")


class Sinks:
    """Wrapper of several sinks that isolates the run from their errors. A failed sink is logged and disabled.

    Args:
        sinks: objects, or names of `NAMED_SINKS`; each receives every step, in the given order.
        directory: the run's directory.
        start: number of completed steps; defaults to 0.
        report: callback with a line and the error of each failed sink; by default, log the line.

    Raises:
        ValueError: a name is unknown.
        ImportError: a package is missing; the message names the extra. A tracker may also raise its own errors.
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
        """Write a step to every sink that has not failed.

        Args:
            step: number of the step.
            metrics: name → number.
        """
        for sink in self._working:
            self._call_sink(sink, f"step {step}: ", "write", step, dict(metrics))

    def flush(self) -> None:
        """Call `flush` of each sink that has it, which flushes the steps so far to the disk."""
        for sink in self._working:
            if hasattr(sink, "flush"):
                self._call_sink(sink, "", "flush")

    def close(self) -> None:
        """Close all sinks in reverse order, including failed ones."""
        for sink in reversed(self._sinks):
            self._call_sink(sink, "at the end: ", "close")
        self._sinks, self._working = [], []

    def _call_sink(self, sink: Sink, when: str, method: str, *values: object) -> None:
        """Call a method of a sink and catch its errors, also SystemExit."""
        try:
            getattr(sink, method)(*values)
        except BaseException as error:
            # Ctrl-C arrives in the main thread. In any other thread, KeyboardInterrupt comes from the sink.
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and not isinstance(error, (Exception, SystemExit)):
                raise
            self._working = [working for working in self._working if working is not sink]
            self._report(f"{when}{type(sink).__name__} failed and gets no further steps: {error}", error)


def _import_package(name: str) -> Any:  # noqa: ANN401 - a module without types
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"the sink {name!r} needs the package {name}: pip install 'rollcorr[{name}]'") from error
