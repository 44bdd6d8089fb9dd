"""Read what a training run left behind: metrics.jsonl and config.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.conversion import resolve
from rollcorr.config.yaml_text import load_yaml
from rollcorr.run_directory.directory import STEP_PREFIX, RunDirectory, paths_by_step
from rollcorr.run_directory.durable_files import partial_path, write_text_durably

PICTURES = {"before": "Before training", "after": "After training"}
"""Pictures that a run may leave, by `RunDirectory.picture`, and what they show."""


class BadInputError(ValueError):
    """A run or a log cannot be read; the message names the file, the place and the fix."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run on disk.

    Attributes:
        path: its directory.
        series: one dictionary of metrics per step, in order of steps; a step repeated after a resume counts once.
        config: the rollout correction of config.yaml; None when there is none.
        config_text: config.yaml as it stands.
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


def read_run(path: Path) -> Run:
    """Read a run directory. A cut-off last line, which a killed run leaves, is left out, and a remark says so.

    Raises:
        BadInputError: there is no such directory, no metrics.jsonl, no whole line in it, or a broken one in its middle.
    """
    directory, remarks = RunDirectory(path), []
    if not path.is_dir():
        raise BadInputError(f"{path} is not a run directory; give the folder that holds {directory.metrics.name}")

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
        if not isinstance(step, int):
            raise BadInputError(f"{directory.metrics}: step {step!r} is not a whole number; correct the line")
        by_step[step] = metrics
    repeated = len(steps) - len(by_step)
    if repeated:
        some = "1 step was" if repeated == 1 else f"{repeated} steps were"
        remarks.append(f"{some} logged twice (a resumed run); the later one counts")

    config, config_text, config_remarks = _read_config(directory.config)
    drawn = [(heading, directory.picture(when)) for when, heading in PICTURES.items()]
    return Run(
        path=path,
        series=tuple({**by_step[step], "step": step} for step in sorted(by_step)),
        config=config,
        config_text=config_text,
        remarks=(*remarks, *config_remarks, *_changes(directory.history)),
        diffusion=re.search(r"^recipe: flow_grpo\b", config_text, re.MULTILINE) is not None,
        pictures=tuple((heading, file) for heading, file in drawn if file.is_file()),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`. A cut-off last line, which a killed run leaves, is left out.

    Raises:
        BadInputError: the file cannot be opened, or another line is not a JSON object; the message names the line.
    """
    return _read_lines(path)[0]


def drop_later_steps(directory: RunDirectory, step: int) -> list[int]:
    """Forget what a run logged after `step`, because a resumed run computes it again.

    Half-written files of a killed run go too. Nothing else does: files of other names are not the run's.

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
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}; a run writes it, one JSON object per step") from error

    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    rows: list[dict[str, Any]] = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            # A line and its end are written at once, so only a line without an end was cut off by a crash.
            if number == lines[-1][0] and not text.endswith("\n"):
                return rows, number
            raise BadInputError(f"{path}:{number}: not JSON ({error}); repair or remove the line") from error
        if not isinstance(row, dict):
            raise BadInputError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}; remove the line")
        rows.append(row)
    return rows, None


def _changes(path: Path) -> list[str]:
    """The changes of options in a history.json, a remark for each time; none if it cannot be read."""
    if path.is_symlink():
        return []
    try:
        return [
            f"options changed after step {entry['after_step']}: "
            + "; ".join(f"{change['name']}: {change['old']!r} → {change['new']!r}" for change in entry["changes"])
            for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _read_config(path: Path) -> tuple[RolloutCorrectionConfig | None, str, list[str]]:
    """The correction's configuration. What cannot be read is a remark, because the metrics can be judged without it."""
    if not path.exists():
        return None, "", [f"there is no {path.name}; rules about thresholds were left out"]
    text = path.read_text(encoding="utf-8")
    try:
        return resolve(load_yaml(text)), text, []
    except (ValueError, TypeError) as error:
        return None, text, [f"{path.name} could not be interpreted ({error}); rules about thresholds were left out"]
