"""Reading `metrics.jsonl` while a run writes it: each whole line once."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from rollcorr.config.input_file import open_input
from rollcorr.run_directory.metrics_file import MAX_LINE_BYTES, BadInputError, read_line

logger = logging.getLogger("rollcorr.run_directory")

MOST_NEW_BYTES = 8 << 20
"""Bytes that one call reads, about: a long run is read in parts."""


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

    Attributes:
        has_more: the last call stopped before the end of the file, and the next one goes on there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self.has_more = False
        self._position = self._lines = 0
        self._file_number = 0

    def new_steps(self) -> NewSteps:
        """The lines that are new since the last call, or the first of them, see `has_more`. A broken line is logged.

        Raises:
            BadInputError: a line has more than a megabyte.
            OSError: the file cannot be read.
            ValueError: it is a named pipe.
        """
        self.has_more = False
        try:
            state = self._path.stat()
        except FileNotFoundError:
            return NewSteps((), again=False)
        again = bool(self._position) and (state.st_size < self._position or state.st_ino != self._file_number)
        self._file_number = state.st_ino
        if again:
            self._position = self._lines = 0

        steps = []
        end = self._position + MOST_NEW_BYTES
        with open_input(self._path) as file:
            file.seek(self._position)
            while self._position < end and (text := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
                self._position += len(text)
                self._lines += 1
                line = read_line(self._lines, text)
                if "step" in line.metrics:
                    steps.append(line.metrics)
                elif text.strip():
                    logger.warning("%s:%d is left out: %s", self._path, line.number, line.fault or "it has no step")
        self.has_more = self._position >= end
        if len(text) > MAX_LINE_BYTES:
            raise BadInputError(f"{self._path}:{self._lines + 1}: the line has more than {MAX_LINE_BYTES:,} bytes")
        return NewSteps(tuple(steps), again)
