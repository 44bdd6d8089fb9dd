"""Read the files of a training run: metrics.jsonl and config.yaml."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.checks import in_one_line
from rollcorr.config.conversion import resolve
from rollcorr.config.documents import dump_yaml, load_json, load_yaml, read_yaml_text
from rollcorr.config.secrets import redact, redact_text, secret_places
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.metrics_file import MAX_LINE_BYTES, MAX_MEMORY, StepStore, metrics_lines
from rollcorr.run_directory.metrics_file import BadInputError as BadInputError

PICTURES = {"before": "Before training", "after": "After training"}
"""Argument of `RunDirectory.picture` → heading of that picture."""

LINK_LEFT_OUT = "is a symbolic link out of the run directory, or no regular file, and was left out"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Training run on disk.

    Attributes:
        path: its directory.
        series: the metrics of each step by name, in order of steps; a step repeated after a resume counts once.
        config: the rollout correction of config.yaml, or None.
        config_text: config.yaml, without secrets.
        remarks: notes for the reader, for example that the last line was cut off.
        diffusion: whether the run trained a diffusion model, from the recipe in config.yaml.
        sampling: whether config.yaml has the settings that the sampler used.
        pictures: (heading, PNG file) of each picture.
    """

    path: Path
    series: tuple[Mapping[str, Any], ...]
    config: RolloutCorrectionConfig | None
    config_text: str
    remarks: tuple[str, ...]
    diffusion: bool = False
    sampling: bool = False
    pictures: tuple[tuple[str, Path], ...] = ()


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run directory. A truncated or broken line of metrics.jsonl is skipped with a remark.

    A symbolic link out of the directory is not followed, so that an untrusted run cannot expose the reader's files.
    A remark names each skipped link.

    Raises:
        BadInputError: there is no such directory, no metrics.jsonl, no complete line in it, or it is larger than the
            limits, or a link out of the directory.
    """
    path = Path(path)
    directory, remarks = RunDirectory(path), []
    check_run_directory(path)
    if _is_outside_run(directory.metrics, path):
        raise BadInputError(
            f"{directory.metrics} is a symbolic link out of the run directory, or no regular file; "
            "copy the file into it"
        )
    # A resumed run may compute and log the steps after its checkpoint twice.
    store, by_step, name = StepStore(), dict[int, Mapping[str, Any]](), directory.metrics.name
    count = broken = 0
    first_fault = ""
    for line in metrics_lines(directory.metrics):
        if line.fault and line.is_cut_off:
            remarks.append(
                f"the last line of {name} (line {line.number}) is cut off and was left out: the run was killed"
            )
        elif line.fault:
            broken += 1
            first_fault = first_fault or f"{name}:{line.number}: {line.fault}"
        else:
            count += 1
            metrics = store.add({"step": count, **line.metrics}, text_bytes=len(line.text))
            by_step[metrics["step"]] = metrics
        if store.bytes > MAX_MEMORY:
            raise BadInputError(
                f"{directory.metrics}: the first {line.number:,} lines take more than {MAX_MEMORY >> 20} MB of memory, "
                "the limit; thin it out, for example to every tenth line"
            )
    if broken:
        some = "1 line was" if broken == 1 else f"{broken} lines were"
        remarks.append(f"{some} left out; {first_fault}")
    if not by_step:
        why = f" ({remarks[-1]})" if remarks else ""
        raise BadInputError(f"{directory.metrics} has no whole line{why}; let the run finish at least one step")
    repeated = count - len(by_step)
    if repeated:
        some = "1 step was" if repeated == 1 else f"{repeated} steps were"
        remarks.append(f"{some} logged twice (a resumed run); the later one counts")

    # Never follow a link out of the directory: the report would publish a foreign file.
    config, config_text, config_remarks = _read_config(directory.config, path)
    drawn = [(heading, directory.picture(when)) for when, heading in PICTURES.items()]
    strange = [file for _, file in drawn if _is_outside_run(file, path)]
    remarks += [f"{file.relative_to(path)} {LINK_LEFT_OUT}" for file in strange]
    return Run(
        path=path,
        series=tuple(by_step[step] for step in sorted(by_step)),
        config=config,
        config_text=config_text,
        remarks=(*remarks, *config_remarks, *_describe_changes(directory.history, path)),
        diffusion=re.search(r"^recipe: flow_grpo\b", config_text, re.MULTILINE) is not None,
        sampling=re.search(r"^(rollout:\n(  .*\n)*?  )?sampling:", config_text, re.MULTILINE) is not None,
        pictures=tuple((heading, file) for heading, file in drawn if file not in strange and file.is_file()),
    )


def check_run_directory(path: Path) -> None:
    """Check that a path is a readable directory.

    Raises:
        BadInputError: there is no such directory, or it cannot be read. The message names the directory.
    """
    try:
        with os.scandir(path):
            os.stat(os.path.join(path, os.curdir))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadInputError(
            f"{path} is not a run directory; give the folder that holds {RunDirectory(path).metrics.name}"
        ) from error
    except OSError as error:
        raise BadInputError(f"{path}: it cannot be read ({error.strerror}); check who may read it") from error


def _is_outside_run(path: Path, run: Path) -> bool:
    """Return whether a path leads out of the run through a symbolic link, or is no regular file."""
    try:
        return not path.resolve().is_relative_to(run.resolve()) or (path.exists() and not path.is_file())
    except (OSError, RuntimeError):  # a cycle of links
        return True


def _describe_changes(path: Path, run: Path) -> list[str]:
    """Return a remark for each change of options in a history.json; an empty list for an unreadable file."""
    if _is_outside_run(path, run):
        return [f"{path.name} {LINK_LEFT_OUT}"]
    try:
        with path.open("rb") as file:
            entries = load_json(file.read(MAX_LINE_BYTES))["entries"]  # a longer file is truncated, so invalid
        return [
            redact_text(
                f"options changed after step {entry['after_step']}: "
                + "; ".join(f"{change['name']}: {change['old']!r} → {change['new']!r}" for change in entry["changes"])
            )
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _read_config(path: Path, run: Path) -> tuple[RolloutCorrectionConfig | None, str, list[str]]:
    """Return the correction's configuration, its text, and remarks. An unreadable file only adds a remark.

    Invalid YAML is not shown, because its secrets cannot be found.
    """
    if _is_outside_run(path, run):
        return None, "", [f"{path.name} {LINK_LEFT_OUT}; so were rules about thresholds"]
    if not path.exists():
        return None, "", [f"there is no {path.name}; rules about thresholds were left out"]
    text = ""
    try:
        written = read_yaml_text(path)
        document = load_yaml(written)

        # Text without secrets keeps its comments and layout.
        places = secret_places(document)
        text = dump_yaml(redact(document)) if places else redact_text(written)
        remarks = [f"{path.name} itself holds secrets, in {', '.join(places)}: do not share it"] if places else []
        return resolve(document), text, remarks
    except (OSError, ValueError, TypeError) as error:
        remark = f"{path.name} could not be interpreted ({in_one_line(error)}); rules about thresholds were left out"
        return None, text, [redact_text(remark)]
