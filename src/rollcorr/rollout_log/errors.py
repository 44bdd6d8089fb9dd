"""What is raised for a rollout log that cannot be read as one."""

from __future__ import annotations

from rollcorr.config.finding import Finding


class RolloutLogError(ValueError):
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
    """An error with one finding: what is wrong, how to fix it, and in which file, row and column."""
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
