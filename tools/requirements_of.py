"""Print what an extra of pyproject.toml asks for, one requirement a line, so that it can be installed without torch.

python tools/requirements_of.py docs
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path


def requirements_of(extra: str, text: str) -> list[str]:
    """The requirements of an extra.

    Raises:
        ValueError: there is no such extra.
    """
    section = text.split("[project.optional-dependencies]")[1]
    found = re.search(rf"^{extra} = (\[.*?\])$", section, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"pyproject.toml has no extra {extra!r}")
    return ast.literal_eval(found[1])


if __name__ == "__main__":
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    print(*requirements_of(sys.argv[1], pyproject.read_text(encoding="utf-8")), sep="\n")
