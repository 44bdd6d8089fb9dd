"""The one table of other frameworks, to recognize their files, and to say which column a file lacks.

`FRAMEWORKS` contains, for each framework, the version that was read. The readers of foreign files,
`Monitor.correct(batch)`, the hints in errors and docs/reference/dumps.md use it. For a user's own file, `--columns`
maps its names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from rollcorr.rollout_log.errors import RolloutLogError, log_error
from rollcorr.rollout_log.framework_dumps import NEMO_RL, PRIME_RL, SKYRL, SLIME
from rollcorr.rollout_log.framework_form import Dump, Framework
from rollcorr.rollout_log.framework_lines import AREAL, MS_SWIFT, OPENRLHF, ROLL, TINKER, TRL, VERL
from rollcorr.rollout_log.schema import COLUMNS, OWN_PREFIX, check_column_names

if TYPE_CHECKING:
    from rollcorr.rollout_log.batch import RolloutBatch
    from rollcorr.rollout_log.source import LogSource

FRAMEWORKS: tuple[Framework, ...] = (
    VERL,
    TRL,
    NEMO_RL,
    PRIME_RL,
    SLIME,
    SKYRL,
    AREAL,
    ROLL,
    OPENRLHF,
    MS_SWIFT,
    TINKER,
)
"""The frameworks that are known."""

OWN = Framework(
    name="rollcorr",
    version="",
    tensors={
        "response_mask": "response_mask",
        "rollout_log_prob": "rollout_log_prob",
        "old_log_prob": "old_log_prob or train_log_prob",
    }
    | {name: name for name in ("response_ids", "advantages", "group_id", "sequence_id")},
    batch="a mapping with the rollout log's own columns",
)
"""This library's own names in a batch."""

# Further spellings in users' own files.
_COLUMN_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "rollout_log_prob": ("rollout_logprob", "sampling_logprobs", "sampler_logprobs", "behavior_logprobs"),
    "old_log_prob": ("old_logprobs", "old_logprob", "prox_logp", "proximal_logprobs", "train_log_probs"),
    "log_prob": ("logprobs", "train_logprobs"),
    "response_mask": ("action_mask", "completion_mask"),
    "reward": ("rewards", "score"),
}


def recognize(names: Collection[str], *, form: str) -> tuple[Framework, Dump] | None:
    """Return the framework and dump of a file with these names, or `None` if the file is unknown."""
    known = [(framework, dump) for framework in FRAMEWORKS for dump in framework.dumps if dump.form == form]
    return next((found for found in known if found[1].recognized_by.issubset(names)), None)


_FORMAT_NAMES = {".parquet": "Parquet", ".pt": "torch.save", ".pkl": "pickle"}
_MAX_SHOWN_FIELDS = 30


def parse_column_names(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts such as `rollout_log_prob=rollout_logprobs,old_log_prob=lp`.

    Returns:
        Column of the log → name in the file.

    Raises:
        ValueError: a text has a different form, the left side is no column, or a name is given twice.
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
    """Map each field of a file to a column of the log. A field that `names` maps is not read under its own name."""
    columns = {field: column for column, field in names.items()}
    ours = (field for field in fields if field in COLUMNS or field.startswith(OWN_PREFIX))
    own = {field: field for field in ours if field not in columns and field not in names}
    return own | {field: columns[field] for field in fields if field in columns}


def missing_column(columns: Sequence[str], batch: RolloutBatch, source: LogSource, *, so: str = "") -> RolloutLogError:
    """Build the error for a file without any of the required columns. It contains the file's columns and the fix.

    Args:
        columns: the columns, of which at least one is required.
        batch: the first rows of the file.
        source: the reader of the file.
        so: the consequence, in a few words; defaults to an empty text.
    """
    file = batch.file or ""
    fields = source.fields(Path(file))
    form = next((form for ending, form in _FORMAT_NAMES.items() if file.endswith(ending)), "JSONL")
    known = recognize(fields, form=form)
    if known is not None:
        framework, dump = known
        whose = f"{framework.name}'s {dump.name} (read at {framework.version})"
        if dump.lacks and not any(column in dump.fields for column in columns):
            return incomplete_dump(framework, dump, file=file)
        for column in columns:
            if column in dump.fields:
                fix = dump.recorded_with.get(column, "")
                return log_error("missing", f"{dump.fields[column]} is not recorded in {whose}{so}", fix=fix, file=file)

    # A log of this library contains every column, with null if it is not recorded.
    recorded = [field for field in fields if field not in COLUMNS or (field in batch.columns and batch.has(field))]
    recorded = [field for field in recorded if field != "schema_version"]
    near = near_names(columns, [field for field in recorded if field not in source.names.values()])
    found = ", ".join(near[column] for column in columns if column in near)
    if not found and any("rollout_corr/" in field for field in fields):
        fix = "give a rollout log; `rollcorr report RUN` and `rollcorr watch RUN` read metrics"
        return log_error("missing", "these are the metrics of steps, without tokens", fix=fix, file=file)

    shown = found or ", ".join(recorded[:_MAX_SHOWN_FIELDS])[:600] or "no columns"
    title = f"no column {' or '.join(columns)}{so}; the file has {shown}"

    option = ",".join(f"{column}={field}" for column, field in near.items()) if found else f"{columns[0]}=THEIR_NAME"
    fix = f"use --columns {option}"
    if not found:
        fix += ", if one of them holds it. Otherwise score the tokens, and log that too"
    return log_error("missing", title, fix=fix, file=file)


def incomplete_dump(framework: Framework, dump: Dump, *, file: object) -> RolloutLogError:
    """Build the error for a dump that lacks the log-probs of a side. It contains the setting or the lines to add."""
    fix = dump.instead or how_to_log(framework)
    return log_error("missing", f"{dump.lacks} (read at {framework.version})", fix=fix, file=file)


def how_to_log(framework: Framework) -> str:
    """Return how to make a framework write both log-probs: the setting of a dump, or lines to add and their place."""
    complete = [dump for dump in framework.dumps if dump.fields and not dump.lacks]
    if complete:
        return f"its {complete[0].name} has both log-probs: {complete[0].setting}; rollcorr check {complete[0].files}"
    needs = f"{framework.needs}, and add" if framework.needs else "add"
    lines = indent(framework.lines, "    ")
    return f"{needs} to {framework.place}:\n\n{lines}\n\nand run: rollcorr check {framework.log}"


def near_names(columns: Sequence[str], fields: Sequence[str]) -> dict[str, str]:
    """Map columns of the log to similar fields: the missing columns, and the columns that a framework names."""
    free = [field for field in fields if field not in COLUMNS]
    found: dict[str, str] = {}
    for column in (*columns, *(name for name in COLUMNS if name not in columns)):
        # One match for the missing columns is enough.
        if column in fields or (column in columns and any(other in found for other in columns)):
            continue
        tensors = [name for framework in FRAMEWORKS for name in framework.names(column)]
        names = [name for name in (*tensors, *_COLUMN_SPELLINGS.get(column, ())) if name in free]
        if not names and column in columns:
            names = get_close_matches(column, free, n=1, cutoff=0.8)
        if names:
            found[column] = names[0]
            free.remove(names[0])
    return found
