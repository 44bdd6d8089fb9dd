"""JSON that anyone may have written: nested as deep as the limit, and no deeper."""

import pytest

from rollcorr.config.documents import MAX_DEPTH, load_json


def nested(depth):
    """Lists and objects by turns around a 1."""
    value = b"1"
    for level in range(depth):
        value = b"[" + value + b"]" if level % 2 else b'{"a": ' + value + b"}"
    return value


def test_json_is_read_up_to_the_deepest_level():
    value, levels = load_json(nested(MAX_DEPTH)), 0
    while value != 1:
        value, levels = value[0] if isinstance(value, list) else value["a"], levels + 1
    assert levels == MAX_DEPTH
    with pytest.raises(ValueError, match=f"nested {MAX_DEPTH + 1} levels deep; the limit is {MAX_DEPTH}. Flatten it"):
        load_json(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    "text",
    [b"[" + b"[], " * 200 + b"[]]", b'{"a": "' + b"[" * 200 + b'"}', rb'["\"' + b"[" * 200 + b'"]'],
    ids=["side by side", "in a text", "behind an escaped quote"],
)
def test_many_brackets_are_not_deep(text):
    assert load_json(text)
