"""Limit a folder of rollout logs to the last steps of a run: a ring of files, each with one step of one rank."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

_STEP_FILE = re.compile(r"\.?step_(\d+)(?:-rank_(\d+))?\.parquet(\.tmp-.*)?")


@dataclass(frozen=True, kw_only=True)
class RolloutRing:
    """The files of one rank in the folder. The ranks share the size limit, so that no rank deletes another one's files.

    Step 0 is kept in addition to the last steps, because a sampler starts with the trainer's weights: `rollcorr check`
    compares later steps with it. A file is complete or missing, because `RolloutLogWriter` renames it. A file of a
    killed writer stays hidden, and the next `make_room` of its rank deletes it.

    Attributes:
        directory: the folder.
        steps: the number of steps to keep, at least 1, in addition to step 0.
        max_bytes: the size limit of the folder, bytes.
        rank: rank of the process that writes.
        ranks: number of such processes.
    """

    directory: Path
    steps: int = 20
    max_bytes: int = 2 << 30
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1 or self.max_bytes < 1:
            raise ValueError(f"steps and max_bytes must be at least 1, got {self.steps} and {self.max_bytes}")

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        rank = "" if self.ranks == 1 else f"-rank_{self.rank:04d}"
        return self.directory / f"step_{step:06d}{rank}.parquet"

    def last_step(self) -> int:
        """Return the last step in the folder, of any rank; −1 without files. A resumed run continues after it."""
        return max((int(match[1]) for _, match in self._files()), default=-1)

    def make_room(self, size: int) -> bool:
        """Delete this rank's oldest steps until one more file of `size` bytes fits. Step 0 is the last to go.

        Returns:
            False if the file alone exceeds this rank's share of the limit; no file is deleted then.

        Raises:
            OSError: a file cannot be deleted.
        """
        share = self.max_bytes // self.ranks
        if size > share:
            return False
        own = [(path, match) for path, match in self._files() if int(match[2] or 0) == self.rank]
        for path, match in own:
            if match[3]:
                path.unlink(missing_ok=True)
        whole = sorted((int(match[1]) or math.inf, path) for path, match in own if not match[3])
        sizes = [path.stat().st_size for _, path in whole]
        while whole and (len(whole) > self.steps or sum(sizes) + size > share):
            whole.pop(0)[1].unlink(missing_ok=True)
            sizes.pop(0)
        return True

    def _files(self) -> list[tuple[Path, re.Match[str]]]:
        matches = ((path, _STEP_FILE.fullmatch(path.name)) for path in self.directory.glob("*"))
        return [(path, match) for path, match in matches if match]
