"""Which tests run which lines, and how long each takes: measured once, then read for every mutant."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from python_mutants import Mutant

LONGEST_TEST = 6.0
"""Seconds; a slower test is left out, since one mutant may take 90."""

ARGUMENTS_AT_MOST = 1200
KERNEL = "src/rollcorr/kernels/correction/cpu/kernel.py"
"""Whoever runs this runs the C files too."""

COVERAGE = """[run]
source = src
branch = False
parallel = True
"""


def measure(tree: Path, tests: Sequence[str], folder: Path, *, jobs: int) -> None:
    """Run the tests that are not marked slow once, on unchanged code, and keep lines and durations.

    Raises:
        RuntimeError: a test fails, so no failure would tell of a mutant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings, results = folder / "coverage.ini", folder / "durations.xml"
    settings.write_text(COVERAGE + f"data_file = {folder / 'lines'}\n", encoding="utf-8")

    # What ranks run in processes of their own is not measured, and one such test alone waits for all of them to start.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command.append(f"--junitxml={results}")
    command += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=", *tests]
    if jobs > 1:
        command += ["--numprocesses", str(jobs), "--dist", "loadgroup"]
    ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the tests fail without any mutant:\n{ended.stdout[-3000:]}{ended.stderr[-2000:]}")

    seconds: dict[str, float] = defaultdict(float)
    for case in ET.parse(results).iter("testcase"):
        seconds[_key(case.get("classname", "").replace(".", "/"), case.get("name", ""))] += float(case.get("time", 0))
    (folder / "durations.json").write_text(json.dumps(seconds), encoding="utf-8")


class CoveringTests:
    """Answers which tests see an edit, the likeliest first.

    Args:
        tree: the checkout that was measured.
        folder: where `measure` left its files.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        from coverage import CoverageData

        self._tree = tree
        self._data = CoverageData(str(folder / "lines"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads((folder / "durations.json").read_text(encoding="utf-8"))
        self._by_file: dict[str, dict[int, list[str]]] = {}
        self._importers: dict[str, set[str]] = {}

    def of(self, mutant: Mutant, *, seconds: float) -> tuple[list[str], int]:
        """Tests to run, in order, and how many more see the edit but have no time.

        Args:
            mutant: the edit.
            seconds: what the tests may take together, as measured.
        """
        if mutant.file.endswith((".c", ".h")):
            found = self._tests(KERNEL)
        else:
            found = set() if mutant.at_import else self._tests(mutant.file, mutant.lines)

        # A constant, a table, or what makes one: tests that run any function of the file, or of one that imports it.
        if not found:
            found = self._tests(mutant.file).union(*map(self._tests, self._files_that_import(mutant.file)))

        # Of each test function a few cases first, those nearest to the file first, the fastest first.
        cases: dict[str, list[str]] = defaultdict(list)
        for test in sorted(found, key=self._duration):
            cases[test.partition("[")[0]].append(test)
        order = sorted(
            (rank // 4, -_nearness(name, mutant.file), self._duration(test), test)
            for name, tests in cases.items()
            for rank, test in enumerate(tests)
        )
        chosen, left, total = [], 0, 0.0
        for *_, test in order:
            taken = self._duration(test)
            if taken > LONGEST_TEST or total + taken > seconds or len(chosen) == ARGUMENTS_AT_MOST:
                left += 1
                continue
            total += taken
            chosen.append(test)

        # The tests of a file stay together, so that it makes its fixtures once; slow ones come last.
        files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
        chosen.sort(key=lambda test: (self._duration(test) > 1.0, files.index(test.partition("::")[0])))
        return chosen, left

    def _duration(self, test: str) -> float:
        path, _, name = test.partition("::")
        return self._seconds.get(_key(path.removesuffix(".py"), name.replace("::", "/")), 0.1)

    def _tests(self, file: str, lines: tuple[int, int] | None = None) -> set[str]:
        """The tests that run a line of a file, or one between two lines."""
        if file not in self._by_file:
            path = str((self._tree / file).resolve())
            self._by_file[file] = self._data.contexts_by_lineno(path)
        first, last = lines or (1, sys.maxsize)
        contexts = {c for line, seen in self._by_file[file].items() if first <= line <= last for c in seen if c}
        return {_without_group(context.rpartition("|")[0]) for context in contexts}

    def _files_that_import(self, file: str) -> set[str]:
        if not self._importers:
            for path in (self._tree / "src").rglob("*.py"):
                for module in re.findall(
                    r"^\s*(?:from|import) ([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE
                ):
                    self._importers.setdefault(module, set()).add(path.relative_to(self._tree).as_posix())
        module = file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return self._importers.get(module, set())


def _key(path: str, name: str) -> str:
    return _without_group(f"{path}/{name}")


def _without_group(test: str) -> str:
    """The name of a test without the group that pytest-xdist adds."""
    head, bracket, rest = test.rpartition("]")
    return head + bracket + rest.partition("@")[0]


def _nearness(test: str, file: str) -> int:
    """2 if a test is of the file by name, 1 if it is of its folder, else 0."""
    if re.search(rf"test_\w*{Path(file).stem.removesuffix('s')}", test.partition("::")[0]):
        return 2
    return int(any(part in test.split("/")[:-1] for part in Path(file).parent.parts[2:]))
