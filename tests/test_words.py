"""Docstrings, comments and pages use the words of engineers: see tools/plain_words.py."""

import plain_words
import pytest
from plain_words import LIMITS, ROOT, exceeded, markdown_lines, python_lines, terms_of


@pytest.mark.parametrize("roots", LIMITS)
def test_few_words_exceed_their_limit(roots):
    often, rare = exceeded(*(ROOT / root for root in roots.split()))
    too_often, too_rare = LIMITS[roots]
    assert len(often) <= too_often, often
    assert len(rare) <= too_rare, rare


def test_prose_is_counted_by_hand():
    source = '"""What a file says."""\nx = 1  # those of `what` x_what\ndef f():\n    """Return\n    what."""\n'
    assert [number for number, _ in python_lines(source)] == [1, 4, 5, 2]
    assert [line for _, line in markdown_lines("a\n```\nb\n```\nc")] == ["a", "c"]
    assert terms_of("# those of `what` x_what") == ["those", "of", "those of"]


def test_a_frequent_word_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_words, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("return returns compute default contains what\n" * 3 + "plain words\n" * 90, encoding="utf-8")
    often, rare = exceeded(page)
    assert list(often) == ["what"]
    assert not rare
