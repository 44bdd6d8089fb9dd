"""Keep the rollouts of a TRL run on disk: `attach(…, keep_rollouts=DIRECTORY)`."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from rollcorr.integrations.trl.generation_batch import Trainer
from rollcorr.monitor.capture import RolloutCapture


def make_capture(trainer: Trainer, given: str | os.PathLike[str] | RolloutCapture) -> RolloutCapture:
    """Return the given capture, or one in the given folder for this rank of the trainer, with the default limits."""
    if isinstance(given, RolloutCapture):
        return given
    accelerator = trainer.accelerator
    return RolloutCapture(given, rank=accelerator.process_index, ranks=accelerator.num_processes)


def keep_batch(trainer: Trainer, batch: dict[str, Any], old: Tensor, rollout: Tensor, mask: Tensor) -> None:
    """Add a generation batch, as one step, to the trainer's capture, if there is one. Never raises.

    Args:
        trainer: the trainer.
        batch: TRL's generation batch.
        old: log π_old of the completions, (B, T) nats.
        rollout: log μ, same shape.
        mask: tokens in the loss, same shape.
    """
    capture: RolloutCapture | None = getattr(trainer, "_rollout_capture", None)
    if capture is None:
        return
    columns = {"old_log_prob": old, "rollout_log_prob": rollout}
    columns |= {name: batch[key] for name, key in _COLUMNS.items() if batch.get(key) is not None}
    capture.add(mask, columns, prompt_mask=batch.get("prompt_mask"))
    capture.step()


_COLUMNS = {"response_ids": "completion_ids", "advantages": "advantages", "prompt_ids": "prompt_ids"}
