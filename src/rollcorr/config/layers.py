"""Layers of a configuration: a file, then each dotted override; the later one wins.

    run.yaml  algorithm.rollout_correction.rollout_is=token  +actor_rollout_ref.rollout.calculate_log_probs=true

Overrides of a preset in the newest form change that preset. Overrides of an older form replace it, because an older
generation had no option of the preset's name. `rollcorr.config.conversion` reads the merged document.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from rollcorr.config.conversion import OPTION_NAMES, expand_dotted, is_option, join_blocks
from rollcorr.config.correction_options import RolloutCorrectionConfig
from rollcorr.config.documents import load_yaml, read_yaml_text
from rollcorr.config.schemas import SECTION, find_schema, nested, overrides
from rollcorr.config.secrets import redact_text

ASSIGNMENT = re.compile(r"^ *(?:Configuration: *)?(\+?[\w.-]+) *= *(.*?)[ \\]*$", re.MULTILINE)
_IN_PROSE = re.compile(r'(?<![\w.])(\+?[\w.]+) *= *("[^"]*"|[\w.+-]+(?:,[\w.+-]+(?![\w.+-]| *=))*)')


def read_options(path: Path) -> Any:  # noqa: ANN401 (a file may contain any plain value)
    """Return the document of a YAML file, or of lines `name = value`, as guides print options.

    Raises:
        OSError: the file cannot be read.
        ValueError: as `read_yaml_text` and `load_yaml`; for lines, the message contains overrides to type.
    """
    text = read_yaml_text(path)
    lines = [line for line in text.splitlines() if line.partition("#")[0].strip()]
    if not lines or not all(map(ASSIGNMENT.match, lines)):
        return load_yaml(text)
    try:
        return load_yaml(ASSIGNMENT.sub(r"\1: \2", text))
    except ValueError as error:
        raise ValueError(f"{error}{_overrides_in(text)}") from error


def _overrides_in(text: str) -> str:
    """Return the end of an error: the first value of each option in prose, or in alternatives, as overrides."""
    found = [(name, value.strip('"').rstrip(".")) for name, value in _IN_PROSE.findall(redact_text(text))]

    # The first value of a name wins, at the place of the name.
    return f". Write overrides instead: {overrides(dict(found) | dict(reversed(found)))}" if found else ""


def parse_override(text: str) -> dict[str, Any]:
    """Return `dotted.name=value` as nested mappings; YAML reads the value as it would in a file.

    A `+` before the name, Hydra's mark of a new key, has no effect.

    Raises:
        ValueError: the text has no `=`, a name has other characters than letters, digits, `_` and `-`, or the value is
            no YAML. Secrets are removed from the message.
    """
    name, separator, value = text.partition("=")
    parts = name.strip().removeprefix("+").split(".")
    shown = reprlib.repr(redact_text(text))
    if not separator or not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise ValueError(f"override {shown} is not of the form dotted.name=value{_overrides_in(text)}")

    # The last part stays a key, so that YAML reads the value as it would in a file: thresholds keep their underscore.
    try:
        document = load_yaml(f"{parts[-1]}: {value}")
        if len(document) != 1:
            raise ValueError("it sets more than one option; write one override for each")
        (parsed,) = document.values()
    except ValueError as error:
        raise ValueError(f"override {shown}: {error}{_overrides_in(text)}") from error
    return nested(name.strip(), parsed)


def read_document(arguments: Sequence[str]) -> Any:  # noqa: ANN401 (a file may contain any plain value)
    """Return the document of command-line arguments: one YAML file at most, and `dotted.name=value` over it.

    Raises:
        OSError: the file cannot be read.
        ValueError: there are two files, the file is no YAML, or an override is malformed.
    """
    # A folder's name may contain "=". A text longer than a path is no file, and no error of `os.path.isfile`.
    files = [text for text in arguments if "=" not in text or os.path.isfile(text)]
    if len(files) > 1:
        raise ValueError(f"one configuration file at most, got {', '.join(files)}; write a change as name=value")
    layers = [read_options(Path(file)) for file in files]
    layers += [parse_override(text) for text in arguments if text not in files]
    if not all(isinstance(layer, Mapping) for layer in layers) or not layers:
        return layers[0] if layers else {}
    return merge_layers(layers)


def merge_layers(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers: blocks are merged, any other value replaces the previous one.

    Args:
        layers: documents, the strongest last. A key may be dotted.

    Returns:
        One document. Its correction is flat in `algorithm` if the last form was, otherwise in `rollout_correction`.

    Raises:
        ValueError: no preset has the name in the file, or the overrides of a preset mix generations.
    """
    documents = [expand_dotted(layer) for layer in layers]
    if any("algorithm" in document or "actor_rollout_ref" in document for document in documents):
        documents = [under_algorithm(document) for document in documents]
    merged = _with_correction(reduce(partial(join_blocks, later_wins=True), documents, {}), documents)
    sections = [document["algorithm"] for document in documents if isinstance(document.get("algorithm"), Mapping)]
    if sections and isinstance(merged["algorithm"], Mapping):
        merged["algorithm"] = _with_correction(merged["algorithm"], sections)
    return merged


def under_algorithm(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with a correction, or options of one, at the top moved into `algorithm`."""
    places = {name: f"algorithm.{SECTION}.{name}" for name in OPTION_NAMES} | {SECTION: f"algorithm.{SECTION}"}
    return expand_dotted({places.get(key, key): value for key, value in document.items()})


def _with_correction(section: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a merged section with the correction that its layers describe together."""
    whole: list[str | None] = []
    block: dict[str, Any] | None = None
    flat: dict[str, Any] = {}
    for layer in layers:
        own = {key: value for key, value in layer.items() if is_option(key)}
        value = layer.get(SECTION)
        if own and value is not None:  # `convert` reports the mixture of one file
            return dict(section)
        if isinstance(value, Mapping):
            block = {**(block or {}), **value}
        elif SECTION in layer:
            whole, block, flat = [value], None, {}
        flat |= own

    # Options of an older form replace a preset; in the newest form they change it.
    preset = next(iter(whole), None)
    rest = {key: value for key, value in section.items() if key != SECTION and not is_option(key)}
    changes = flat or block
    if isinstance(preset, str) and changes and find_schema(changes, flat=bool(flat)) == "newest":
        if flat:
            return {**rest, SECTION: preset, **flat}
        block = RolloutCorrectionConfig.preset(preset).to_dict() | changes
    if block is not None or (whole and not flat):
        rest[SECTION] = preset if block is None else block
    return rest | flat
