"""Paths of the files in a run directory.

    RUN/run.lock                  lock of the current process; see `rollcorr.run_directory.run_lock`
    RUN/history.json              identity of the run, its first options and later changes of them
    RUN/config.yaml               the effective configuration; each checkpoint also contains it
    RUN/null.json                 difference between two correct policies: measured at the start, or put there
    RUN/metrics.jsonl             one JSON object per step, flushed at once; a number that is not finite is null
    RUN/rollouts/                 one Parquet file per step
    RUN/tensorboard/              the same metrics as events
    RUN/checkpoints/              see `rollcorr.train.checkpoint`
    RUN/reference/                the initial policy, if a KL penalty needs it
    RUN/images/                   pictures that the policy drew before and after the training
    RUN/summary.json              the quality before and after, written at the end

Every file is complete after a crash, except for the last line of `metrics.jsonl`, which readers skip.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollcorr.run_directory.durable_files import flush_to_disk

STEP_PREFIX = "step_"
RANK_PREFIX = "rank_"


class RunDirectory:
    """Paths of a run directory. This class creates and reads no files.

    Args:
        path: the directory.

    Attributes:
        path: the directory.
        history: identity of the run and the changes of its options.
        config: the effective configuration.
        null: difference between two correct policies, measured at the start; the verdict reads it.
        metrics: one JSON object per step.
        rollouts: folder of the rollout logs.
        tensorboard: folder of the TensorBoard events.
        checkpoints: folder of the checkpoints.
        reference: folder of the reference policy.
        images: folder of the pictures.
        summary: the quality before and after.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        self.path = path
        self.history = path / "history.json"
        self.config = path / "config.yaml"
        self.null = path / "null.json"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.reference = path / "reference"
        self.images = path / "images"
        self.summary = path / "summary.json"

    @property
    def written(self) -> tuple[Path, ...]:
        """Return every file and folder above that a run writes, except the lock."""
        texts = (self.history, self.config, self.null, self.metrics, self.summary)
        return (*texts, self.rollouts, self.tensorboard, self.checkpoints, self.reference, self.images)

    def flush_logs(self) -> None:
        """Flush the directory entries of all logs to the disk. Flush their content with the writers first."""
        for folder in (self.rollouts, self.tensorboard, self.images, self.path):
            if folder.is_dir():
                flush_to_disk(folder)

    def picture(self, when: str) -> Path:
        """Return the path of the PNG that the policy drew "before" or "after" the training."""
        return self.images / f"{when}.png"

    def rollout_log(self, step: int, rank: int = 0) -> Path:
        """Return the path of a step's rollout log, Parquet. The name contains the rank if it is not 0.

        Args:
            step: number of the step.
            rank: data-parallel rank; defaults to 0.
        """
        of_rank = f"{RANK_PREFIX}{rank:05d}_" if rank else ""
        return self.rollouts / f"{of_rank}{step_name(step)}.parquet"


def step_name(step: int) -> str:
    """Return the name of a step's files and folders: `step_000050`."""
    return f"{STEP_PREFIX}{step:06d}"


def step_of(path: Path) -> int | None:
    """Parse the step number in the name of a file or folder.

    Returns:
        The step, or None if the name contains no step.
    """
    name = path.name.partition(".")[0]
    digits = name.removeprefix(STEP_PREFIX)
    is_step = digits.isascii() and digits.isdigit() and name == step_name(int(digits))
    return int(digits) if is_step else None


def paths_by_step(folder: Path) -> dict[int, Path]:
    """Return the paths of a folder by step, in numeric order; skip other names.

    Args:
        folder: the folder; it need not exist.
    """
    found = {path: step_of(path) for path in folder.glob(f"{STEP_PREFIX}*") if not path.suffix}
    return dict(sorted((step, path) for path, step in found.items() if step is not None))
