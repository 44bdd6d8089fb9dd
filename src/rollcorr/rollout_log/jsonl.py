"""The JSONL form: one JSON object a row, with the names of the schema.

NaN is null, ±inf is ±1e999 (a number too large for a double, which every reader takes as infinite), and floats are
written with the digits that give back the same float32. Each object carries `schema_version`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollcorr.rollout_log.arrow import pa
from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.build import records_of_rows
from rollcorr.rollout_log.errors import Problem, RolloutLogError
from rollcorr.rollout_log.schema import COLUMNS, SCHEMA_VERSION, check_version

VERSION_FIELD = "schema_version"
_BATCH_TEXT = 1 << 25
"""Bytes of text after which a batch ends, however few its rows: as Python objects they take about twice as much."""


def to_lines(batch: RolloutBatch) -> Iterator[str]:
    """Each row of a batch as one line of JSON, without columns that the batch lacks."""
    head = f'"{VERSION_FIELD}": "{SCHEMA_VERSION}"'
    columns = [name for name in batch.columns if batch.has(name)]
    texts = [_json_texts(batch.records.column(name)) for name in columns]
    for row in zip(*texts, strict=True) if texts else [()] * len(batch):
        fields = (f'"{name}": {text}' for name, text in zip(columns, row, strict=True) if text != "null")
        yield "{" + ", ".join([head, *fields]) + "}\n"


def read_lines(path: Path, *, columns: Iterable[str] | None, batch_size: int) -> Iterator[RolloutBatch]:
    """Batches of a JSONL file, at most `batch_size` rows or a fixed amount of text in memory at a time.

    Raises:
        RolloutLogError: a line is not a JSON object, or a value does not fit its column.
    """
    wanted = list(COLUMNS if columns is None else columns)
    first_row = 0
    for chunk in _chunks(path, batch_size):
        records = records_of_rows(chunk, columns=wanted, file=str(path), first_row=first_row)
        yield RolloutBatch(records, str(path), first_row)
        first_row += len(chunk)


def count_lines(path: Path) -> int:
    """Rows of a JSONL file: lines that are not blank."""
    return sum(1 for _ in _lines(path))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.isspace():
                    yield number, line
    except (EOFError, OSError) as error:
        hint = "was it cut off while it was copied?"
        message = f"line {number + 1} cannot be read: {error}"
        raise RolloutLogError(Problem(code="unreadable", message=message, hint=hint, file=str(path))) from error


def _chunks(path: Path, batch_size: int) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    text = 0
    for value, size in _objects(path):
        chunk.append(value)
        text += size
        if len(chunk) == batch_size or text >= _BATCH_TEXT:
            yield chunk
            chunk, text = [], 0
    if chunk:
        yield chunk


def _objects(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row, and the bytes of its line."""
    for row, (number, line) in enumerate(_lines(path)):
        try:
            value = json.loads(line)
        except ValueError as error:
            message = f"line {number} is not JSON: {error}"
            problem = Problem(code="json", message=message, hint="mend or delete it", file=str(path), row=row)
            raise RolloutLogError(problem) from error
        if not isinstance(value, dict):
            message = f"line {number} is a JSON {type(value).__name__}, not an object"
            raise RolloutLogError(Problem(code="json", message=message, file=str(path), row=row))
        check_version(value.get(VERSION_FIELD), file=str(path), row=row)
        yield value, len(line)


def _json_texts(array: pa.Array) -> list[str]:
    """JSON of each value of a column; the replacements touch numbers only, so text and settings are left alone."""
    texts = [json.dumps(value, ensure_ascii=False) for value in array.to_pylist()]
    numbers = array.type.value_type if pa.types.is_list(array.type) else array.type
    if pa.types.is_floating(numbers):
        texts = [text.replace("NaN", "null").replace("Infinity", "1e999") for text in texts]
    return texts
