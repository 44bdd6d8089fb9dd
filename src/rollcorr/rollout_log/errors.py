"""Errors of invalid rollout logs, and the size limits of a file.

An untrusted file of a kilobyte can expand to gigabytes, so each reader enforces `FileLimits`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollcorr.config.documents import BadInputError
from rollcorr.config.finding import Finding
from rollcorr.rollout_log.arrow import pa


class RolloutLogError(BadInputError):
    """Error for an invalid rollout log. It contains `findings`; its message has one line per finding."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__(*findings)
        self.findings = findings

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def log_error(
    code: str,
    title: str,
    *,
    fix: str = "",
    file: object = None,
    row: int | None = None,
    column: str | None = None,
) -> RolloutLogError:
    """Build an error with one finding: the problem, its fix and its place.

    Args:
        code: the finding's kind, for programs.
        title: the problem, in a few words.
        fix: the change to make; optional.
        file: a path or text, stored as text; optional.
        row: position in the file, from 0; optional.
        column: the column of the rollout log; optional.
    """
    # A finding can cover several rows, with the first one and their number. This finding covers at most one row.
    return RolloutLogError(
        Finding(
            code=code,
            title=title,
            fix=fix,
            severity="error",
            file=None if file is None else str(file),
            column=column,
            first_row=row,
            rows=None if row is None else 1,
        )
    )


@dataclass(frozen=True, kw_only=True)
class FileLimits:
    """Size limits of a file. Above a limit, reading stops with an error that names the value, the limit and the option.

    With the default limits, reading stays below 1 GB of memory for any file. The defaults are far above the size of a
    training's files. Raise a limit for a file that you trust.

    Attributes:
        rows: rows of a file.
        row_tokens: values of one row in any of its columns, except kept ids.
        row_kept_ids: kept ids of one row.
        line_bytes: bytes of a line of JSON. How deep it may be nested is `rollcorr.config.documents.MAX_DEPTH`.
        page_bytes: bytes that the largest pages of a row group decompress to, over all columns that are read.
        footer_bytes: bytes of the footer of a Parquet file.
        pickle_bytes: bytes of a pickle: of a `.pkl` file, or within a `.pt` file, which stores tensors separately.
        pickle_objects: numbers in the lists of a pickle. A list or an object counts 7, a text 1 and 1 per 8 bytes.
    """

    rows: int = 1 << 24
    row_tokens: int = 1 << 21
    row_kept_ids: int = 1 << 23
    line_bytes: int = 1 << 24
    page_bytes: int = 1 << 27
    footer_bytes: int = 1 << 24
    pickle_bytes: int = 1 << 27
    pickle_objects: int = 1 << 23

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"limit {field.name} must be a whole number of at least 1, got {value!r}")

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> FileLimits:
        """Parse limits from texts such as `row_tokens=5000000`; each missing limit keeps its default.

        Raises:
            ValueError: a text has a different form, or a limit is unknown.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given: dict[str, Any] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in names:
                raise ValueError(f"limit {text!r} is not of the form NAME=NUMBER; names are {', '.join(names)}")
            given[name] = int(value) if value.isdecimal() else value
        return cls(**given)

    def check_rows(self, count: int, *, file: object) -> None:
        """Check the number of rows of a file.

        Args:
            count: rows that a file claims to have.
            file: its path, for the message.

        Raises:
            RolloutLogError: there are more rows than the limit.
        """
        if count > self.rows:
            raise limit_error("rows", f"{count:,} rows", self.rows, file=file)

    def check_row_lengths(self, records: pa.RecordBatch, *, file: object, first_row: int) -> None:
        """Check the number of values in each list of a batch.

        Args:
            records: the batch.
            file: its path, for the message.
            first_row: position of the first row in the file.

        Raises:
            RolloutLogError: a list is longer than the limit; the error contains the row and the column.
        """
        for column, array in zip(records.schema.names, records.columns, strict=True):
            if len(array) and pa.types.is_list(array.type):
                lengths = np.diff(array.offsets.to_numpy(zero_copy_only=False))
                self.check_lengths(lengths, column, file=file, first_row=first_row)

    def check_lengths(self, lengths: np.ndarray, column: str, *, file: object, first_row: int) -> None:
        """Check the number of values in each list of a column.

        Args:
            lengths: values of each row.
            column: the column of the log.
            file: its path, for the message.
            first_row: position of the first row in the file.

        Raises:
            RolloutLogError: a list is longer than the limit; the error contains the row and the column.
        """
        name = "row_kept_ids" if column == "kept_ids" else "row_tokens"
        row = int(lengths.argmax())
        if lengths[row] > getattr(self, name):
            raise limit_error(
                name,
                f"{int(lengths[row]):,} values in one row",
                getattr(self, name),
                file=file,
                row=first_row + row,
                column=column,
            )


def limit_error(
    name: str, found: str, limit: int, *, file: object, row: int | None = None, column: str | None = None
) -> RolloutLogError:
    """Build the error for a value that exceeds a limit."""
    return log_error(
        "limit",
        f"{found}; the limit is {limit:,}",
        fix=f"if you trust the file, raise it: --limit {name}=NUMBER, or FileLimits({name}=NUMBER)",
        file=file,
        row=row,
        column=column,
    )
