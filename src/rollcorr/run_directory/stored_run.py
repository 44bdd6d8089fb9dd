"""Read what a training run left behind: metrics.jsonl and config.yaml."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.checks import in_one_line
from rollcorr.config.conversion import resolve
from rollcorr.config.json_text import load_json, openings
from rollcorr.config.secrets import redact, redact_text, secret_places
from rollcorr.config.yaml_text import dump_yaml, load_yaml, read_yaml_text
from rollcorr.run_directory.directory import STEP_PREFIX, RunDirectory, paths_by_step
from rollcorr.run_directory.durable_files import partial_path, write_text_durably

PICTURES = {"before": "Before training", "after": "After training"}
"""Pictures that a run may leave, by `RunDirectory.picture`, and what they show."""
MAX_LINE_BYTES = 1 << 20
"""Bytes of one line of metrics.jsonl: a run writes a few thousand."""
MAX_METRICS_BYTES = 1 << 27
"""Bytes of a metrics.jsonl."""
MAX_METRICS = 1 << 22
"""Numbers of a metrics.jsonl: 40,000 steps with 100 metrics. They are all in memory at once."""


LINK_LEFT_OUT = "is a symbolic link out of the run directory, or no regular file, and was left out"


class BadInputError(ValueError):
    """A run or a log cannot be read; the message names the file, the place and the fix."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run on disk.

    Attributes:
        path: its directory.
        series: one dictionary of metrics per step, in order of steps; a step repeated after a resume counts once.
        config: the rollout correction of config.yaml; None when there is none.
        config_text: config.yaml, without secrets.
        remarks: what the reader should know, for example that the last line was cut off.
        diffusion: it trained a diffusion model, by the recipe in config.yaml.
        pictures: (heading, PNG file) of what it drew.
    """

    path: Path
    series: tuple[Mapping[str, Any], ...]
    config: RolloutCorrectionConfig | None
    config_text: str
    remarks: tuple[str, ...]
    diffusion: bool = False
    pictures: tuple[tuple[str, Path], ...] = ()


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run directory. A cut-off last line, which a killed run leaves, is left out, and a remark says so.

    A symbolic link out of the directory is not followed, so that a stranger's run shows no file of its reader's. A
    remark says what was left out.

    Raises:
        BadInputError: there is no such directory, no metrics.jsonl, no whole line in it, or a broken one in its middle,
            or it is a link out of the directory.
    """
    path = Path(path)
    directory, remarks = RunDirectory(path), []
    check_run_directory(path)
    if _leads_out(directory.metrics, path):
        shown = f"{directory.metrics} is a symbolic link out of the run directory, or no regular file"
        raise BadInputError(f"{shown}; copy the file into it")
    steps, cut_off = _read_lines(directory.metrics)
    if not steps:
        raise BadInputError(f"{directory.metrics} has no whole line; let the run finish at least one step")
    if cut_off is not None:
        name = directory.metrics.name
        remarks.append(f"the last line of {name} (line {cut_off}) is cut off and was left out: the run was killed")

    # A resumed run computes the steps after its checkpoint again, and may have logged them before.
    by_step: dict[int, Mapping[str, Any]] = {}
    for index, metrics in enumerate(steps, start=1):
        step = metrics.get("step", index)
        if not isinstance(step, int) or isinstance(step, bool):
            shown = reprlib.repr(step)
            raise BadInputError(f"{directory.metrics}: step {shown} is not a whole number; correct the line")
        by_step[step] = metrics
    repeated = len(steps) - len(by_step)
    if repeated:
        some = "1 step was" if repeated == 1 else f"{repeated} steps were"
        remarks.append(f"{some} logged twice (a resumed run); the later one counts")

    config, config_text, config_remarks = _read_config(directory.config, path)
    measured = _evaluations(directory.summary, path)
    drawn = [(heading + measured.get(when, ""), directory.picture(when)) for when, heading in PICTURES.items()]
    strange = [file for _, file in drawn if _leads_out(file, path)]
    remarks += [f"{file.relative_to(path)} {LINK_LEFT_OUT}" for file in strange]
    return Run(
        path=path,
        series=tuple({**by_step[step], "step": step} for step in sorted(by_step)),
        config=config,
        config_text=config_text,
        remarks=(*remarks, *config_remarks, *_changes(directory.history, path)),
        diffusion=re.search(r"^recipe: flow_grpo\b", config_text, re.MULTILINE) is not None,
        pictures=tuple((heading, file) for heading, file in drawn if file not in strange and file.is_file()),
    )


def check_run_directory(path: Path) -> None:
    """Check that a run directory is one, and that its files can be looked up.

    Raises:
        BadInputError: there is no such directory, or it cannot be read. The message names the directory.
    """
    try:
        with os.scandir(path):
            os.stat(os.path.join(path, os.curdir))
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"{path} is not a run directory; give the folder that holds {RunDirectory(path).metrics.name}"
        raise BadInputError(message) from error
    except OSError as error:
        raise BadInputError(f"{path}: it cannot be read ({error.strerror}); check who may read it") from error


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`. A cut-off last line, which a killed run leaves, is left out.

    Raises:
        BadInputError: the file cannot be opened, or another line is not a JSON object; the message names the line.
    """
    return _read_lines(Path(path))[0]


def drop_later_steps(directory: RunDirectory, step: int) -> list[int]:
    """Forget what a run logged after `step`, because a resumed run computes it again.

    Half-written files of a killed run go too. Nothing else does: files of other names are not the run's.

    Args:
        directory: of the run.
        step: the last one that is kept.

    Returns:
        The steps up to `step` whose line in metrics.jsonl is lost or damaged.
    """
    for path in (*directory.written, *map(directory.picture, PICTURES)):
        if not partial_path(path).is_dir():
            partial_path(path).unlink(missing_ok=True)
    for log in directory.rollouts.glob(f".{STEP_PREFIX}*.parquet.tmp-*"):
        log.unlink()
    for later, log in paths_by_step(directory.rollouts, ".parquet").items():
        if later > step:
            log.unlink()

    if not directory.metrics.is_file():
        return list(range(1, step + 1))
    text = directory.metrics.read_text(encoding="utf-8", errors="replace")
    rows = _whole_rows(text)
    kept = "".join(line for number, line in rows if number <= step)
    if kept != text:
        write_text_durably(directory.metrics, kept)
    return sorted(set(range(1, step + 1)) - {number for number, _ in rows})


def _whole_rows(text: str) -> list[tuple[int, str]]:
    """(step, line) of each whole line of a metrics.jsonl."""
    rows = []
    for line in text.splitlines(keepends=True):
        # A line and its end are written at once, so a line without an end was cut off.
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            if line.endswith("\n"):
                rows.append((int(json.loads(line)["step"]), line))
    return rows


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int | None]:
    """The whole lines of a metrics.jsonl, and the number of a cut-off last line, if there is one."""
    rows: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    size = values = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                size += len(line)
                values += line.count(b",") + openings(line)
                _check_size(path, number, line=len(line), whole=size, values=values)
                if not line.strip():
                    continue

                # A line and its end are written at once, so only a line without an end was cut off by a crash.
                try:
                    row = load_json(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        return rows, number
                    message = f"{path}:{number}: not JSON ({error}); repair or remove the line"
                    raise BadInputError(message) from error
                if not isinstance(row, dict):
                    kind = type(row).__name__
                    raise BadInputError(f"{path}:{number}: expected a JSON object, got {kind}; remove the line")
                rows.append(_checked(row, f"{path}:{number}", names))
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}; a run writes it, one JSON object per step") from error
    return rows, None


def _leads_out(path: Path, run: Path) -> bool:
    """Whether a file of a run, or a folder that it is in, is a symbolic link to somewhere else, or is a pipe."""
    try:
        return not path.resolve().is_relative_to(run.resolve()) or (path.exists() and not path.is_file())
    except (OSError, RuntimeError):  # links in a circle lead nowhere
        return True


def _check_size(path: Path, number: int, *, line: int, whole: int, values: int) -> None:
    """Stop before a line, or the file, is larger than what a run writes."""
    if line > MAX_LINE_BYTES:
        message = f"{path}:{number}: the line has more than {MAX_LINE_BYTES:,} bytes, the limit; remove it"
        raise BadInputError(message)
    for found, limit, what in ((whole, MAX_METRICS_BYTES, "bytes"), (values, MAX_METRICS, "numbers")):
        if found > limit:
            message = f"{path}: more than {limit:,} {what}, the limit; thin it out, for example to every tenth line"
            raise BadInputError(message)


def _checked(row: dict[str, Any], place: str, names: dict[str, str]) -> dict[str, Any]:
    """A line whose numbers a double can hold. The lines share the texts of their names, most of what they take."""
    for name, value in row.items():
        if isinstance(value, int) and value.bit_length() > 63:
            shown = reprlib.repr(name)
            raise BadInputError(f"{place}: {shown} is an integer of more than 63 bits; repair or remove the line")
    return {names.setdefault(name, name): value for name, value in row.items()}


def _changes(path: Path, run: Path) -> list[str]:
    """The changes of options in a history.json, a remark for each time; none if it cannot be read."""
    if _leads_out(path, run):
        return [f"{path.name} {LINK_LEFT_OUT}"]
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LINE_BYTES)  # what is longer is cut, and then no JSON
        return [
            redact_text(
                f"options changed after step {entry['after_step']}: "
                + "; ".join(f"{change['name']}: {change['old']!r} → {change['new']!r}" for change in entry["changes"])
            )
            for entry in load_json(content)["entries"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _evaluations(path: Path, run: Path) -> dict[str, str]:
    """What the evaluations in a summary.json say of color and shape, by when they were made; none if it has none."""
    if _leads_out(path, run):
        return {}
    try:
        with path.open("rb") as file:
            summary = load_json(file.read(MAX_LINE_BYTES))
        found = {}
        for when in PICTURES:
            values = summary.get(when) or {}
            parts = [
                f"{what} right in {values[f'{kind}_accuracy']:.0%}, of held-out prompts in "
                f"{values[f'held_out_{kind}_accuracy']:.0%}"
                for kind, what in (("color", "color"), ("shape", "shape"))
                if f"held_out_{kind}_accuracy" in values
            ]
            found[when] = ": " + "; ".join(parts) if parts else ""
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _read_config(path: Path, run: Path) -> tuple[RolloutCorrectionConfig | None, str, list[str]]:
    """The correction's configuration, and its text. What cannot be read is a remark: metrics are judged without it.

    A text that is no YAML is not shown, because nothing tells which of its values are secrets.
    """
    if _leads_out(path, run):
        return None, "", [f"{path.name} {LINK_LEFT_OUT}; so were rules about thresholds"]
    if not path.exists():
        return None, "", [f"there is no {path.name}; rules about thresholds were left out"]
    text = ""
    try:
        written = read_yaml_text(path)
        document = load_yaml(written)

        # Text that has no secret stays as it was written, with its comments.
        places = secret_places(document)
        text = dump_yaml(redact(document)) if places else redact_text(written)
        remarks = [f"{path.name} itself holds secrets, in {', '.join(places)}: do not share it"] if places else []
        return resolve(document), text, remarks
    except (OSError, ValueError, TypeError) as error:
        why = redact_text(in_one_line(error))
        remark = f"{path.name} could not be interpreted ({why}); rules about thresholds were left out"
        return None, text, [remark]
