"""Read denoising schedules from files, and compare two schedules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollcorr.config.documents import load_json
from rollcorr.config.finding import Finding
from rollcorr.diagnostics.log_check.denoising import distinct_values
from rollcorr.diffusion import check_schedule
from rollcorr.rollout_log import read_rollout_log
from rollcorr.run_directory.metrics_file import BadInputError

MOST_BYTES = 1 << 20
"""Maximum size of a schedule file."""
LOG_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")


def read_schedule(path: Path) -> list[float]:
    """Read a schedule: numbers from a JSON file, or the σ of the denoising steps in a rollout log, from noise to data.

    Args:
        path: JSON file, rollout log, or folder of logs.

    Returns:
        The values of the schedule.

    Raises:
        BadInputError: the file does not exist, or contains no schedule.
        RolloutLogError: the log cannot be read.
    """
    if path.is_dir() or path.name.endswith(LOG_SUFFIXES):
        batches = read_rollout_log(path, columns=("sigma", "sigma_next"))
        sigmas = distinct_values(batches, ("sigma", "sigma_next"))
        if not sigmas:
            raise BadInputError(f"{path} records no sigma; `rollcorr train recipe=flow_grpo` writes such logs")
        return sigmas
    if not path.is_file():
        raise BadInputError(f"{path} does not exist; give a JSON file with a list of sigmas, or a rollout log")
    if path.stat().st_size > MOST_BYTES:
        raise BadInputError(f"{path} has {path.stat().st_size:,} bytes; a schedule has at most {MOST_BYTES:,}")
    try:
        values = load_json(path.read_bytes())
    except ValueError as error:
        raise BadInputError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, list) or not values or not all(type(value) in (int, float) for value in values):
        raise BadInputError(f"{path} must hold a list of numbers, such as json.dumps(scheduler.sigmas.tolist())")
    return [float(value) for value in values]


def compare_schedules(rollout: Sequence[float], trainer: Sequence[float], *, tolerance: float = 1e-5) -> Finding | None:
    """Compare two schedules; return None if they agree.

    Args:
        rollout: values of the sampler's schedule, in order.
        trainer: values of the trainer's schedule, in order.
        tolerance: maximum difference, relative to the largest entry; default 1e-5.

    Returns:
        A finding that describes the difference.
    """
    try:
        check_schedule(rollout, trainer, tolerance=tolerance)
    except ValueError as error:
        reason, _, fix = str(error).partition("; ")
        return Finding(code="schedule_differs", title="the schedules differ", reason=reason, fix=fix, severity="error")
    return None
