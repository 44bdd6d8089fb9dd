"""Read what a training run left behind: metrics.jsonl and config.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.conversion import resolve
from rollcorr.config.yaml_text import load_yaml

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
PICTURES = {"before": "Before training", "after": "After training"}
"""Pictures that a run may leave under images/, by file name, and what they show."""


class BadInputError(ValueError):
    """A run or a log cannot be read; the message names the file, the place and the mend."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run on disk.

    Attributes:
        path: its directory.
        series: one dictionary of metrics a step, in order of steps; a step repeated after a resume counts once.
        config: the rollout correction of config.yaml; None when there is none.
        config_text: config.yaml as it stands.
        remarks: what the reader should know, e.g. that the last line was cut off.
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
    """Read a run directory; a cut-off last line, as a killed run leaves, is left out and said.

    Raises:
        BadInputError: there is no such directory, no metrics.jsonl, no whole line in it, or a broken one in its middle.
    """
    if not path.is_dir():
        raise BadInputError(f"{path} is not a run directory; give the folder that holds {METRICS_FILE}")
    steps, remarks = _read_metrics(path / METRICS_FILE)
    config, config_text, config_remarks = _read_config(path / CONFIG_FILE)
    by_step: dict[int, Mapping[str, Any]] = {}
    for index, step in enumerate(steps, start=1):
        number = step.get("step", index)
        if not isinstance(number, int):
            raise BadInputError(f"{path / METRICS_FILE}: step {number!r} is not a whole number; mend the line")
        by_step[number] = step
    repeated = len(steps) - len(by_step)
    if repeated:
        some = "1 step was" if repeated == 1 else f"{repeated} steps were"
        remarks.append(f"{some} logged twice (a resumed run); the later one counts")
    return Run(
        path=path,
        series=tuple({**by_step[step], "step": step} for step in sorted(by_step)),
        config=config,
        config_text=config_text,
        remarks=tuple(remarks + config_remarks),
        diffusion=re.search(r"^recipe: flow_grpo\b", config_text, re.MULTILINE) is not None,
        pictures=tuple((title, file) for name, title in PICTURES.items() if (file := _picture(path, name)).is_file()),
    )


def _picture(path: Path, name: str) -> Path:
    return path / "images" / f"{name}.png"


def _read_metrics(path: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}; a run writes it, one JSON object a step") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    steps: list[Mapping[str, Any]] = []
    for number, line in lines:
        try:
            step = json.loads(line)
        except json.JSONDecodeError as error:
            if number == lines[-1][0] and steps and not text.endswith("\n"):
                return steps, [
                    f"the last line of {path.name} (line {number}) is cut off and was left out: a killed run"
                ]
            raise BadInputError(f"{path}:{number}: not JSON ({error}); repair or remove the line") from error
        if not isinstance(step, dict):
            raise BadInputError(f"{path}:{number}: expected a JSON object, got {type(step).__name__}; remove the line")
        steps.append(step)
    if not steps:
        raise BadInputError(f"{path} has no whole line; let the run finish at least one step")
    return steps, []


def _read_config(path: Path) -> tuple[RolloutCorrectionConfig | None, str, list[str]]:
    """The correction's configuration; what cannot be read is a remark, for the metrics can be judged without it."""
    if not path.exists():
        return None, "", [f"there is no {path.name}; rules about thresholds were left out"]
    text = path.read_text(encoding="utf-8")
    try:
        return resolve(load_yaml(text)), text, []
    except (ValueError, TypeError) as error:
        return None, text, [f"{path.name} could not be interpreted ({error}); rules about thresholds were left out"]
