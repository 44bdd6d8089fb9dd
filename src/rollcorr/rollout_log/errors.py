"""What can be wrong with a rollout log, said with the file, the row, the column and the mend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One finding in a rollout log.

    Attributes:
        code: short fixed name of the kind of finding, for programs ("length", "missing", "zeros", …).
        message: what is wrong, with the value and the limit; it describes the first offending row.
        hint: how to mend it.
        severity: "error" when the log cannot be trusted, "warning" when it may be as intended.
        file: the file, as it was given.
        row: first offending row, counted from 0 within the file; None when the whole file is meant.
        column: the column, or None when the whole row or file is meant.
        rows: how many rows have this problem.
    """

    code: str
    message: str
    hint: str = ""
    severity: Literal["error", "warning"] = "error"
    file: str | None = None
    row: int | None = None
    column: str | None = None
    rows: int = 1

    def __str__(self) -> str:
        place = [self.file or "rollout batch"]
        if self.row is not None:
            place.append(f"row {self.row}")
        if self.column is not None:
            place.append(f"column {self.column}")
        others = self.rows - 1
        more = f" (and {others} more row{'s' * (others > 1)})" if others else ""
        return f"{', '.join(place)}: {self.message}{more}" + (f"; {self.hint}" if self.hint else "")


class RolloutLogError(ValueError):
    """A rollout log that cannot be read as one: carries its `Problem`s, and reads as their text, one a line."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))
