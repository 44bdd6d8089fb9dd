"""Reading `metrics.jsonl` while a run writes it: each whole line once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from rollcorr.run_directory.stored_run import BadInputError


class NewSteps(NamedTuple):
    """What a file has gained.

    Attributes:
        steps: the metrics of each new step.
        again: whether they are from the beginning of a new file: a run that went on dropped steps, or began anew.
    """

    steps: tuple[dict[str, Any], ...]
    again: bool


class GrowingMetrics:
    """A `metrics.jsonl` that grows. A line without an end is not whole yet, and is read when it is.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._position = 0
        self._file_number = 0

    def new_steps(self) -> NewSteps:
        """The lines that are new since the last call.

        Raises:
            BadInputError: a whole line is not a JSON object; the message names its place.
            OSError: the file cannot be read.
        """
        try:
            state = self._path.stat()
        except FileNotFoundError:
            return NewSteps((), again=False)
        again = bool(self._position) and (state.st_size < self._position or state.st_ino != self._file_number)
        self._position, self._file_number = 0 if again else self._position, state.st_ino

        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        steps = tuple(self._parsed(line) for line in whole.splitlines() if line.strip())
        self._position += len(whole)
        return NewSteps(steps, again)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            metrics = json.loads(line)
        except ValueError as error:
            raise BadInputError(f"{self._path}: a line is not JSON ({error}); repair or remove it") from error
        if not isinstance(metrics, dict) or not isinstance(metrics.get("step"), int):
            raise BadInputError(f"{self._path}: a line is no JSON object with a step; repair or remove it")
        return metrics
