"""Checkpoints: everything that the next step depends on, written atomically.

    RUN/checkpoints/step_000050/
        config.json, model.safetensors, tokenizer…   the policy, as its recipe writes it; `model.path` may point here
        optimizer.pt                                 AdamW's moments
        engine.safetensors                           the engine's weights, when they lag behind the policy's
        state.json                                   step, engine version, skipped optimizer steps
        records/                                     small texts, such as the configuration
        manifest.json                                the step, and bytes and SHA-256 of every file

A checkpoint is sound when its manifest is, and when every file in the manifest is there and has that SHA-256.
No random state is stored: every draw is a function of (seed, purpose, step), see `rollcorr.train.steps`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from rollcorr.run_directory.directory import STEP_PREFIX, paths_by_step, step_name
from rollcorr.run_directory.durable_files import (
    SET_ASIDE_SUFFIX,
    atomic_write,
    delete_folder_durably,
    make_folder_durably,
    remove_leftovers,
)

MANIFEST = "manifest.json"
STATE = "state.json"
OPTIMIZER = "optimizer.pt"
ENGINE = "engine.safetensors"
RECORDS = "records"

NOT_NOW = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
"""Error numbers that say nothing about a file: another start may read it."""

BLOCK = 2**20
"""Bytes hashed at a time."""


class NonFiniteWeightsError(ValueError):
    """Weights or optimizer state contain NaN or infinity and were not saved; the message names the tensor."""


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file and the fault."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Progress of a run.

    Attributes:
        step: completed training steps; also the version of the policy.
        engine_version: version of the weights that the engine samples with.
        skipped_steps: optimizer steps skipped so far: a loss or gradient was not finite, or no token was kept.
    """

    step: int = 0
    engine_version: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint except the policy, which loads from `path`."""

    path: Path
    state: TrainState
    optimizer: dict[str, object]
    engine_weights: Mapping[str, Tensor] | None
    records: Mapping[str, str] = field(default_factory=dict)


def save_checkpoint(
    directory: Path,
    save_policy: Callable[[Path], object],
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    *,
    records: Mapping[str, str] | None = None,
    engine_weights: Mapping[str, Tensor] | None = None,
    keep: int = 2,
) -> Path:
    """Write `directory/step_NNNNNN` under a hidden name, flush it to the disk, rename it, then delete older ones.

    An interruption never damages an existing checkpoint. Only the newest `keep` up to this step stay. Checkpoints of
    later steps are deleted: the run did not resume from them, so they were damaged.

    Args:
        directory: RUN/checkpoints; created when missing. One process at a time may write there.
        save_policy: writes model and tokenizer into a directory.
        optimizer: its state is stored, and its parameters are checked.
        state: progress of the run.
        records: small texts to store, by file name.
        engine_weights: the engine's weights, if they are not the policy's.
        keep: newest checkpoints to keep, at least 1.

    Returns:
        The checkpoint's directory.

    Raises:
        NonFiniteWeightsError: a weight or a moment is NaN or infinite; no file was written.
        OSError: the disk is full or cannot be written; the message names the file, the bytes needed and free.
    """
    check_finite(optimizer, engine_weights or {})
    make_folder_durably(directory)
    remove_leftovers(directory)

    # At least weights, two moments and the engine's weights, for the error of a full disk.
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    needed = sum(3 * tensor.nbytes for tensor in trained) + sum(x.nbytes for x in (engine_weights or {}).values())
    final = directory / step_name(state.step)
    with atomic_write(final, needed=needed) as partial:
        _write_files(partial, save_policy, optimizer, state, records or {}, engine_weights)
        _write_manifest(partial, state.step)

    # The new checkpoint is on the disk, so older ones can be deleted.
    delete_older_checkpoints(directory, state.step, keep=keep)
    for step, path in paths_by_step(directory).items():
        if step > state.step and path.is_dir():
            delete_folder_durably(path)
    return final


def delete_older_checkpoints(directory: Path, step: int, *, keep: int) -> None:
    """Keep the newest `keep` checkpoints up to a step, and those after it.

    `save_checkpoint` does the same. A resumed run calls this in case the process was killed before the deletion.
    """
    up_to_now = [path for at, path in paths_by_step(directory).items() if at <= step and path.is_dir()]
    for path in up_to_now[:-keep]:
        delete_folder_durably(path)


def has_checkpoints(directory: Path) -> bool:
    """Return whether a directory contains a checkpoint, sound or damaged."""
    set_aside = directory.glob(f".{STEP_PREFIX}*{SET_ASIDE_SUFFIX}")
    return any(path.is_dir() for path in (*paths_by_step(directory).values(), *set_aside))


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest sound checkpoint in a directory, or None. Read-only."""
    for path in reversed(paths_by_step(Path(directory)).values()):
        with suppress(DamagedCheckpointError):
            _verify_files(path)
            return path
    return None


def newest_sound_checkpoint(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """Read the newest sound checkpoint, after deleting the partial files of a killed process.

    Args:
        directory: RUN/checkpoints. No other process may write there meanwhile.

    Returns:
        The checkpoint (None if no sound one exists), and one line for each newer, damaged checkpoint.

    Raises:
        OSError, ValueError: as in `load_checkpoint`. The newest one may be sound, so no older one replaces it.
    """
    if directory.is_dir():
        remove_leftovers(directory)
    damaged: list[str] = []
    for path in reversed(paths_by_step(directory).values()):
        try:
            return load_checkpoint(path), damaged
        except DamagedCheckpointError as error:
            damaged.append(str(error))
    return None, damaged


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after comparing every file with the manifest. Tensors are on the CPU.

    Raises:
        DamagedCheckpointError: a file is missing, empty, truncated, altered or from a different checkpoint; the
            message names it.
        OSError: a file cannot be opened now: no permission, or the limit of open files. It may be sound.
        ValueError: the files are unchanged, but this version cannot read them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = _verify_files(path)

    # `name` is the file being read, for the error.
    name = STATE
    try:
        state = TrainState(**json.loads((path / name).read_text(encoding="utf-8")))
        name = OPTIMIZER
        optimizer = torch.load(path / name, map_location="cpu", weights_only=True)
        name = ENGINE
        engine = load_file(path / name) if name in files else None
        name = RECORDS
        records = {
            PurePosixPath(file).name: (path / file).read_text(encoding="utf-8")
            for file in files
            if file.startswith(f"{RECORDS}/")
        }
    except (ValueError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"checkpoint {str(path)!r} cannot be read, although its files are as they were written: {name}: {reason}. "
            "Go on with the version of rollcorr and torch that wrote it, or delete it to go on from the one before"
        ) from error
    return Checkpoint(path, state, optimizer, engine, records)


def check_finite(optimizer: torch.optim.Optimizer, engine_weights: Mapping[str, Tensor]) -> None:
    """Check everything trained, the optimizer's moments and the engine's weights for NaN and infinity.

    Raises:
        NonFiniteWeightsError: a value is not finite; the message names the tensor and the count.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {f"trained tensor {number}": tensor.detach() for number, tensor in enumerate(parameters)}
    for number, parameter in enumerate(parameters):
        moments = optimizer.state.get(parameter, {})
        tensors |= {f"{key} of tensor {number}": value for key, value in moments.items() if torch.is_tensor(value)}
    tensors |= {f"{name} of the engine": value for name, value in engine_weights.items()}

    broken = [name for name, tensor in tensors.items() if not _is_finite(tensor).all()]
    if broken:
        first = tensors[broken[0]]
        count = int((~_is_finite(first)).sum())
        others = f", and {len(broken) - 1} more tensors are broken" if len(broken) > 1 else ""
        raise NonFiniteWeightsError(
            f"{broken[0]} {tuple(first.shape)} has {count} values of {first.numel()} that are NaN or infinite{others}: "
            "nothing was saved and the last checkpoint stays; lower optim.lr or optim.max_grad_norm and go on from it"
        )


def _write_files(
    partial: Path,
    save_policy: Callable[[Path], object],
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    records: Mapping[str, str],
    engine_weights: Mapping[str, Tensor] | None,
) -> None:
    from safetensors.torch import save_file

    partial.mkdir()
    save_policy(partial)
    with (partial / OPTIMIZER).open("wb") as file:  # torch's own files hide the cause of a failed write
        torch.save(optimizer.state_dict(), file)
    if engine_weights is not None:
        save_file(dict(engine_weights), partial / ENGINE)
    (partial / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")

    for name, text in records.items():
        (partial / RECORDS).mkdir(exist_ok=True)
        (partial / RECORDS / name).write_bytes(text.encode())  # bytes, so that no platform changes the line ends


def _write_manifest(folder: Path, step: int) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_bytes(_manifest_text({"step": step, "files": files}))


def _manifest_text(manifest: Mapping[str, Any]) -> bytes:
    """Return the canonical text of a manifest, with a SHA-256 of its own content."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=2) + "\n").encode()


def _verify_files(path: Path) -> set[str]:
    """Check the files of a checkpoint against its manifest, and the manifest against its own hash and folder.

    Returns:
        The names of the files.

    Raises:
        DamagedCheckpointError: a file differs; the message names it.
        OSError: as in `load_checkpoint`.
    """
    with _translate_read_errors(path, MANIFEST):
        text = (path / MANIFEST).read_bytes()

    # A flipped bit anywhere, even in a space, changes the text.
    manifest: Any = None
    with suppress(ValueError, RecursionError):
        manifest = json.loads(text)
    if not isinstance(manifest, dict) or _manifest_text(manifest) != text:
        raise _damaged_error(path, MANIFEST, "is cut or altered")
    if step_name(manifest["step"]) != path.name:
        raise _damaged_error(path, MANIFEST, f"is of another checkpoint (step {manifest['step']})")

    for name, entry in manifest["files"].items():
        file = path / name
        with _translate_read_errors(path, name):
            size = file.stat().st_size
            digest = file_sha256(file) if size == entry["bytes"] else None
        if size < entry["bytes"]:
            raise _damaged_error(
                path, name, f"is cut to {size:,} of {entry['bytes']:,} bytes, or of another checkpoint"
            )
        if digest != entry["sha256"]:
            raise _damaged_error(
                path, name, "is altered or of another checkpoint: its SHA-256 is not that of the manifest"
            )
    return set(manifest["files"])


@contextmanager
def _translate_read_errors(path: Path, name: str) -> Iterator[None]:
    """Convert a disk error to `DamagedCheckpointError`, unless its cause is not the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise _damaged_error(path, name, "is missing") from error
    except OSError as error:
        if error.errno in NOT_NOW:
            raise
        raise _damaged_error(path, name, f"cannot be read ({error.strerror})") from error


def _damaged_error(path: Path, name: str, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint {str(path)!r} cannot be used: {name} {what}")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _is_finite(tensor: Tensor) -> Tensor:
    """Return an elementwise finite mask; one-byte dtypes have no `isfinite` of their own."""
    return (tensor.float() if tensor.element_size() == 1 else tensor).isfinite()
