"""Checkpoints: everything that the next step depends on, written so that a killed run leaves whole ones only.

    RUN/checkpoints/step_000050/
        config.json, model.safetensors, tokenizer…   the policy, as its recipe writes it; `model.path` may point here
        optimizer.pt                                 AdamW's moments
        engine.safetensors                           the engine's weights, when they lag behind the policy's
        state.json                                   step, engine version, skipped optimizer steps

No random state is stored: every draw is a function of (seed, purpose, step), see `rollcorr.train.steps`.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from rollcorr.run_directory.directory import STEP_PREFIX, step_name


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run is.

    Attributes:
        step: completed training steps; also the version of the policy.
        engine_version: version of the weights that the engine samples with.
        skipped_steps: optimizer steps left out so far: a loss or gradient was not finite, or nothing was kept.
    """

    step: int = 0
    engine_version: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read, apart from the policy, which loads from `path`."""

    path: Path
    state: TrainState
    optimizer: dict[str, object]
    engine_weights: Mapping[str, Tensor] | None


def save_checkpoint(
    directory: Path,
    save_policy: Callable[[Path], object],
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    *,
    engine_weights: Mapping[str, Tensor] | None = None,
    keep: int = 2,
) -> Path:
    """Write `directory/step_NNNNNN` under another name, rename it, then delete all but the newest `keep`.

    Args:
        directory: RUN/checkpoints; made when missing.
        save_policy: writes model and tokenizer into a directory.
        optimizer: its state is stored.
        state: where the run is.
        engine_weights: the engine's weights, if they are not the policy's.
        keep: newest checkpoints to keep, at least 1.

    Returns:
        The checkpoint's directory.
    """
    from safetensors.torch import save_file

    final = directory / step_name(state.step)
    partial = directory / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    save_policy(partial)
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    if engine_weights is not None:
        save_file(dict(engine_weights), partial / "engine.safetensors")
    (partial / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")

    # A rename is all or nothing, so a killed run leaves whole checkpoints only.
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in _checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint in a directory, or None."""
    found = _checkpoints(directory)
    return found[-1] if found else None


def load_checkpoint(path: Path, *, device: str = "cpu") -> Checkpoint:
    """Read a checkpoint.

    Raises:
        ValueError: a file is missing or broken; the message names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = TrainState(**json.loads((path / "state.json").read_text(encoding="utf-8")))
        optimizer = torch.load(path / "optimizer.pt", map_location=device, weights_only=True)
        engine = path / "engine.safetensors"
        return Checkpoint(path, state, optimizer, load_file(engine, device=device) if engine.is_file() else None)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"checkpoint {str(path)!r} cannot be read ({reason}): delete it to resume from an earlier one"
        ) from error


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(f"{STEP_PREFIX}*") if (path / "state.json").is_file())
