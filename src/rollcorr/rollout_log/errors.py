"""What is raised for a rollout log that cannot be read as one."""

from __future__ import annotations

from rollcorr.config.finding import Finding
from rollcorr.config.input_file import BadInputError


class RolloutLogError(BadInputError):
    """A rollout log that cannot be read as one. It carries `findings`, and its text is theirs, one per line."""

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
    """An error with one finding: what is wrong, how to fix it, and where, as far as that is known.

    Args:
        code: the finding's kind, for programs.
        title: what is wrong, in a few words.
        fix: what to change.
        file: a path or text; kept as text.
        row: counted from 0 within the file. None: the error is not about one row.
        column: the column of the rollout log.
    """
    # A finding may stand for many rows: it has the first one and their number. This one stands for one row, if any.
    finding = Finding(
        code=code,
        title=title,
        fix=fix,
        severity="error",
        file=None if file is None else str(file),
        column=column,
        first_row=row,
        rows=None if row is None else 1,
    )
    return RolloutLogError(finding)
