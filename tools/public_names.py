"""Print the public names that no page, example or notebook mentions, and exit with 1 if there are any.

    python tools/public_names.py

A public name stands in the `__all__` of a package that can be imported here. A name counts as mentioned if it occurs as
a word in README.md, `examples/`, `docs/` without `docs/reference/`, or a notebook. `rollcorr.diagnostics` is left out.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import rollcorr

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".ipynb", ".md", ".py", ".yaml", ".yml", ".sh"}


def documented_words() -> set[str]:
    """Return every word of the pages, examples and notebooks that users read."""
    files = [ROOT / "README.md", *(ROOT / "examples").rglob("*"), *(ROOT / "docs").rglob("*")]
    words: set[str] = set()
    for path in files:
        if path.suffix in TEXT and ROOT / "docs" / "reference" not in path.parents:
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words


def public_names() -> Iterator[tuple[str, str]]:
    """Yield (package, name) for each name of an `__all__`."""
    packages = [module.name for module in pkgutil.walk_packages(rollcorr.__path__, "rollcorr.") if module.ispkg]
    for package in ["rollcorr", *packages]:
        for name in getattr(importlib.import_module(package), "__all__", ()):
            yield package, name


def undocumented_names() -> list[str]:
    """Return the public names, as `package.name`, that no page mentions."""
    words = documented_words()
    return [
        f"{package}.{name}"
        for package, name in public_names()
        if name not in words and not package.startswith("rollcorr.diagnostics")
    ]


def main() -> int:
    """Print the names and return the exit code."""
    names = undocumented_names()
    print(*names, sep="\n")
    print(
        f"{len(names)} of {len(list(public_names()))} public names are in no page, example or notebook", file=sys.stderr
    )
    return int(bool(names))


if __name__ == "__main__":
    sys.exit(main())
