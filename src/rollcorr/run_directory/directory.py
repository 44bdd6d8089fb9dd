"""The names of everything that a run leaves behind.

    RUN/config.yaml               the effective configuration
    RUN/metrics.jsonl             one JSON object per step, flushed at once; a number that is not finite is null
    RUN/rollouts/                 one Parquet file per step
    RUN/tensorboard/              the same metrics as events
    RUN/checkpoints/              see `rollcorr.train.checkpoint`
    RUN/reference/                the policy that the run started from, where a KL penalty needs it
    RUN/images/                   pictures that the policy drew before and after the training
    RUN/evaluation_before.json    the quality before the first step, for a resumed run
    RUN/summary.json              the quality before and after, written at the end

Every file is whole after a crash, except for the last line of `metrics.jsonl`, which readers leave out.
"""

from __future__ import annotations

from pathlib import Path

STEP_PREFIX = "step_"
RANK_PREFIX = "rank_"


class RunDirectory:
    """A run's directory. Nothing is made or read here.

    Args:
        path: the directory.

    Attributes:
        path: the directory.
        config: the effective configuration.
        metrics: one JSON object per step.
        rollouts: folder of the rollout logs.
        tensorboard: folder of the TensorBoard events.
        checkpoints: folder of the checkpoints.
        reference: folder of the reference policy.
        evaluation_before: the quality before the first step.
        summary: the quality before and after.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.reference = path / "reference"
        self.evaluation_before = path / "evaluation_before.json"
        self.summary = path / "summary.json"

    def picture(self, when: str) -> Path:
        """What the policy drew "before" or "after" the training, PNG."""
        return self.path / "images" / f"{when}.png"

    def rollout_log(self, step: int, rank: int = 0) -> Path:
        """The rollout log of a step, Parquet; those of other ranks than the first have its number in their names."""
        of_rank = f"{RANK_PREFIX}{rank:05d}_" if rank else ""
        return self.rollouts / f"{of_rank}{step_name(step)}.parquet"


def step_name(step: int) -> str:
    """How files and folders of a step are called: `step_000050`."""
    return f"{STEP_PREFIX}{step:06d}"


def step_of(path: Path) -> int:
    """The step that a file or folder belongs to."""
    return int(path.stem.removeprefix(STEP_PREFIX))
