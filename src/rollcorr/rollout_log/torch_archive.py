"""Tensors of strangers: what `torch.save` wrote, read as plain data, one tensor at a time and only those asked for."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rollcorr.rollout_log.errors import log_error
from rollcorr.rollout_log.file_limits import FileLimits, limit_error
from rollcorr.rollout_log.inert_pickle import Call, DamagedPickleError, Name, Reference, load_pickle

_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}


class TorchArchive:
    """A file of `torch.save`: its `content` as plain data, in which a tensor is a `Call` until `array` reads it.

    Args:
        file: a path, or the bytes in a file object.
        name: the file, for messages.
        limits: what a file may hold.

    Raises:
        DamagedPickleError: it is no such file.
        RolloutLogError: the pickle in it exceeds a limit.
    """

    def __init__(self, file: Path | BinaryIO, *, name: object, limits: FileLimits) -> None:
        self._name, self._limits = name, limits
        try:
            self._zip = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise DamagedPickleError(f"not a file of torch.save: {error}") from error

        # torch never compresses; a compressed entry could stand for gigabytes.
        entries = {entry.filename: entry for entry in self._zip.infolist()}
        pickles = [entry for path, entry in entries.items() if path.endswith("/data.pkl")]
        if len(pickles) != 1 or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise DamagedPickleError("not a file of torch.save: its archive has another form")
        self._entries, self._root = entries, pickles[0].filename.removesuffix("data.pkl")
        check_pickle_bytes(pickles[0].file_size, file=name, limits=limits)
        self.content = load_pickle(self._read(pickles[0].filename), limits=limits, file=name)

    def array(self, tensor: object, *, limit: str = "row_tokens") -> np.ndarray | None:
        """The values of a tensor of this file; None where the object is none. `limit` names what bounds their number.

        Raises:
            DamagedPickleError: the tensor does not fit its storage, or is not contiguous.
            RolloutLogError: it has more values than a row may have.
        """
        parts = _tensor_parts(tensor)
        if parts is None:
            return None
        count = math.prod(parts.shape)
        most = getattr(self._limits, limit)
        if count > most:
            raise limit_error(limit, f"a tensor of {count:,} values", most, file=self._name)
        if not _is_contiguous(parts.shape, parts.stride):
            raise DamagedPickleError("a tensor that is not contiguous")

        size = 2 if parts.dtype == "bfloat16" else np.dtype(parts.dtype).itemsize
        data = self._read(f"{self._root}data/{parts.key}", first=parts.offset * size, count=count * size)
        return decode(data, parts.dtype).reshape(parts.shape)

    def _read(self, path: str, *, first: int = 0, count: int | None = None) -> bytes:
        entry = self._entries.get(path)
        if entry is None:
            raise DamagedPickleError(f"the archive has no {path}")
        wanted = entry.file_size if count is None else count
        try:
            with self._zip.open(entry) as stream:
                # A part of a storage is read without its checksum, a whole one with it.
                if first:
                    stream.seek(first)
                data = stream.read(wanted)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
            raise DamagedPickleError(f"{path}: {error}") from error
        if len(data) != wanted:
            raise DamagedPickleError(f"{path} has fewer bytes than its tensor")
        return data


@dataclass(frozen=True)
class _TensorParts:
    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def decode(data: bytes, dtype: str) -> np.ndarray:
    """Numbers from bytes; bfloat16 becomes float32.

    Raises:
        ValueError: the bytes are no whole number of values.
    """
    if dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
        return wide.view("<f4")
    return np.frombuffer(data, dtype)


def check_pickle_bytes(size: int, *, file: object, limits: FileLimits) -> None:
    """Check the bytes of a pickle before it is read.

    Raises:
        RolloutLogError: there are too many.
    """
    if size > limits.pickle_bytes:
        raise limit_error("pickle_bytes", f"a pickle of {size:,} bytes", limits.pickle_bytes, file=file)


def _tensor_parts(value: object) -> _TensorParts | None:
    """What torch writes for a tensor: (storage, offset, shape, stride, …), the storage a reference."""
    if not isinstance(value, Call) or value.function != Name("torch._utils", "_rebuild_tensor_v2"):
        return None
    match value.arguments:
        case (
            Reference(("storage", Name("torch", storage), str() as key, *_)),
            int() as offset,
            tuple() as shape,
            tuple() as stride,
            *_,
        ) if storage in _DTYPES and all(type(number) is int and number >= 0 for number in (offset, *shape, *stride)):
            return _TensorParts(_DTYPES[storage], key, offset, shape, stride)
    raise DamagedPickleError("a tensor of an unknown form")


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    if len(shape) != len(stride):
        return False
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def unreadable(error: DamagedPickleError, path: Path) -> Exception:
    """The error for a file that is damaged."""
    fix = "was it cut off while it was copied? Files older than torch 1.6 must be saved again"
    return log_error("unreadable", str(error), fix=fix, file=path)
