"""JSONL format: one JSON object per row, with the names of the schema.

NaN is null, ±inf is ±1e999 (larger than any double, so every reader parses it as infinite), and floats are written with
enough digits to restore the same float32. Each object contains `schema_version`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollcorr.config.documents import load_json, openings
from rollcorr.rollout_log.arrow import pa
from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.errors import FileLimits, limit_error, log_error
from rollcorr.rollout_log.framework_dumps import NEMO_RL, PRIME_RL
from rollcorr.rollout_log.framework_form import Dump
from rollcorr.rollout_log.frameworks import columns_of_fields, recognize
from rollcorr.rollout_log.schema import SCHEMA_VERSION, check_version
from rollcorr.rollout_log.source import LogSource, check_lists

VERSION_FIELD = "schema_version"
# Blank lines that a log may have in addition to one per row: gzip packs a million of them into a kilobyte.
_MAX_BLANK_LINES = 1000
# Bytes of text with the memory of an empty list or object, when both are Python objects.
_PROBE_BYTES = 32


class JsonlSource(LogSource):
    """Source for JSONL files, plain or compressed: this library's, the dumps in `FRAMEWORKS`, and any with `names`.

    A subclass reads any other dump by overriding `row`.

    Args:
        limits: the size limits of a file; defaults to `FileLimits()`.
        names: column of the log → its name in the file; optional.

    Raises:
        ValueError: a name is no column of the log.
    """

    endings: tuple[str, ...] = (".jsonl", ".jsonl.gz")

    def row(self, value: Mapping[str, Any], *, file: str, row: int) -> Mapping[str, Any]:
        """Convert one JSON object to columns of the log; fields that are no columns are skipped.

        Args:
            value: the object of one line.
            file: its path, for messages.
            row: its position, from 0, for messages.

        Raises:
            RolloutLogError: the object contradicts the layout of its framework.
        """
        # In this library's logs the schema version is a string. Any other row may come from a framework.
        version = value.get(VERSION_FIELD)
        known = None if isinstance(version, str) else recognize(value, form="JSONL")
        if known is None and not self.names:
            check_version(version, file=file, row=row)
            return value

        fields = {} if known is None else known[1].fields
        convert = _ROW_CONVERTERS.get(known[0].name) if known is not None and fields else None
        if known is not None and convert is not None:
            if self.names:
                raise log_error("columns", "the names in this dump are known", fix="leave out --columns", file=file)
            return convert(value, known[1], file=file, row=row)
        if not self.names and not fields:
            return {}
        return {column: value[field] for field, column in columns_of_fields(value, self.names or fields).items()}

    def fields(self, path: Path) -> tuple[str, ...]:
        """Return the names in the first row of a file."""
        for number, line in _lines(path, self.limits):
            return tuple(_parse(line, path, row=0, number=number))
        return ()

    def _count_rows(self, path: Path) -> int:
        return sum(1 for _ in _lines(path, self.limits))

    def _read_rows(self, path: Path) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Yield each row, and the approximate memory of its parsed line, in bytes of text."""
        for row, (number, line) in enumerate(_lines(path, self.limits)):
            value = _parse(line, path, row=row, number=number)
            yield self.row(value, file=str(path), row=row), len(line) + _PROBE_BYTES * openings(line)


def prime_rl_row(record: Mapping[str, Any], dump: Dump, *, file: str, row: int) -> Mapping[str, Any]:
    """Convert a sequence of prime-rl's token export: prompt and response in one, every list as long as `token_ids`.

    `loss_mask` is true on the trained tokens. If weights of loss components are recorded, a token was sampled by the
    policy if its weight of rl, or of ref_kl, is not 0. Tokens distilled from a different model have no log-prob.

    Raises:
        RolloutLogError: an unknown schema, lists of different lengths, or a value of the wrong type.
    """
    if record.get("schema_version") != 1:
        raise log_error(
            "version",
            f"a token export of prime-rl of schema {record.get('schema_version')!r:.40}; this release reads 1",
            fix="upgrade rollcorr",
            file=file,
            row=row,
        )

    names = ("token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs", "advantages")
    lists: dict[str, Any] = {name: record.get(name) for name in names}
    for name in ("rl_weights", "ref_kl_weights"):
        # A component that the run does not have is absent, or a list of nulls.
        values = record.get(name)
        if isinstance(values, list) and any(value is not None for value in values):
            lists[name] = values
    check_lists(lists, file=file, row=row)

    trained = lists["loss_mask"]
    sampled = [bool(token) for token in trained]
    if "rl_weights" in lists:
        weights = zip(lists["rl_weights"], lists.get("ref_kl_weights", [None] * len(trained)), strict=True)
        sampled = [token and any(of_token) for token, of_token in zip(sampled, weights, strict=True)]

    return {
        "step": record.get("step"),
        "sequence_id": f"{record.get('rank')}/{record.get('export_sequence_idx')}",
        **_split(lists, dump, trained, sampled),
    }


def nemo_rl_row(record: Mapping[str, Any], dump: Dump, *, file: str, row: int) -> Mapping[str, Any]:
    """Convert a row of NeMo-RL's training data: each value is a list of one, padded beyond `input_lengths`.

    A token was sampled by the policy where token_loss_mask × sample_loss_mask is not 0. A row with sample_loss_mask 0
    has no reward either, so that it changes no metric. Rows beyond the batch have empty lists: dynamic sampling logs
    the rewards of all samples.

    Raises:
        RolloutLogError: lists of different lengths, or a value of the wrong type.
    """
    cells = {name: value[0] for name, value in record.items() if isinstance(value, list) and len(value) == 1}
    if record.get("token_loss_mask") == []:
        return {"step": dump.step_of(file)}

    names = ("token_loss_mask", "token_ids", "generation_logprobs", "prev_logprobs", "advantages")
    lists: dict[str, Any] = {name: cells.get(name) for name in names if name == names[0] or name in record}
    check_lists(lists, file=file, row=row)
    length = cells.get("input_lengths")
    if type(length) is not int or not 0 <= length <= len(lists["token_loss_mask"]):
        title = f"input_lengths is {length!r:.40} for {len(lists['token_loss_mask'])} tokens with padding"
        raise log_error("length", title, file=file, row=row)

    lists = {name: values[:length] for name, values in lists.items()}
    trained = [bool(token) for token in lists["token_loss_mask"]]
    counts = bool(cells.get("sample_loss_mask"))
    columns = _split(lists, dump, trained, [token and counts for token in trained])

    # Without a forward pass of the old policy, NeMo-RL logs zeros in place of its log-probs, also for the prompt.
    if not any(lists["prev_logprobs"]):
        columns["old_log_prob"] = None
    reward = cells.get("filtered_rewards", cells.get("rewards"))
    return {
        "step": dump.step_of(file),
        "sequence_id": record.get("idx"),
        "reward": reward if counts else None,
        **columns,
    }


def _split(lists: Mapping[str, Any], dump: Dump, trained: list[bool], sampled: list[bool]) -> dict[str, Any]:
    """Split lists over prompt and response. The response begins at the first trained token."""
    start = trained.index(True) if True in trained else len(trained)
    columns = {column: lists[name][start:] for column, name in dump.fields.items() if name in lists}
    if "prompt_ids" in columns:
        columns["prompt_ids"] = lists[dump.fields["prompt_ids"]][:start]
    return {**columns, "response_mask": sampled[start:]}


_ROW_CONVERTERS = {PRIME_RL.name: prime_rl_row, NEMO_RL.name: nemo_rl_row}


def to_lines(batch: RolloutBatch) -> Iterator[str]:
    """Yield each row of a batch as one line of JSON, without columns that the batch lacks."""
    head = f'"{VERSION_FIELD}": "{SCHEMA_VERSION}"'
    columns = [name for name in batch.columns if batch.has(name)]
    texts = [_json_texts(batch.records.column(name)) for name in columns]
    for row in zip(*texts, strict=True) if texts else [()] * len(batch):
        fields = (f'"{name}": {text}' for name, text in zip(columns, row, strict=True) if text != "null")
        yield "{" + ", ".join([head, *fields]) + "}\n"


def _lines(path: Path, limits: FileLimits) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its line number."""
    number = rows = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            while line := stream.readline(limits.line_bytes + 1):
                number += 1
                # `readline` stops one byte beyond the limit, so a longer line is never in memory.
                if len(line) > limits.line_bytes:
                    raise limit_error(
                        "line_bytes",
                        f"line {number} has more than {limits.line_bytes:,} bytes",
                        limits.line_bytes,
                        file=path,
                        row=rows,
                    )
                if number - rows > rows + _MAX_BLANK_LINES:
                    raise log_error(
                        "json",
                        f"line {number:,} of {rows:,} rows: too many blank lines",
                        fix="remove the blank lines",
                        file=path,
                        row=rows,
                    )
                if not line.isspace():
                    rows += 1
                    limits.check_rows(rows, file=path)
                    yield number, line
    except (EOFError, OSError, zlib.error) as error:
        raise log_error(
            "unreadable",
            f"line {number + 1} cannot be read: {error}",
            fix="was it cut off while it was copied?",
            file=path,
        ) from error


def _parse(line: bytes, path: Path, *, row: int, number: int) -> dict[str, Any]:
    try:
        value = load_json(line)
    except ValueError as error:
        raise log_error(
            "json", f"line {number} is not JSON: {error}", fix="correct or delete it", file=path, row=row
        ) from error
    if not isinstance(value, dict):
        raise log_error("json", f"line {number} is a JSON {type(value).__name__}, not an object", file=path, row=row)
    return value


def _json_texts(array: pa.Array) -> list[str]:
    """Return the JSON of each value of a column. Replace NaN and infinity only in columns of numbers."""
    texts = [json.dumps(value, ensure_ascii=False) for value in array.to_pylist()]
    numbers = array.type.value_type if pa.types.is_list(array.type) else array.type
    if pa.types.is_floating(numbers):
        texts = [text.replace("NaN", "null").replace("Infinity", "1e999") for text in texts]
    return texts
