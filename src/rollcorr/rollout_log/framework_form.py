"""Form of a row of the table of other frameworks: its names in a training step, its dumps, and lines that log more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Kind of file that a framework writes.

    Attributes:
        name: short name of the dump.
        files: its path, with the framework's own placeholders. A number at `{step}` is the step.
        setting: the setting that makes the framework write it.
        form: the file format.
        recognized_by: names in every row of such a file; together they occur in no other known file.
        fields: column of the log → name in the file. Other columns are read under their own names.
        lacks: data that a check of the mismatch needs and that the file lacks; empty if it is complete.
        instead: the fix for `lacks`; by default, the framework's lines.
        recorded_with: column of the log → setting that makes the framework record it, if it does not always do so.
        layout: layout of the values of a row, and their conversion.
    """

    name: str
    files: str
    setting: str
    form: Literal["JSONL", "Parquet", "torch.save", "pickle"]
    recognized_by: frozenset[str]
    fields: Mapping[str, str] = field(default_factory=dict)
    lacks: str = ""
    instead: str = ""
    recorded_with: Mapping[str, str] = field(default_factory=dict)
    layout: str = "nothing is read"

    def step_of(self, path: str) -> int | None:
        """Return the number at `{step}` in the name of a file; `None` if the name has a different form."""
        pattern = re.escape(self._file_name).replace(r"\{step\}", r"(?P<step>\d{1,18})")
        found = re.match(pattern, path.rsplit("/", 1)[-1]) if "<step>" in pattern else None
        return None if found is None else int(found["step"])

    def is_named(self, path: str) -> bool:
        """Return whether a file has this dump's name. A name without words, such as `{step}.jsonl`, is none."""
        words = re.sub(r"\{\w+\}|\*", "*", self._file_name)
        return fnmatch(path.rsplit("/", 1)[-1], words) and not words.startswith("*.")

    @property
    def _file_name(self) -> str:
        return self.files.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Framework with its names for the columns of the log.

    Attributes:
        name: the framework's own spelling.
        version: the release or commit that was read.
        tensors: column of the log → name of the tensor in a training step. Alternatives, in the order of lookup, are
            joined by " or ".
        batch: the object with these tensors that `Monitor.correct` accepts; empty if it accepts none.
        further_masks: masks that are multiplied with the response mask if the batch contains them.
        total_lengths: for lists that are split over context ranks: tokens of prompt and response, for each sequence.
        dumps: the files that it writes.
        needs: the setting that `lines` need; empty if they need none.
        place: where `lines` belong: a file and a function.
        lines: Python code that makes it log both log-probs, where no setting does.
        log: the path that `lines` write.
    """

    name: str
    version: str
    tensors: Mapping[str, str]
    batch: str = ""
    further_masks: tuple[str, ...] = ()
    total_lengths: str | None = None
    dumps: tuple[Dump, ...] = ()
    needs: str = ""
    place: str = ""
    lines: str = ""
    log: str = "rollouts"

    def names(self, column: str) -> tuple[str, ...]:
        """Return the names of a column's tensor in a training step, in the order of lookup."""
        return tuple(self.tensors[column].split(" or ")) if column in self.tensors else ()


def writer_lines(file: str, mask: str, rollout: str, train: str, *, step: str, each: str = "") -> str:
    """Return lines that write a log: the name of a file and expressions; `each` is the head of a loop over batches."""
    indent = " " * (8 if each else 4)
    head = [
        "from rollcorr import RolloutBatch, RolloutLogWriter",
        f'with RolloutLogWriter(f"rollouts/{file}.parquet", overwrite=True) as log:',
        *([f"    {each}:"] if each else []),
    ]
    columns = f"rollout_log_prob={rollout}, old_log_prob={train}, step={step}"
    return "\n".join([*head, f"{indent}log.write(RolloutBatch.from_padded({mask}, {columns}))"])
