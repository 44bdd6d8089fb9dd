"""What a file of somebody else calls our columns: `--columns`, and the hints in errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.errors import RolloutLogError, log_error
from rollcorr.rollout_log.frameworks import known_names, recognize
from rollcorr.rollout_log.schema import COLUMNS, check_column_names, is_own
from rollcorr.rollout_log.source import LogSource

_FORMS = {".parquet": "Parquet", ".pt": "torch.save", ".pkl": "pickle"}
_SHOWN_FIELDS = 30


def parse_column_names(texts: Iterable[str]) -> dict[str, str]:
    """Column of the log → name in the file, from texts such as `rollout_log_prob=rollout_logprobs,old_log_prob=lp`.

    Raises:
        ValueError: a text is not of this form, the left side is no column, or a name is given twice.
    """
    names: dict[str, str] = {}
    for text in (part.strip() for joined in texts for part in joined.split(",")):
        ours, equals, theirs = (part.strip() for part in text.partition("="))
        if not (ours and equals and theirs):
            raise ValueError(f"columns {text[:80]!r} is not of the form OUR_NAME=THEIR_NAME[,…]")
        if ours not in COLUMNS and theirs in COLUMNS:
            raise ValueError(f"columns {text[:80]!r}: our name stands on the left; write {theirs}={ours[:40]}")
        if ours in names:
            raise ValueError(f"columns: {ours} is given twice, as {names[ours][:40]} and as {theirs[:40]}")
        names[ours] = theirs
    check_column_names(names)
    return names


def columns_of_fields(fields: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """Field of a file → column of the log. A field that has another column's values is not read under its own name."""
    columns = {field: column for column, field in names.items()}
    ours = (field for field in fields if field in COLUMNS or is_own(field))
    own = {field: field for field in ours if field not in columns and field not in names}
    return own | {field: columns[field] for field in fields if field in columns}


def missing_column(columns: Sequence[str], batch: RolloutBatch, source: LogSource, *, so: str = "") -> RolloutLogError:
    """The error for a file that records none of some columns: what it is, what it has, and what to write instead.

    Args:
        columns: one of them is needed.
        batch: the first rows of the file.
        source: what reads it.
        so: what follows, in a few words.
    """
    file = batch.file or ""
    fields = source.fields(Path(file))
    form = next((form for ending, form in _FORMS.items() if file.endswith(ending)), "JSONL")
    known = recognize(fields, form=form)
    if known is not None:
        framework, dump = known
        whose = f"{framework.name}'s {dump.name} (read at {framework.version})"
        if dump.lacks and not any(column in dump.fields for column in columns):
            return log_error("missing", f"{dump.lacks} (read at {framework.version})", fix=dump.instead, file=file)
        for column in columns:
            if column in dump.fields:
                fix = dump.recorded_with.get(column, "")
                return log_error("missing", f"{dump.fields[column]} is not recorded in {whose}{so}", fix=fix, file=file)

    # A log of this library has every column, and null in those that are not recorded.
    recorded = [field for field in fields if field not in COLUMNS or (field in batch.columns and batch.has(field))]
    recorded = [field for field in recorded if field != "schema_version"]
    near = near_names(columns, [field for field in recorded if field not in source.names.values()])
    found = ", ".join(near[column] for column in columns if column in near)
    if not found and any("rollout_corr/" in field for field in fields):
        fix = "give a rollout log; `rollcorr report RUN` and `rollcorr watch RUN` read metrics"
        return log_error("missing", "these are the metrics of steps, without tokens", fix=fix, file=file)

    shown = found or ", ".join(recorded[:_SHOWN_FIELDS])[:600] or "no columns"
    title = f"no column {' or '.join(columns)}{so}; the file has {shown}"

    option = ",".join(f"{column}={field}" for column, field in near.items()) if found else f"{columns[0]}=THEIR_NAME"
    fix = f"use --columns {option}"
    if not found:
        fix += ", if one of them holds it. Otherwise score the tokens, and log that too"
    return log_error("missing", title, fix=fix, file=file)


def near_names(columns: Sequence[str], fields: Sequence[str]) -> dict[str, str]:
    """Column of the log → field that seems to hold it, for the columns that are missed and those that others name."""
    free = [field for field in fields if field not in COLUMNS]
    found: dict[str, str] = {}
    for column in (*columns, *(name for name in COLUMNS if name not in columns)):
        # One of the columns that are missed is enough.
        if column in fields or (column in columns and any(other in found for other in columns)):
            continue
        names = [name for name in known_names(column) if name in free]
        if not names and column in columns:
            names = get_close_matches(column, free, n=1, cutoff=0.8)
        if names:
            found[column] = names[0]
            free.remove(names[0])
    return found
