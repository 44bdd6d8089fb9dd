"""Check the types of the code on the pages: mypy --strict and pyright over README.md, docs/ and tests/type_cases.py.

    python tools/docs_types.py

The blocks of a page share their names, so they make one module, in which each line of code keeps its number. A reader's
own code has no annotations, and does not ask whether a value is None: neither is an error there. In type_cases.py the
lines marked `# rejected`, and no others, must be errors of both checkers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "type_cases.py"
PYRIGHT = {
    "typeCheckingMode": "standard",
    "pythonVersion": "3.10",
    "extraPaths": [str(ROOT / "src")],
    "stubPath": "typings",
    "reportMissingImports": False,
    "reportMissingModuleSource": False,
    "reportOptionalMemberAccess": False,
    "reportOptionalSubscript": False,
    "reportPossiblyUnboundVariable": False,
    "reportRedeclaration": False,
}
UNTYPED = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"
"""Stub of a package whose own types are incomplete."""


class Problem(NamedTuple):
    """An error of a checker: its module, its line and its text."""

    module: str
    line: int
    text: str


def main() -> int:
    """Check everything with both checkers; returns 1 if one of them finds an error, or misses one."""
    rejected = {n for n, line in enumerate(_lines(CASES), start=1) if "# rejected" in line}
    with TemporaryDirectory() as name:
        folder = Path(name)
        pages = _write_modules(folder)
        # Each checker uses one core.
        mypy, pyright = _start_mypy(folder), _start_pyright(folder)
        found = {"mypy": list(_of_mypy(mypy)), "pyright": list(_of_pyright(pyright))}

    wrong = []
    for checker, problems in found.items():
        in_cases = {problem.line for problem in problems if problem.module == CASES.stem}
        wrong += [f"{CASES.name}:{line}: {checker} finds no error" for line in sorted(rejected - in_cases)]
        for module, line, text in problems:
            if module != CASES.stem or line not in rejected:
                wrong.append(f"{pages.get(module, CASES.name)}:{line}: {checker}: {text}")
    print("\n".join(wrong) or f"the types of {len(pages)} pages and of {CASES.name} are right to mypy and pyright")
    return 1 if wrong else 0


def _write_modules(folder: Path) -> dict[str, str]:
    """Write each page as a module of the package `pages`, and the cases beside it; returns module → page."""
    (folder / "pages").mkdir()
    (folder / "typings").mkdir()
    (folder / "pages" / "__init__.py").touch()
    (folder / "typings" / "diffusers.pyi").write_text(UNTYPED, encoding="utf-8")
    (folder / CASES.name).write_text(CASES.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT), encoding="utf-8")
    pages = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        code = _code_of(path)
        if any(code):
            page = path.relative_to(ROOT).as_posix()
            module = re.sub(r"\W", "_", page.removesuffix(".md"))
            (folder / "pages" / f"{module}.py").write_text("\n".join(code) + "\n", encoding="utf-8")
            pages[module] = page
    return pages


def _code_of(page: Path) -> list[str]:
    """The lines of the Python blocks that run, at their places; the other lines are empty."""
    code, inside = [], False
    for line in _lines(page):
        begins = re.fullmatch(r"```python *", line) is not None
        inside = begins or (inside and not line.startswith("```"))
        code.append(line if inside and not begins else "")
    return code


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _start_mypy(folder: Path) -> subprocess.Popen[str]:
    """Start mypy with the project's settings and its cache; those of `pages` are in pyproject.toml."""
    files = [*sorted((folder / "pages").glob("*.py")), folder / CASES.name]
    return _start("mypy", "--no-error-summary", "--no-pretty", *map(str, files))


def _start_pyright(folder: Path) -> subprocess.Popen[str]:
    return _start("pyright", "--project", str(folder), "--pythonpath", sys.executable, "--outputjson")


def _start(*command: str) -> subprocess.Popen[str]:
    # pyright would ask a package index for a newer version.
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    arguments = [sys.executable, "-m", *command]
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, text=True, encoding="utf-8", **streams)


def _of_mypy(process: subprocess.Popen[str]) -> Iterator[Problem]:
    output, errors = process.communicate()
    if process.returncode not in (0, 1):
        raise RuntimeError(f"mypy did not run: {errors or output}")
    for path, line, text in re.findall(r"^(.+?):(\d+): error: (.+)$", output, re.MULTILINE):
        yield Problem(Path(path).stem, int(line), text)


def _of_pyright(process: subprocess.Popen[str]) -> Iterator[Problem]:
    output, errors = process.communicate()
    if process.returncode not in (0, 1):
        raise RuntimeError(f"pyright did not run: {errors or output}")
    for found in json.loads(output)["generalDiagnostics"]:
        # Arguments that may be None have no setting of their own.
        about_none = re.search(r'\| None"|"None" is not assignable|not supported for "None"', found["message"])
        if found["severity"] == "error" and not (about_none and Path(found["file"]).stem != CASES.stem):
            yield Problem(Path(found["file"]).stem, found["range"]["start"]["line"] + 1, found["message"])


if __name__ == "__main__":
    sys.exit(main())
