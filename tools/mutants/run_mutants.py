"""Change the package in small ways, one at a time, and see which changes no test notices.

    python tools/mutants/run_mutants.py --count 40 --seed 7

A mutant is drawn at random from `core`, `config`, `correction`, `monitor` and the C files, and tested in a private copy
of the tree: only tests that run its lines, nearest and fastest first, up to the first failure. A test that hangs is a
failure. Each result is a line of `runs/mutants/results.jsonl`, so the same command goes on where it was stopped, and a
larger count only adds mutants. Survivors are printed as diffs; equivalent.yaml lists those that change no behavior.

The first call after a change measures which tests run which lines. Results are of the edited source, so `--again` tries
those that survived once more, for example after a test was added.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

from c_mutants import c_mutants
from covering_tests import CoveringTests, measure
from python_mutants import Mutant, parses, python_mutants

PROJECT = Path(__file__).parents[2]
SOURCE = "src/rollcorr"
TARGETS = tuple(f"{SOURCE}/{room}" for room in ("core", "config", "correction", "monitor", "kernels/correction/cpu"))
TESTS = (
    "tests/config", "tests/core", "tests/correction", "tests/diffusion", "tests/kernels", "tests/layouts",
    "tests/monitor", "tests/test_known_failures.py", "tests/cli/test_hostile_yaml.py",
    "tests/integrations/test_verl.py", "tests/distributed/test_exchange.py",
)  # fmt: skip
"""What can see a mutant, without tests marked slow; `--tests` takes others, for example all of `tests`."""

CEILING = 90.0
"""Seconds for the tests of a mutant."""

HANG = 45.0
"""Seconds without the start of another test, after which one hangs: each was measured to take under 6."""

AN_IMPORT = "an import"
"""What failed where no test began."""

MEMORY = 16 * 2**30
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "runs", "site", ".hypothesis", ".*_cache", "build")
PRELOADED = ("torch", "numpy", "hypothesis.strategies", "pytest", "yaml")


class Result(NamedTuple):
    """What became of a mutant.

    Attributes:
        outcome: "killed", "survived", "uncovered" (no test runs its lines) or "invalid" (it cannot be tested).
        by: the test that failed or hung.
        tests: how many ran at most.
        left: tests that see it and had no time.
        seconds: taken.
    """

    outcome: str
    by: str = ""
    tests: int = 0
    left: int = 0
    seconds: float = 0.0


class Progress:
    """A pytest plugin that writes which test runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._path.write_text(nodeid, encoding="utf-8")


def run_tests(place: Path, tests: list[str], progress: Path) -> None:
    """Run tests in a copy of the tree, in a process of its own; the exit code is pytest's."""
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(place)
    output = os.open(progress.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]
    code = pytest.main(arguments, plugins=[Progress(progress)])
    loaded = sys.modules.get("rollcorr")
    if loaded is not None and not str(loaded.__file__).startswith(str(place)):
        code = 70  # another tree was tested
    os._exit(int(code))


class Workplace:
    """A copy of the tree in which one mutant at a time is tested.

    Args:
        tree: what is copied.
        place: where to.
    """

    def __init__(self, tree: Path, place: Path) -> None:
        self.place = place.resolve()
        self._context = multiprocessing.get_context("forkserver")
        self._changes = 0
        shutil.copytree(tree, self.place, ignore=NOT_COPIED)
        self._libraries = {path: path.read_bytes() for path in self.place.rglob("correction_*.so")}

    def test(self, mutant: Mutant, tests: list[str]) -> tuple[str, str]:
        """The outcome of a mutant, and the test that decided it."""
        file = self.place / mutant.file
        original = file.read_text(encoding="utf-8")
        self._write(file, mutant.text)
        try:
            if file.suffix != ".py" and not self._build():
                return "invalid", ""
            outcome, by = self.run(tests)
        finally:
            self._write(file, original)
            if file.suffix != ".py":
                for path, content in self._libraries.items():
                    path.write_bytes(content)

        # No test began: an import fails because of the mutant, or these tests cannot be run one by one.
        if by == AN_IMPORT and self.run(tests)[0] == "killed":
            return "invalid", "the tests fail on the unchanged tree"
        return outcome, by

    def _write(self, file: Path, text: str) -> None:
        """Change a file, with a time that no compiled copy of it has."""
        file.write_text(text, encoding="utf-8")
        self._changes += 1
        os.utime(file, (self._changes, self._changes))

    def _build(self) -> bool:
        """Build the kernel; false if that fails."""
        for library in self.place.rglob("correction_*.so"):
            library.unlink()
        shutil.rmtree(self.place / "build", ignore_errors=True)
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=self.place, capture_output=True, check=False)
        return any(self.place.rglob("correction_*.so"))

    def run(self, tests: list[str]) -> tuple[str, str]:
        """Run tests on the tree as it is until one fails or hangs."""
        progress = self.place.parent / f"{self.place.name}.progress"
        progress.write_text(AN_IMPORT, encoding="utf-8")
        child = self._context.Process(target=run_tests, args=(self.place, tests, progress))
        child.start()
        start = time.monotonic()
        try:
            while child.is_alive() and time.monotonic() - start < CEILING:
                child.join(0.2)
                if child.is_alive() and time.time() - progress.stat().st_mtime > HANG:
                    return "killed", f"{progress.read_text(encoding='utf-8')} hangs"
            if child.is_alive():
                return "survived", ""
        finally:
            _end(child)

        if child.exitcode in (0, 5):
            return "survived", ""
        if child.exitcode == 70:
            raise RuntimeError("the tests import another copy of the package than the one that was changed")
        return "killed", progress.read_text(encoding="utf-8")


def _end(child: BaseProcess) -> None:
    """End a process and those that its tests started."""
    if child.pid is not None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            child.kill()
    child.join()


def draw(tree: Path, targets: list[str], count: int, seed: int, equivalent: list[dict[str, str]]) -> list[Mutant]:
    """The first `count` of a seed's order, without those that are known to be equivalent."""
    possible: list[Mutant] = []
    for target in targets:
        for path in sorted((tree / target).rglob("*.*")):
            file = path.relative_to(tree).as_posix()
            if path.suffix == ".py":
                possible += python_mutants(file, path.read_text(encoding="utf-8"))
            elif path.suffix in (".c", ".h"):
                possible += c_mutants(file, path.read_text(encoding="utf-8"))
    random.Random(seed).shuffle(possible)

    chosen: list[Mutant] = []
    for mutant in possible:
        if len(chosen) == count:
            break
        before, after = changed_lines(tree, mutant)
        known = {"file": mutant.file, "before": before, "after": after}
        is_valid = not mutant.file.endswith(".py") or parses(mutant.text)
        if is_valid and not any(known.items() <= entry.items() for entry in equivalent):
            chosen.append(mutant)
    return chosen


def changed_lines(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """The changed lines of a mutant, before and after, without indentation."""
    lines = difference(tree, mutant)[2:]
    return tuple(" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")  # type: ignore[return-value]


def difference(tree: Path, mutant: Mutant) -> list[str]:
    """A mutant as a diff."""
    original = (tree / mutant.file).read_text(encoding="utf-8").splitlines()
    return list(
        difflib.unified_diff(original, mutant.text.splitlines(), mutant.file, mutant.operator, lineterm="", n=0)
    )


def digest_of(tree: Path) -> str:
    """What tells a tree from another: its sources and tests."""
    digest = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((tree / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def key_of(mutant: Mutant, seed: int) -> dict[str, str | int]:
    """What tells a result from another."""
    digest = hashlib.sha256(mutant.text.encode()).hexdigest()[:16]
    return {"seed": seed, "file": mutant.file, "line": mutant.line, "operator": mutant.operator, "source": digest}


def recorded(path: Path) -> dict[str, Result]:
    """The results of earlier calls, by their keys."""
    results = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        results[json.dumps(row["mutant"])] = Result(**row["result"])
    return results


def run(options: argparse.Namespace) -> int:
    """Test what is not recorded yet; returns how many survive."""
    import yaml

    tree, folder = options.tree.resolve(), options.folder.resolve()
    map_folder = folder / f"map_{digest_of(tree)}"
    if not (map_folder / "durations.json").exists():
        print("measuring which tests run which lines …", flush=True)
        measure(tree, options.tests, map_folder, jobs=options.jobs)
    covering = CoveringTests(tree, map_folder)

    listed = Path(__file__).with_name("equivalent.yaml")
    equivalent = yaml.safe_load(listed.read_text(encoding="utf-8")) or []
    mutants = draw(tree, options.targets, options.count, options.seed, equivalent)
    results = recorded(folder / "results.jsonl")
    done = {key for key, result in results.items() if not options.again or result.outcome == "killed"}
    waiting = [mutant for mutant in mutants if json.dumps(key_of(mutant, options.seed)) not in done]
    print(f"{len(mutants)} mutants, {len(mutants) - len(waiting)} of them recorded already", flush=True)

    lock, until = Lock(), time.monotonic() + 60 * options.minutes
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(options.preload))
    with tempfile.TemporaryDirectory() as places, (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        free: SimpleQueue[Workplace] = SimpleQueue()
        for job in range(min(options.jobs, len(waiting))):
            free.put(Workplace(tree, Path(places) / str(job)))

        # Where tests fail without a mutant, each mutant would count as killed.
        seen = (covering.of(mutant, seconds=CEILING / 2)[0] for mutant in waiting)
        if tests := next(filter(None, seen), None):
            workplace = free.get()
            outcome, by = workplace.run(tests)
            free.put(workplace)
            if outcome != "survived":
                output = workplace.place.with_suffix(".txt").read_text(encoding="utf-8")
                raise RuntimeError(f"{by} fails on the unchanged tree:\n{output[-3000:]}")

        def examine(mutant: Mutant) -> None:
            if time.monotonic() > until:
                return
            start = time.monotonic()
            tests, left = covering.of(mutant, seconds=CEILING / 2)
            outcome, by = "uncovered", ""
            if tests:
                workplace = free.get()
                try:
                    outcome, by = workplace.test(mutant, tests)
                finally:
                    free.put(workplace)
            result = Result(outcome, by, len(tests), left, round(time.monotonic() - start, 1))
            with lock:
                key = key_of(mutant, options.seed)
                results[json.dumps(key)] = result
                file.write(json.dumps({"mutant": key, "result": result._asdict()}) + "\n")
                file.flush()
                print(f"{outcome:9} {result.seconds:5.1f} s  {mutant.file}:{mutant.line} {mutant.operator}", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(examine, waiting))
    return report(tree, mutants, results, options.seed)


def report(tree: Path, mutants: list[Mutant], results: dict[str, Result], seed: int) -> int:
    """Print the survivors and a summary; returns how many there are."""
    tried = [(m, results[k]) for m in mutants if (k := json.dumps(key_of(m, seed))) in results]
    survivors = [(m, r) for m, r in tried if r.outcome in ("survived", "uncovered")]
    for mutant, result in survivors:
        more = f", {result.left} more had no time" if result.left else ""
        print(f"\n# {mutant.file}:{mutant.line} {result.outcome}: {result.tests} tests{more}")
        print("\n".join(difference(tree, mutant)))
    count = {name: sum(r.outcome == name for _, r in tried) for name in ("killed", "survived", "uncovered", "invalid")}
    seconds = sum(result.seconds for _, result in tried)
    print(f"\n{len(tried)} of {len(mutants)} mutants of seed {seed}: {count}, {seconds:.0f} s of work")
    return len(survivors)


def main() -> int:
    """Read the options and run; 1 if a mutant survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    parser.add_argument(
        "--minutes", type=float, default=45, help="begin no mutant after so long; the next call goes on"
    )
    parser.add_argument("--again", action="store_true", help="try recorded survivors again")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), help="folders whose files are changed")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="tests that may see a mutant")
    parser.add_argument("--tree", type=Path, default=PROJECT, help="the checkout")
    parser.add_argument("--folder", type=Path, default=PROJECT / "runs" / "mutants", help="results and the map")
    parser.add_argument("--preload", nargs="*", default=list(PRELOADED), help="modules that every test process has")
    return int(run(parser.parse_args()) > 0)


if __name__ == "__main__":
    sys.exit(main())
