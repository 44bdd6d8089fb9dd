"""Print every conditional expression that is nested or longer than a line, and exit with 1 if there is one.

    python tools/style_faults.py

`ruff` has no such rule. `src/rollcorr/diagnostics` is left out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "tools", "benchmarks", "experiments", "examples")


def faults_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each conditional expression that a reader has to read twice."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.IfExp):
            continue
        if node.end_lineno != node.lineno:
            yield node.lineno, "a conditional expression spans several lines; write an if statement"
        if any(isinstance(part, ast.IfExp) for part in ast.walk(node) if part is not node):
            yield node.lineno, "a conditional expression contains another; write an if statement"


def main() -> int:
    """Check all files; return the exit code."""
    failed = False
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "diagnostics" in path.relative_to(ROOT).parts[:3]:
                continue
            for line, fault in faults_of(ast.parse(path.read_text(encoding="utf-8"))):
                print(f"{path.relative_to(ROOT)}:{line}: {fault}")
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
