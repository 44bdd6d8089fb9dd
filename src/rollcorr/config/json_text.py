"""JSON in, from files that a stranger may have written: within limits, and every fault is a ValueError of one line."""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from itertools import accumulate
from typing import Any

MAX_DEPTH = 64
"""Levels of lists and objects inside each other."""

_OPENING, _CLOSING = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))
_STEP = {**dict.fromkeys(_OPENING, 1), **dict.fromkeys(_CLOSING, -1)}


def load_json(text: bytes) -> Any:  # noqa: ANN401 - a document may hold any plain value
    """Read one JSON document into plain values.

    Raises:
        ValueError: the text is not UTF-8 or not JSON, it is nested deeper than `MAX_DEPTH`, an object has a key twice,
            or an integer has more digits than Python reads. The message is one line.
    """
    # Counting is cheap, and few texts have so many brackets that they could be too deep.
    if openings(text) > MAX_DEPTH:
        depth = _depth(text)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested {depth:,} levels deep; the limit is {MAX_DEPTH}. Flatten it")
    try:
        return json.loads(text.removeprefix(codecs.BOM_UTF8).decode(), object_pairs_hook=_without_repeats)
    except RecursionError as error:  # a caller that is itself deep
        raise ValueError(f"nested too deep to be read here; the limit is {MAX_DEPTH}. Flatten it") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose keys differ: readers disagree on which of two values counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice[:60]!r} is written twice")
    return found


def openings(text: bytes) -> int:
    """Lists and objects that a JSON text opens; brackets within texts count too."""
    return text.count(b"[") + text.count(b"{")


def _depth(text: bytes) -> int:
    """How deep a JSON text is nested. Exact as far as the text is JSON: there its reader would stop too."""
    # Without escaped characters, every second piece between quotes is outside of texts.
    if b"\\" in text:
        text = re.sub(rb"\\.", b"", text, flags=re.DOTALL)
    outside = b"".join(text.split(b'"')[::2])
    brackets = outside.translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
