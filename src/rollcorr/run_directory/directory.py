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

from dataclasses import dataclass
from pathlib import Path

STEP_PREFIX = "step_"


@dataclass(frozen=True)
class RunDirectory:
    """A run's directory. Nothing is made or read here.

    Attributes:
        path: the directory.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The effective configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Folder of the rollout logs."""
        return self.path / "rollouts"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def reference(self) -> Path:
        """Folder of the reference policy."""
        return self.path / "reference"

    @property
    def evaluation_before(self) -> Path:
        """The quality before the first step, JSON."""
        return self.path / "evaluation_before.json"

    @property
    def summary(self) -> Path:
        """The quality before and after, JSON."""
        return self.path / "summary.json"

    def picture(self, when: str) -> Path:
        """What the policy drew "before" or "after" the training, PNG."""
        return self.path / "images" / f"{when}.png"

    def rollout_log(self, step: int) -> Path:
        """The rollout log of a step, Parquet."""
        return self.rollouts / f"{step_name(step)}.parquet"


def step_name(step: int) -> str:
    """How files and folders of a step are called: `step_000050`."""
    return f"{STEP_PREFIX}{step:06d}"


def step_of(path: Path) -> int:
    """The step that a file or folder belongs to."""
    return int(path.stem.removeprefix(STEP_PREFIX))
