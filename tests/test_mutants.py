"""The tool that changes the package and asks the tests: it finds a planted gap, and goes on where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools" / "mutants"
sys.path.insert(0, str(TOOLS))

from c_mutants import c_mutants  # noqa: E402
from python_mutants import parses, python_mutants  # noqa: E402

SOURCE = '''"""A docstring with 3 numbers."""


def area(width: float, height: float) -> float:
    """Multiply 2 numbers."""
    if width < 0 or not height:
        raise ValueError(f"width {width + 1} must be above 0")
    return width * height


def is_large(area: float) -> bool:
    return area > 10
'''
TESTS = """from rollcorr.core.area import area, is_large


def test_area():
    assert area(2, 3) == 6


def test_large():
    assert is_large(20)
"""
SLOW_TEST = """import pytest


@pytest.mark.slow
def test_slow_tests_are_left_out():
    raise AssertionError
"""
C_SOURCE = """/* x < 3 */
#include <math.h>
static double add(double a, double b) {
    if (a < b) a += 1.5; /* a < b */
    set(a);
    return a && b ? a + b : 0;
}
"""


def changed(source, mutants):
    """(operator, changed line) of each mutant."""
    lines = source.splitlines()
    return {
        (m.operator, new.strip())
        for m in mutants
        for old, new in zip(lines, m.text.splitlines(), strict=False)
        if old != new
    }


def test_python_mutants_change_code_and_no_text():
    mutants = python_mutants("area.py", SOURCE)
    assert all(parses(mutant.text) for mutant in mutants)
    assert changed(SOURCE, mutants) == {
        ("comparison", "if width <= 0 or not height:"),
        ("constant", "if width < 1 or not height:"),
        ("constant", "if width < (-1) or not height:"),
        ("boolean", "if width < 0 and not height:"),
        ("drop sign", "if width < 0 or height:"),
        ("negate condition", "if not (width < 0 or not height):"),
        ("remove raise", "pass"),
        ("arithmetic", "return width / height"),
        ("comparison", "return area >= 10"),
        ("constant", "return area > 11"),
        ("constant", "return area > 9"),
    }


def test_c_mutants_change_code_and_no_comment():
    assert changed(C_SOURCE, c_mutants("add.c", C_SOURCE)) == {
        ("comparison", "if (a <= b) a += 1.5; /* a < b */"),
        ("negate condition", "if (!(a < b)) a += 1.5; /* a < b */"),
        ("arithmetic", "if (a < b) a -= 1.5; /* a < b */"),
        ("constant", "if (a < b) a += 3.0; /* a < b */"),
        ("constant", "if (a < b) a += 0.75; /* a < b */"),
        ("remove statement", ";"),
        ("arithmetic", "return a || b ? a + b : 0;"),
        ("arithmetic", "return a && b ? a - b : 0;"),
        ("constant", "return a && b ? a + b : 1;"),
    }


@pytest.fixture
def small_tree(tmp_path):
    tree = tmp_path / "tree"
    for name, text in {
        "src/rollcorr/__init__.py": "",
        "src/rollcorr/core/__init__.py": "",
        "src/rollcorr/core/area.py": SOURCE,
        "tests/test_area.py": TESTS,
        "tests/test_slow.py": SLOW_TEST,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\nmarkers = ["slow"]\n',
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    return tree


def test_gaps_survive_and_a_second_call_resumes(small_tree):
    pytest.importorskip("pytest_cov", reason="needs pytest-cov")
    folder = small_tree.parent / "results"
    command = [sys.executable, TOOLS / "run_mutants.py", "--tree", small_tree, "--folder", folder, "--tests", "tests"]
    command += ["--targets", "src/rollcorr/core", "--preload", "pytest", "--jobs", "1", "--seed", "2"]

    command += ["--count", "2"]

    first, again = (subprocess.run([*map(str, command)], capture_output=True, text=True, check=False) for _ in range(2))
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(row["result"]["outcome"] for row in results) == ["killed", "survived"], first.stdout + first.stderr
    assert "2 mutants, 2 of them recorded already" in again.stdout, again.stdout + again.stderr
    assert again.returncode == 1
    assert "+    return area >" in again.stdout
    assert (small_tree / "src/rollcorr/core/area.py").read_text(encoding="utf-8") == SOURCE
