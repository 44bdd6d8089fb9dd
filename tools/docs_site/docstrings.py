"""Docstrings as the site shows them: examples as code, sources in bold with their links.

The house writes `Example:` above lines with `>>>`, which Google's style calls `Examples:`, and ends with a line
`Source: …`. mkdocstrings loads the class below through mkdocs.yml.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

MARKED_CODE = re.compile(r"^( *)```\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


class HouseStyle(griffe.Extension):
    """Rewrite each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # noqa: ANN401
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_shown(obj.docstring.value)


def as_shown(text: str) -> str:
    """The docstring with the section's name that the parser knows, and with links in its sources."""
    text = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    text = MARKED_CODE.sub(r"\1```python\n\2\1```", text)
    text = re.sub(r"^(\s*)Source: ", r"\1**Source:** ", text, flags=re.MULTILINE)
    text = re.sub(r"(?<![\w/])(?<!\]\()docs/([\w/]+)\.md", _page_link, text)
    return re.sub(r"(?<!\[)arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _page_link(match: re.Match) -> str:
    """A page that a docstring names, as a link from a page of the API.."""
    return f"[{match[1].rpartition('/')[2].replace('_', ' ')}](../../{match[1]}.md)"
