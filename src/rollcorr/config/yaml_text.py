"""YAML in and out, safe for thresholds.

YAML 1.1 drops underscores from numbers, so an unquoted band `0.5_2` would arrive as 0.52, and it reads `1e-4` as a
text. Here a threshold with an underscore stays a text, `1e-4` is a number, and a key written twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

_TEXT_KEYS = {"rollout_is_threshold", "rollout_rs_threshold"}
_TEXT = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """The safe loader, with thresholds kept as written."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is written twice", key.start_mark
                )
            seen.add(key.value)
            if key.value in _TEXT_KEYS and isinstance(value, yaml.ScalarNode) and "_" in value.value:
                value.tag = _TEXT
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_yaml(text: str) -> Any:  # noqa: ANN401 - a document may hold any plain value
    """Read one YAML document into plain values.

    Raises:
        ValueError: the text is not a YAML document, or a mapping has a key twice; the line is named.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not a YAML document: {error}") from error


def dump_yaml(document: Mapping[str, Any]) -> str:
    """Write plain values as YAML, in the order given; texts that YAML would read as numbers are quoted."""
    return yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=120)
