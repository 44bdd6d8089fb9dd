"""Read `metrics.jsonl` line by line and within limits: a run may have any number of steps.

A complete but invalid line is skipped with a remark, because the remaining lines are still valid. A last line without
a newline was cut off by a crash, or is being written.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from array import array
from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollcorr.config.documents import BadInputError as BadInputError
from rollcorr.config.documents import load_json, open_input
from rollcorr.run_directory.directory import RANK_PREFIX, STEP_PREFIX, RunDirectory, step_of
from rollcorr.run_directory.durable_files import atomic_write, partial_path

logger = logging.getLogger("rollcorr.run_directory")

MAX_LINE_BYTES = 1 << 20
"""Maximum bytes of one line of metrics.jsonl: a run writes a few thousand."""
MAX_MEMORY = 1 << 28
"""Maximum bytes of memory for the steps of a run: about 200,000 steps with 100 metrics."""


class MetricsLine(NamedTuple):
    """A line of a metrics.jsonl.

    Attributes:
        number: line number, from 1.
        text: the line, with its newline if present.
        metrics: metrics of the step; empty if the line is invalid.
        fault: reason why the line is invalid; empty if it is valid.
    """

    number: int
    text: bytes
    metrics: dict[str, Any]
    fault: str

    @property
    def is_cut_off(self) -> bool:
        """Return whether the newline is missing: a line and its newline are written in one call."""
        return not self.text.endswith(b"\n")


class StoredStep(Mapping[str, Any]):
    """Metrics of a step with its numbers in an array: a ninth of the memory of a dictionary.

    Args:
        places: name → index in `numbers`; steps with the same names share it.
        numbers: one number per name.
        objects: the values that are not floating-point numbers, by name.
    """

    __slots__ = ("_numbers", "_objects", "_places")

    def __init__(self, places: Mapping[str, int], numbers: array[float], objects: Mapping[str, Any]) -> None:
        self._places, self._numbers, self._objects = places, numbers, objects

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - any JSON value
        return self._objects[name] if name in self._objects else self._numbers[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def items(self) -> ItemsView[str, Any]:
        """Return names and values as a dictionary view."""
        return {**dict(zip(self._places, self._numbers, strict=True)), **self._objects}.items()


class StepStore:
    """Factory of `StoredStep`s that share their names. It also counts their memory.

    Attributes:
        bytes: estimated memory of all steps so far.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._names: dict[str, str] = {}
        self._places: dict[tuple[str, ...], dict[str, int]] = {}

    def add(self, metrics: Mapping[str, Any], *, text_bytes: int = 0) -> StoredStep:
        """Convert a step to its compact form, and compute its memory.

        Args:
            metrics: name → value.
            text_bytes: size of the line, which bounds the memory of its lists and texts; defaults to 0.
        """
        names = tuple(metrics)
        places = self._places.get(names)
        if places is None:
            places = {self._names.setdefault(name, name): place for place, name in enumerate(names)}
            self._places[tuple(places)] = places
            self.bytes += sum(200 + 4 * len(name) for name in names)

        objects = {name: value for name, value in metrics.items() if type(value) is not float}
        numbers = array("d", [value if type(value) is float else math.nan for value in metrics.values()])
        holds_more = any(isinstance(value, (str, list, dict)) for value in objects.values())
        self.bytes += 400 + 8 * len(names) + 100 * len(objects) + (24 * text_bytes if holds_more else 0)
        return StoredStep(places, numbers, objects)


def metrics_lines(path: Path) -> Iterator[MetricsLine]:
    """Yield the lines of a metrics.jsonl that are not blank.

    Raises:
        BadInputError: the file cannot be read, or a line is longer than `MAX_LINE_BYTES`.
    """
    try:
        with path.open("rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(text) > MAX_LINE_BYTES:
                    raise BadInputError(
                        f"{path}:{number}: the line has more than {MAX_LINE_BYTES:,} bytes, the limit; remove it"
                    )
                if text.strip():
                    yield read_line(number, text)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}; a run writes it, one JSON object per step") from error


def read_line(number: int, text: bytes) -> MetricsLine:
    """Parse a line; its `fault` is empty if the line is valid."""
    try:
        row = load_json(text)
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {type(row).__name__}; remove the line")
        step = row.get("step", 0)
        if type(step) is not int or step < 0:
            raise ValueError(f"step {step!r:.40} is not a whole number from 0 on; correct the line")
        for name, value in row.items():
            if type(value) is int and value.bit_length() > 63:
                raise ValueError(f"{name!r:.40} is an integer of more than 63 bits; repair or remove the line")
    except json.JSONDecodeError as error:
        return MetricsLine(number, text, {}, f"not JSON ({error}); repair or remove the line")
    except ValueError as error:
        return MetricsLine(number, text, {}, str(error))
    return MetricsLine(number, text, row, "")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the steps of a `metrics.jsonl`. Skip a last line that a killed run cut off.

    A broken line is skipped and logged. `read_run` needs a ninth of the memory.

    Returns:
        The metrics of each line by name, in the order of the file.

    Raises:
        BadInputError: the file cannot be opened, or has a line of more than a megabyte.
    """
    names: dict[str, str] = {}
    rows = []
    for line in metrics_lines(Path(path)):
        if not line.fault:
            rows.append({names.setdefault(name, name): value for name, value in line.metrics.items()})
        elif not line.is_cut_off:
            logger.warning("%s:%d is left out: %s", path, line.number, line.fault)
    return rows


def drop_later_steps(directory: RunDirectory, step: int) -> list[int]:
    """Delete the logs of all steps after `step`, because a resumed run will compute them again.

    Delete lines, rollout logs of every rank, and partial files of a killed run. Files with other names do not belong
    to the run, and stay.

    Args:
        directory: the run directory.
        step: the last step to keep.

    Returns:
        The steps up to `step` whose line in metrics.jsonl is lost or damaged.
    """
    for path in (*directory.written, directory.picture("before"), directory.picture("after")):
        if not partial_path(path).is_dir():
            partial_path(path).unlink(missing_ok=True)
    for prefix in (STEP_PREFIX, RANK_PREFIX):
        for unfinished in directory.rollouts.glob(f".{prefix}*.parquet.tmp-*"):
            unfinished.unlink()
    for log in directory.rollouts.glob("*.parquet"):
        later = step_of(log.with_name(re.sub(rf"^{RANK_PREFIX}\d+_", "", log.name)))
        if later is not None and later > step:
            log.unlink()
    if not directory.metrics.is_file():
        return list(range(1, step + 1))

    def kept() -> Iterator[MetricsLine]:
        lines = metrics_lines(directory.metrics)
        return (line for line in lines if not line.is_cut_off and line.metrics.get("step", step + 1) <= step)

    # Read the file once to find lines to drop, then again to copy the rest: it never has to fit in memory.
    size, numbers = 0, set()
    for line in kept():
        size += len(line.text)
        numbers.add(line.metrics["step"])
    if size != directory.metrics.stat().st_size:
        with atomic_write(directory.metrics, needed=size) as partial, partial.open("wb") as file:
            file.writelines(line.text for line in kept())
    return sorted(set(range(1, step + 1)) - numbers)


class GrowingMetrics:
    """Reader of a growing `metrics.jsonl`. A line without a newline is read after it is complete.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._position = self._lines = self._file_number = 0

    def begins_again(self) -> bool:
        """Return whether `new_steps` starts at a new file: a resumed run dropped steps, or the run was restarted."""
        if not self._position or not self._path.exists():
            return False
        state = self._path.stat()
        again = state.st_size < self._position or state.st_ino != self._file_number
        if again:
            self._position = self._lines = 0
        return again

    def new_steps(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each new step since the last call. Log a broken line.

        Raises:
            BadInputError: a line has more than a megabyte.
            OSError: the file cannot be read.
            ValueError: the file is a named pipe.
        """
        if not self._path.exists():
            return
        with open_input(self._path) as file:
            if not self._position:
                self._file_number = os.fstat(file.fileno()).st_ino
            file.seek(self._position)
            while (text := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
                self._position += len(text)
                self._lines += 1
                line = read_line(self._lines, text)
                if "step" in line.metrics:
                    yield line.metrics
                elif text.strip():
                    logger.warning("%s:%d is left out: %s", self._path, line.number, line.fault or "it has no step")
        if len(text) > MAX_LINE_BYTES:
            raise BadInputError(f"{self._path}:{self._lines + 1}: the line has more than {MAX_LINE_BYTES:,} bytes")
