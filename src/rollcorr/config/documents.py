"""Load untrusted YAML and JSON within limits: bytes, depth, and the number of values with aliases expanded.

YAML 1.1 drops underscores from numbers, so an unquoted band `0.5_2` would become 0.52, and it reads `1e-4` as a
string. These loaders keep a threshold with an underscore as a string, read `1e-4` as a number, and reject duplicate
keys.

An invalid document raises `ValueError` with a one-line message.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MAX_BYTES = 1 << 20
"""Maximum size of a YAML file, bytes."""
MAX_VALUES = 20_000
"""Maximum number of values with aliases expanded; a long string counts once per 100 characters."""
MAX_DEPTH = 64
"""Maximum nesting depth of lists and mappings, or objects."""
MAX_INTEGER = 1000
"""Maximum length of an integer, characters."""

_THRESHOLD_KEYS = ("rollout_is_threshold", "rollout_rs_threshold")
_STRING_TAG = "tag:yaml.org,2002:str"
_INTEGER_TAG = "tag:yaml.org,2002:int"
_MERGE_TAG = "tag:yaml.org,2002:merge"

_OPENING, _CLOSING = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))
_DEPTH_CHANGE = {**dict.fromkeys(_OPENING, 1), **dict.fromkeys(_CLOSING, -1)}


class BadInputError(ValueError):
    """Error for a run or log that cannot be read; the message names the file, the place and the fix."""


def open_input(path: Path) -> BinaryIO:
    """Open a file to read its bytes. The only pipes allowed are `/dev/stdin` and a shell's `<(command)`.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is a named pipe; opening it would wait for a writer.
    """
    if path.is_fifo() and str(path.parent) not in ("/dev", "/dev/fd", "/proc/self/fd"):
        raise ValueError(f"{path} is a named pipe; copy what it gives into a file, or write <(command)")
    return path.open("rb")


class _LimitError(yaml.MarkedYAMLError):
    """Error for valid YAML that exceeds the size or depth limit."""


class _Loader(yaml.SafeLoader):
    """PyYAML safe loader with limits that keeps thresholds as written."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._current_depth = 0
        self._composed = 0
        self._written_out: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node, or the target of an alias; raise if the document exceeds a limit."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        is_alias = isinstance(event, yaml.AliasEvent)

        # Composing is recursive, and so is every reader of the document, so check the depth on the way down.
        self._current_depth += 1
        self._composed += 1
        self._check_limits(self._composed, self._current_depth, mark)
        node = super().compose_node(parent, index)
        self._current_depth -= 1
        if node is None:
            return None

        # PyYAML shares the target of an alias, but walking, copying or printing the document expands it.
        if not is_alias:
            self._written_out[node] = self._expanded_size(node)
        elif node not in self._written_out:
            raise _LimitError(None, None, f"alias *{event.anchor} stands for a block that contains it", mark)
        self._check_limits(*self._written_out[node], mark)
        return node

    def _expanded_size(self, node: yaml.Node) -> tuple[int, int]:
        """Compute the number of values and the depth of a node with composed children."""
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value) // 100, 0
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        sizes = [self._written_out[part] for part in parts]
        return 1 + sum(values for values, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)

    def _check_limits(self, values: int, depth: int, mark: yaml.Mark) -> None:
        if values > MAX_VALUES:
            raise _LimitError(
                None,
                None,
                f"{values:,} values, with aliases written out; the limit is {MAX_VALUES:,}. Use fewer aliases",
                mark,
            )
        if depth > MAX_DEPTH:
            raise _LimitError(
                None, None, f"nested {depth} levels deep; the limit is {MAX_DEPTH}. Flatten the document", mark
            )

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401
        """Return the value of a node; raise an error with its line if the text does not match the tag."""
        if node.tag == _INTEGER_TAG and len(node.value) > MAX_INTEGER:
            raise _LimitError(
                None,
                None,
                f"an integer of {len(node.value):,} characters; the limit is {MAX_INTEGER:,}",
                node.start_mark,
            )
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r:.60} is no {node.tag.rpartition(':')[2]}", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping with thresholds kept as written; raise for a duplicate key."""
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen and key.tag != _MERGE_TAG:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value[:60]!r} is written twice", key.start_mark
                )
            seen.add(key.value)
            if key.value.endswith(_THRESHOLD_KEYS) and isinstance(value, yaml.ScalarNode) and "_" in value.value:
                value.tag = _STRING_TAG
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_yaml(text: str) -> Any:  # noqa: ANN401 - a document contains any plain value
    """Read one YAML document.

    Returns:
        Plain values: dictionaries, lists, strings, numbers, booleans and nulls.

    Raises:
        ValueError: the text is not a YAML document, a mapping has a key twice, or the document exceeds a limit
            (`MAX_VALUES`, `MAX_DEPTH`, `MAX_INTEGER`). The message is one line and names the place.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = "" if isinstance(error, _LimitError) else "not a YAML document: "
        raise ValueError(problem + _format_error(error)) from error


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is a named pipe, longer than `MAX_BYTES`, or not UTF-8. Only the first message names the file.
    """
    # Limit the read: the file may be huge, and a device may never end.
    with open_input(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes, the limit of a YAML file; is it a configuration?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line}: byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from error


def read_yaml(path: Path) -> Any:  # noqa: ANN401 - a document contains any plain value
    """Read the document of a YAML file into plain values.

    Raises:
        OSError: the file cannot be read.
        ValueError: as `read_yaml_text` and `load_yaml`.
    """
    return load_yaml(read_yaml_text(path))


def dump_yaml(document: Mapping[str, Any]) -> str:
    """Format plain values as YAML, in the given order; quote strings that YAML would read as numbers."""
    return yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=120)


def _format_error(error: yaml.YAMLError) -> str:
    """Return PyYAML's message with the place in front."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        return place + " ".join(str(error.problem or error.context).split())
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position + 1} is U+{error.character:04X}: {error.reason}"
    return " ".join(str(error).split())


def load_json(text: bytes) -> Any:  # noqa: ANN401 - a document contains any plain value
    """Read one JSON document into plain values.

    Raises:
        ValueError: the text is not UTF-8 or not JSON, it is nested deeper than `MAX_DEPTH`, an object has a key twice,
            or an integer has more digits than Python reads. The message is one line.
    """
    # Count brackets first: cheap, and rarely over the limit.
    if openings(text) > MAX_DEPTH and (depth := _depth(text)) > MAX_DEPTH:
        raise ValueError(f"nested {depth:,} levels deep; the limit is {MAX_DEPTH}. Flatten it")
    try:
        return json.loads(text.removeprefix(codecs.BOM_UTF8).decode(), object_pairs_hook=_build_object)
    except RecursionError as error:  # the caller's stack is already deep
        raise ValueError(f"nested too deep to be read here; the limit is {MAX_DEPTH}. Flatten it") from error


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise for a duplicate key, because parsers disagree on which value to use."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice[:60]!r} is written twice")
    return found


def openings(text: bytes) -> int:
    """Compute the number of opening brackets in a JSON text, strings included."""
    return text.count(b"[") + text.count(b"{")


def _depth(text: bytes) -> int:
    """Compute the nesting depth of a JSON text. Exact up to the first syntax error, where the parser stops as well."""
    # Without escaped characters, every second piece between quotes is outside of strings.
    if b"\\" in text:
        text = re.sub(rb"\\.", b"", text, flags=re.DOTALL)
    brackets = b"".join(text.split(b'"')[::2]).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_DEPTH_CHANGE.__getitem__, brackets)), default=0)
