"""The names of everything that a run leaves behind.

    RUN/run.lock                  who runs here now; see `rollcorr.run_directory.run_lock`
    RUN/history.json              which run this is, its first options and later changes of them
    RUN/config.yaml               the effective configuration; the checkpoints have it too
    RUN/null.json                 what two correct policies differ by here: measured at the start, or put there
    RUN/metrics.jsonl             one JSON object per step, flushed at once; a number that is not finite is null
    RUN/rollouts/                 one Parquet file per step
    RUN/tensorboard/              the same metrics as events
    RUN/checkpoints/              see `rollcorr.train.checkpoint`
    RUN/reference/                the policy that the run started from, where a KL penalty needs it
    RUN/images/                   pictures that the policy drew before and after the training
    RUN/summary.json              the quality before and after, written at the end

Every file is whole after a crash, except for the last line of `metrics.jsonl`, which readers leave out.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollcorr.run_directory.durable_files import flush_to_disk

STEP_PREFIX = "step_"
RANK_PREFIX = "rank_"


class RunDirectory:
    """A run's directory. Nothing in it is made or read here.

    Args:
        path: the directory.

    Attributes:
        path: the directory.
        history: which run this is, and how its options changed.
        config: the effective configuration.
        null: what two correct policies differ by, measured at the start; the verdict reads it.
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
        """Every file and folder above that a run writes, besides its lock."""
        texts = (self.history, self.config, self.null, self.metrics, self.summary)
        return (*texts, self.rollouts, self.tensorboard, self.checkpoints, self.reference, self.images)

    def flush_logs(self) -> None:
        """Wait until the names of all logs are on the disk; their content is, when its writer has been flushed."""
        for folder in (self.rollouts, self.tensorboard, self.images, self.path):
            if folder.is_dir():
                flush_to_disk(folder)

    def picture(self, when: str) -> Path:
        """What the policy drew "before" or "after" the training, PNG."""
        return self.images / f"{when}.png"

    def rollout_log(self, step: int, rank: int = 0) -> Path:
        """The rollout log of a step, Parquet; those of other ranks than the first have its number in their names.

        Args:
            step: number of the step.
            rank: data-parallel rank.
        """
        of_rank = f"{RANK_PREFIX}{rank:05d}_" if rank else ""
        return self.rollouts / f"{of_rank}{step_name(step)}.parquet"


def step_name(step: int) -> str:
    """How files and folders of a step are called: `step_000050`."""
    return f"{STEP_PREFIX}{step:06d}"


def step_of(path: Path) -> int | None:
    """The step that a file or folder belongs to; None if its name is not that of a step."""
    name = path.name.partition(".")[0]
    digits = name.removeprefix(STEP_PREFIX)
    is_step = digits.isascii() and digits.isdigit() and name == step_name(int(digits))
    return int(digits) if is_step else None


def paths_by_step(folder: Path) -> dict[int, Path]:
    """What a folder holds for each step, in the order of the steps as numbers; other names are passed over.

    Args:
        folder: need not exist.
    """
    found = {path: step_of(path) for path in folder.glob(f"{STEP_PREFIX}*") if not path.suffix}
    return dict(sorted((step, path) for path, step in found.items() if step is not None))
