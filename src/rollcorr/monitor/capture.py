"""Keep the last rollouts of a run on disk, so that a run that broke last night can be checked in the morning.

The files store token ids of prompts and responses, log-probs, masks and advantages, in mode 0600. A capture never
raises, blocks for longer than a Monitor does, or changes anything in the training: what it cannot write is dropped, and
logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from rollcorr.monitor.rollout_sample import CollectedRollouts, RolloutSample
from rollcorr.monitor.run_writer import ROWS, RunWriter, WriteTask
from rollcorr.rollout_log.ring import RolloutRing

logger = logging.getLogger("rollcorr.monitor")

_METADATA_BYTES = 32 << 10


class RolloutCapture:
    """Write each step's rollouts to a ring of files, which `rollcorr check DIRECTORY` judges.

    Step 0 stays in the folder: a sampler starts with the trainer's weights, so `check` compares later steps with it.

    Args:
        directory: the folder; it is created with the first step.
        steps: the number of steps to keep in addition to step 0; defaults to 20.
        max_bytes: the size limit of the folder, bytes; defaults to 2 GiB. The older steps are deleted first.
        prompts: whether to store the token ids of prompts; defaults to True. `rollcorr confirm` needs them.
        ids: whether to store token ids at all; defaults to True.
        rank: data-parallel rank of this process; defaults to 0.
        ranks: number of data-parallel ranks; defaults to 1.

    Raises:
        ValueError: `steps` or `max_bytes` is below 1.

    Example:
        >>> RolloutCapture("/data/capture", steps=5).steps
        0
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        steps: int = 20,
        max_bytes: int = 2 << 30,
        prompts: bool = True,
        ids: bool = True,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.steps = 0
        self._ring = RolloutRing(directory=Path(directory), steps=steps, max_bytes=max_bytes, rank=rank, ranks=ranks)
        self._omitted = {"prompt_ids": not (prompts and ids), "response_ids": not ids}
        self._writer: RunWriter | None = None
        self._has_failed = False

        # Read the last step now, before any rank writes, so that all ranks begin with the same number.
        self._first_step = self._ring.last_step() + 1
        self._begin_step()

    def add(
        self,
        response_mask: Tensor,
        columns: Mapping[str, object],
        *,
        cu_seqlens: Tensor | None = None,
        prompt_mask: Tensor | None = None,
    ) -> None:
        """Add a micro-batch to the current step, with columns of the rollout log.

        Args:
            response_mask: non-zero on sampled tokens, (B, T), or (N,) when packed.
            columns: column of the log → values, as in `RolloutBatch.from_padded`.
            cu_seqlens: (B + 1,) token offsets, only when packed.
            prompt_mask: (B, P), non-zero on tokens of a padded column `prompt_ids`; other `prompt_ids` are lists.
        """
        try:
            stored = {name: value for name, value in columns.items() if not self._omitted.get(name)}
            prompts = stored.get("prompt_ids")
            if isinstance(prompts, Tensor) and prompt_mask is not None:
                rows = zip(prompts.cpu(), prompt_mask.cpu() != 0, strict=True)
                stored["prompt_ids"] = prompts = [ids[inside].tolist() for ids, inside in rows]
            if isinstance(prompts, list):
                self._prompt_bytes += 4 * sum(map(len, prompts))
            sequences, selected = self._collected.sampled(
                self.steps, response_mask, stored, cu_seqlens=cu_seqlens, position_ids=None, context_group=None
            )
            self._collected.keep(sequences, selected)
        except Exception as error:
            self._report(error)

    def step(self) -> None:
        """End the current step: its rows go to the writer thread."""
        try:
            number = self._first_step + self.steps
            task = self._collected.task(self._ring.path(number), number, None)
            if task is not None:
                size = task.bytes + self._prompt_bytes + _METADATA_BYTES
                self._writer = self._writer or RunWriter(self._report, lambda: None)
                self._writer.put(WriteTask(ROWS, number, partial(self._write, number, task, size), size))
        except Exception as error:
            self._report(error)
        self.steps += 1
        self._begin_step()

    def flush(self) -> bool:
        """Wait until all steps are written, at most 30 s. Returns whether they are."""
        return self._writer is None or self._writer.flush()

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        if self._writer is not None:
            self._writer.close()

    def _begin_step(self) -> None:
        self._collected = CollectedRollouts(RolloutSample(), self._ring.rank, writes=True)
        self._prompt_bytes = 0

    def _write(self, number: int, task: WriteTask, size: int) -> None:
        """Write a step's file of at most `size` bytes, in the thread."""
        self._ring.directory.mkdir(parents=True, exist_ok=True)

        # A compressed file is smaller than its tensors and metadata, so the folder stays below its limit meanwhile.
        if not self._ring.make_room(size):
            raise ValueError(f"step {number} may need {size:,} bytes, more than the folder's limit; raise max_bytes")
        task.write()

    def _report(self, error: BaseException) -> None:
        """Log the first error."""
        if not self._has_failed:
            logger.error("%s: rollouts are not kept: %s", self._ring.directory, error)
        self._has_failed = True
