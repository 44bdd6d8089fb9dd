"""Print style faults that `ruff` has no rule for, and exit with 1 if there is one.

    python tools/style_faults.py

A conditional expression must not contain another or span lines. In the package, a function body of 25 lines or more
needs a comment per 25 lines. `src/rollcorr/diagnostics` is left out.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
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


def uncommented_functions(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each long function body with fewer than one comment per 25 lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [
        t.start[0] for t in tokens if t.type == tokenize.COMMENT and not t.string.startswith(("# type:", "# noqa"))
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None
            start = node.body[0].end_lineno if documented else node.lineno
            length = node.end_lineno - start
            found = sum(start < line <= node.end_lineno for line in comments)
            if found < length // 25:
                yield node.lineno, f"{node.name} has {length} lines and {found} comments; say why, once per 25 lines"


def main() -> int:
    """Check all files; return the exit code."""
    failed = False
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "diagnostics" in path.relative_to(ROOT).parts[:3]:
                continue
            source = path.read_text(encoding="utf-8")
            faults = list(faults_of(ast.parse(source)))
            if folder == "src":
                faults += uncommented_functions(source)
            for line, fault in faults:
                print(f"{path.relative_to(ROOT)}:{line}: {fault}")
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
