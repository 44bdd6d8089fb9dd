"""Read pickled dumps, slime's `.pt` files and SkyRL's `.pkl` files, without executing code."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from rollcorr.rollout_log.errors import FileLimits, RolloutLogError, log_error
from rollcorr.rollout_log.framework_dumps import SKYRL, SLIME
from rollcorr.rollout_log.framework_form import Dump
from rollcorr.rollout_log.frameworks import incomplete_dump, recognize
from rollcorr.rollout_log.inert_pickle import (
    Call,
    DamagedPickleError,
    Name,
    TorchArchive,
    check_pickle_bytes,
    load_pickle,
    unreadable,
)
from rollcorr.rollout_log.source import LogSource, check_lists


class PickledSource(LogSource):
    """Source for dumps of slime (`torch.save`) and SkyRL (`pickle`). A file is one shard.

    Args:
        limits: the size limits of a file; defaults to `FileLimits()`.
        names: must be empty, because the names in these files are known; optional.
    """

    endings: tuple[str, ...] = (".pt", ".pkl")

    _most_size = "tokens"

    def _count_rows(self, path: Path) -> int:
        return self._open(path).rows

    def _read_rows(self, path: Path) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Yield each row and its approximate number of tokens: most rows have four lists of tokens."""
        dump = self._open(path)
        for index in range(dump.rows):
            try:
                row = dump.row(index)
            except DamagedPickleError as error:
                raise unreadable(error, path) from error
            yield row, sum(len(value) for value in row.values() if isinstance(value, (list, np.ndarray))) // 4

    def fields(self, path: Path) -> tuple[str, ...]:
        """Return the names in the rows of a file."""
        return self._open(path).fields

    def _open(self, path: Path) -> SlimeDump | SkyrlDump:
        if self.names:
            raise log_error(
                "columns",
                "other names of columns are for JSONL and Parquet; those of this dump are known",
                fix="leave out --columns",
                file=path,
            )
        try:
            state = path.stat()
            return _load_dump(path, state.st_size, state.st_mtime_ns, self.limits)
        except DamagedPickleError as error:
            raise unreadable(error, path) from error


# Counting, looking at the first row and reading are three calls. Cache the file to load it once.
@lru_cache(maxsize=1)
def _load_dump(path: Path, size: int, changed: int, limits: FileLimits) -> SlimeDump | SkyrlDump:
    if path.suffix == ".pt":
        return SlimeDump(path, limits=limits)
    check_pickle_bytes(size, file=path, limits=limits)
    content = load_pickle(path.read_bytes(), limits=limits, file=path)
    if isinstance(content, Call) and isinstance(content.function, Name):
        known = recognize([f"{content.function.module}.{content.function.name}"], form="pickle")
        if known is not None:
            raise incomplete_dump(*known, file=path)
    return SkyrlDump(path, content, limits=limits)


class SlimeDump:
    """Dump `{"rollout_id": …, "samples": [{…}, …]}` of `torch.save`, from the rollout or from the training step."""

    def __init__(self, path: Path, *, limits: FileLimits) -> None:
        self._path = str(path)
        self._archive = TorchArchive(path, name=path, limits=limits)
        self._content: Mapping[str, Any] = self._archive.content if isinstance(self._archive.content, dict) else {}
        samples = self._content.get("samples")
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise _unknown_dump_error(path)
        self.rows = len(samples)
        limits.check_rows(self.rows, file=path)
        self._samples: Sequence[Mapping[str, Any]] = samples
        self.fields = tuple(map(str, samples[0])) if samples else ()

        known = recognize(self.fields, form="torch.save")
        if samples and (known is None or known[0] is not SLIME):
            raise _unknown_dump_error(path, self.fields)
        self._names: Mapping[str, str] = {} if known is None else known[1].fields

    def row(self, index: int) -> Mapping[str, Any]:
        """Return a sample: `tokens` are prompt and response, every other list is as long as the response.

        The rollout number and the raw reward come from the file's top level.

        Raises:
            RolloutLogError: a list does not have the length of the response.
        """
        of_training = "response_lengths" in self._samples[index]
        length = "response_lengths" if of_training else "response_length"
        needed = {*self._names.values(), "tokens", length, "rollout_position"}
        sample: dict[str, Any] = {name: self._read_value(self._samples[index].get(name), name) for name in needed}
        tokens, count = sample["tokens"], sample[length]
        check_lists({"tokens": tokens}, file=self._path, row=index)
        if type(count) is not int or not 0 <= count <= len(tokens):
            raise log_error(
                "length",
                f"{length} is {count!r:.40} for {len(tokens)} tokens of prompt and response",
                file=self._path,
                row=index,
            )

        start = len(tokens) - count
        per_token = ("response_mask", "rollout_log_prob", "old_log_prob", "advantages")
        recorded = {name: sample[name] for column, name in self._names.items() if column in per_token}
        recorded = {name: values for name, values in recorded.items() if values is not None}
        check_lists({"response_ids": tokens[start:]} | recorded, file=self._path, row=index)

        found = {column: sample[name] for column, name in self._names.items()}
        found |= {"prompt_ids": tokens[:start], "response_ids": tokens[start:], "step": self._content.get("rollout_id")}
        found["reward"] = self._raw_reward(sample["rollout_position"]) if of_training else sample["reward"]
        for column in ("step", "sequence_id", "group_id", "reward"):
            # A reward that is no number, for example a dictionary, is not recorded.
            if type(found.get(column)) not in (int, float):
                found[column] = None
        return found

    def _raw_reward(self, position: object) -> object:
        """Return a reward before normalization, from the batch's list in the order of the rollout."""
        rewards = self._read_value(self._content.get("raw_reward"), "raw_reward")
        if not isinstance(rewards, list) or type(position) is not int or not 0 <= position < len(rewards):
            return None
        return rewards[position]

    def _read_value(self, value: object, name: str) -> object:
        if not isinstance(value, Call):
            return value
        of_kept_ids = name == self._names.get("kept_ids")
        array = self._archive.array(value, limit="row_kept_ids" if of_kept_ids else "row_tokens")
        if array is None:
            return None
        return array.item() if array.ndim == 0 else array.reshape(-1)


_FULL_LENGTH_FIELDS = {"sequences", "attention_mask"}
"""Tensors over prompt and response; all remaining tensors cover only the response."""


class SkyrlDump:
    """Dump of a `TrainingInputBatch`: the state from its `__getstate__`, tensors as bytes with shape and dtype."""

    def __init__(self, path: Path, content: object, *, limits: FileLimits) -> None:
        self._path = str(path)
        found, metadata = _skyrl_state(content)
        self.fields = tuple(map(str, found))
        known = recognize(self.fields, form="pickle")
        if known is None or known[0] is not SKYRL:
            raise _unknown_dump_error(path, self.fields)
        self._names = known[1].fields

        needed = {"sequences", "attention_mask", "response_mask", *self._names.values()} & found.keys()
        values = {name: _skyrl_tensor(found[name], name, file=path, limits=limits) for name in needed}
        self._tensors = {name: value for name, value in values.items() if value is not None}
        self._check_shapes(known[1])
        self._of_response = self._tensors.keys() - _FULL_LENGTH_FIELDS

        # Padding rows of the batch repeat its first row.
        padding = metadata.get("pad_size", 0) if isinstance(metadata, dict) else 0
        rows = len(self._tensors["sequences"])
        self.rows = rows - padding if type(padding) is int and 0 <= padding <= rows else rows
        limits.check_rows(self.rows, file=path)
        self._step = known[1].step_of(path.name)

    def row(self, index: int) -> Mapping[str, Any]:
        """Return one row of the batch.

        The response is the last tokens of `attention_mask`; its length is the number of ones in `response_mask`. The
        other tensors contain the response at the ones of `response_mask`, padded on the left.

        Raises:
            RolloutLogError: the response is not in one piece, or longer than the sequence.
        """
        tensors = {name: values[index] for name, values in self._tensors.items()}
        attention, response = tensors["attention_mask"] != 0, tensors["response_mask"] != 0
        tokens, count = tensors["sequences"][attention], int(response.sum())
        places = np.flatnonzero(response)
        in_one_piece = not count or int(places[-1]) - int(places[0]) + 1 == count
        if not in_one_piece or count > len(tokens):
            title = f"response_mask has {count} ones for {len(tokens)} tokens of attention_mask, in one piece: "
            raise log_error(
                "layout",
                f"{title}{in_one_piece}",
                fix="only batches of SkyRL's own generators, where a response is in one piece, can be converted",
                file=self._path,
                row=index,
            )

        start = len(tokens) - count
        columns = {column: tensors[name][response] for column, name in self._names.items() if name in self._of_response}
        return {
            **columns,
            "prompt_ids": tokens[:start],
            "response_ids": tokens[start:],
            "response_mask": columns["response_mask"] != 0,
            "step": self._step,
        }

    def _check_shapes(self, dump: Dump) -> None:
        for name in sorted(dump.recognized_by):
            if name not in self._tensors:
                raise DamagedPickleError(f"{name} is no tensor")
        for name, values in self._tensors.items():
            like = self._tensors["sequences" if name in _FULL_LENGTH_FIELDS else "response_mask"]
            if values.ndim != 2 or values.shape != like.shape or len(values) != len(self._tensors["sequences"]):
                shapes = ", ".join(f"{key} {array.shape}" for key, array in sorted(self._tensors.items()))
                raise DamagedPickleError(f"tensors that do not fit together: {shapes}")


def _skyrl_state(content: object) -> tuple[dict[str, Any], object]:
    """Return the tensors and the metadata of a batch, from its state or from its last constructor argument."""
    match content:
        case Call(state={"batch_dict": dict() as batch, **others}):
            return batch, others.get("metadata")
        case Call(arguments=(*_, {"batch_dict": dict() as batch, **others})):
            return batch, others.get("metadata")
    raise DamagedPickleError("not a TrainingInputBatch of SkyRL")


def _skyrl_tensor(value: object, name: str, *, file: Path, limits: FileLimits) -> np.ndarray | None:
    """Return a tensor of SkyRL's batch as an array; None for a missing one."""
    match value:
        case None:
            return None
        case bytes(stored) | {"format": "torch", "data": bytes(stored)}:
            # Types that numpy lacks, and every tensor before release 0.3, are nested files of torch.save. They have the
            # tokens of a whole batch, so the limit of the enclosing pickle applies, not that of a row.
            whole = FileLimits(row_tokens=limits.pickle_bytes, pickle_bytes=limits.pickle_bytes)
            archive = TorchArchive(BytesIO(stored), name=file, limits=whole)
            return archive.array(archive.content)
        case {"data": bytes(data), "shape": tuple(shape), "dtype": str(dtype)}:
            if not re.fullmatch(r"(float|int|uint)(8|16|32|64)|bool", dtype) or not all(
                type(size) is int and size >= 0 for size in shape
            ):
                raise DamagedPickleError(f"{name}: dtype {dtype[:20]!r}, shape {shape!r:.60}")
            kind = np.dtype(dtype)
            if math.prod(shape) * kind.itemsize != len(data):
                raise DamagedPickleError(f"{name}: {len(data)} bytes for shape {shape!r:.60} of {dtype}")
            return np.frombuffer(data, kind).reshape(shape)
    raise DamagedPickleError(f"{name} is no tensor that SkyRL writes")


def _unknown_dump_error(path: Path, fields: Sequence[str] = ()) -> RolloutLogError:
    has = f"; it has {', '.join(fields[:20])[:300]}" if fields else ""
    return log_error(
        "form",
        f"neither a dump of slime {SLIME.version} (.pt) nor of SkyRL {SKYRL.version} (.pkl){has}",
        fix="write the log with RolloutLogWriter: docs/guides/rollout_log.md",
        file=path,
    )
