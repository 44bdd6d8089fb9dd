"""RUN/reference: the policy that a run started from, for its KL penalty; written once, atomically."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from torch import nn

from rollcorr.run_directory.durable_files import atomic_write
from rollcorr.train.checkpoint import Checkpoint, file_sha256

# Record of a checkpoint: SHA-256 of the reference policy, if the run keeps one.
REFERENCE_RECORD = "reference.json"


def keep_reference(folder: Path, save_policy: Callable[[Path], object]) -> str:
    """Write the reference policy; replace one from an interrupted start.

    Args:
        folder: RUN/reference.
        save_policy: writes the policy into a directory.

    Returns:
        The record for the checkpoints.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    with atomic_write(folder) as partial:
        partial.mkdir()
        save_policy(partial)
    return json.dumps({"sha256": folder_sha256(folder)}) + "\n"


def reference_model(
    policy: nn.Module, folder: Path, checkpoint: Checkpoint | None, load: Callable[[Path], nn.Module]
) -> nn.Module:
    """Return the frozen policy that the run started from: a copy of `policy`, or RUN/reference in a resumed run.

    Args:
        policy: the model to train.
        folder: RUN/reference.
        checkpoint: checkpoint to resume from; optional. A new run has no checkpoint.
        load: reads the model in a folder.

    Raises:
        ValueError: the run began without a reference policy, or one of its files was changed or is missing.
    """
    if checkpoint is None:
        return copy.deepcopy(policy).eval().requires_grad_(False)

    record = checkpoint.records.get(REFERENCE_RECORD)
    if record is None:
        raise ValueError(
            "algorithm.loss.kl_coef needs the policy that the run started from, which this run did not keep, because "
            "it began with kl_coef=0: set it to 0 again, or start another run"
        )
    if folder_sha256(folder) != json.loads(record)["sha256"]:
        raise ValueError(
            f"{folder} is not the policy that the run started from: a file in it was changed, lost or added; put the "
            "folder back as it was, or set algorithm.loss.kl_coef to 0"
        )
    return load(folder).eval().requires_grad_(False)


def folder_sha256(folder: Path) -> str:
    """Return the SHA-256 over the names and the contents of all files in a folder, in hexadecimal."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole.update(f"{path.relative_to(folder).as_posix()}\0{file_sha256(path)}\n".encode())
    return whole.hexdigest()
