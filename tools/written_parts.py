"""The generated parts of pages that people write: the tree and layers of CONTRIBUTING, and the extras of install.md.

`LAYERS` is the one list of packages; `tests/test_architecture.py` holds every import against it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rollcorr"

LAYERS = [
    {"config"},
    {"core"},
    {"kernels", "rollout_log", "run_directory"},
    {"correction", "layouts"},
    {"diffusion"},
    {"conformance", "diagnostics", "engines", "monitor", "simulation"},
    {"confirm", "integrations", "train"},
    {"cli", "demo"},
]
"""Packages from the bottom up: a package may import its own layer and those below it."""

APART = [("train", "integrations"), ("integrations", "train"), ("train", "monitor")]
APART += [("diagnostics", "engines"), ("engines", "diagnostics")]
APART += [(other, "monitor") for other in ("diagnostics", "engines", "simulation")]
APART += [("monitor", other) for other in ("engines", "simulation")]
"""Imports that the layers would allow, and that no package makes: (importing, imported)."""


def contributing_page() -> str:
    """Return CONTRIBUTING.md with the tree and the layers of today."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return _with_block(_with_block(text, "## The tree", _tree()), "## Layers", _layers())


def install_page() -> str:
    """Return docs/install.md with the extras that `all` installs today."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.search(r'^all = \["rollcorr\[(.+?)\]"\]', project, re.MULTILINE)[1].split(",")
    row = f"| `all` | together: {', '.join(f'`{extra}`' for extra in extras[:-1])} and `{extras[-1]}` |"
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    return re.sub(r"^\| `all` \|.*$", row, text, flags=re.MULTILINE)


def _with_block(page: str, heading: str, block: str) -> str:
    """Replace the first text block below a heading."""
    start = page.index("```text\n", page.index(heading)) + len("```text\n")
    return page[:start] + block + page[page.index("```", start) :]


def _tree() -> str:
    lines = ["src/rollcorr/"]
    for names in reversed(LAYERS):
        for name in sorted(names):
            lines.append(f"├── {name + '/':<20}{_summary(PACKAGE / name)}")
            inside = sorted(path.parent for path in (PACKAGE / name).glob("*/__init__.py"))
            branches = ["├──"] * (len(inside) - 1) + ["└──"]
            for branch, folder in zip(branches, inside, strict=False):
                lines.append(f"│   {branch} {folder.name + '/':<16}{_summary(folder)}")
    lines.append(f"└── {'__init__.py(i)':<20}{_summary(PACKAGE)}")
    return "\n".join(lines) + "\n"


def _summary(folder: Path) -> str:
    """Return the first line of a package's docstring, without the period."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    return docstring.splitlines()[0].rstrip(".")


def _layers() -> str:
    lines = []
    for names in reversed(LAYERS):
        lines.append(" · ".join(sorted(names)))

        # A pair that is listed in both directions is written once.
        for one, other in APART:
            if one in names and (other, one) not in APART:
                lines.append(f"    {one} never imports {other}")
            elif {one, other} <= names and one < other:
                lines.append(f"    {one} and {other} never import each other")
    return "\n".join(lines) + "\n"
