"""Test the adapters in the frameworks themselves: those that are installed, and any others of a folder.

    make test-frameworks                installed: verl 0.9.1, TRL 1.16.0
    make test-frameworks SOURCES=DIR    and what DIR holds: checkouts, sources, wheels, packed or unpacked

A framework of DIR takes the place of the installed one; what it depends on is installed. verl's sources bring its own
tests, which its wheel leaves out: they run on verl alone and on verl with this library, and must end alike. So do
verl-omni's tests of its rollout correction, on the installed verl.

    pip download --no-deps --no-binary :all: --no-build-isolation --dest DIR verl==0.9.1
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN_TESTS = {"verl": "trainer/ppo", "verl_omni": "trainer/diffusion/test_rollout_correction_on_cpu.py"}
LANES = {
    "verl": (("test_verl*.py",), ("trainer/ppo/rollout_corr_helper.py", "trainer/ppo/core_algos.py")),
    "trl": (
        ("test_trl.py", *(f"test_trl_{what}.py" for what in ("monitor", "real", "truncated", "async", "processes"))),
        ("trainer/grpo_trainer.py", "trainer/rloo_trainer.py"),
    ),
    "verl_omni": (("test_verl_own_tests.py",), ("trainer/diffusion/rollout_correction.py", "workers/utils/losses.py")),
}


def unpacked(archive: Path, folder: Path) -> list[Path]:
    """The folders that a wheel or a source archive was unpacked to."""
    target = folder / f"{archive.name}-unpacked"
    if archive.suffix == ".whl":
        shutil.unpack_archive(archive, target, format="zip")
        return [target]
    shutil.unpack_archive(archive, target, filter="data")
    return [path for path in target.iterdir() if path.is_dir()]


def alone(package: Path, folder: Path) -> Path:
    """A folder that holds nothing but a package, so that a checkout's other folders are no modules."""
    target = folder / f"{package.parent.name}-{package.name}"
    target.mkdir()
    (target / package.name).symlink_to(package)
    return target


def found(sources: Path, folder: Path) -> list[tuple[str, Path]]:
    """Each framework under the folder, with the folder that holds its package."""
    roots = [sources, *sorted(path for path in sources.iterdir() if path.is_dir())]
    for archive in sorted([*sources.glob("*.whl"), *sources.glob("*.tar.gz")]):
        roots += unpacked(archive, folder)
    return [(name, root) for root in roots for name in LANES if (root / name / "__init__.py").exists()]


def run(name: str, python: Path, path: Path | None, tests: Path | None) -> int:
    """One lane, by pytest's exit code; `path` holds another version of the framework than the installed one."""
    patterns, _ = LANES[name]
    environment = os.environ | ({"ROLLCORR_VERL_TESTS": str(tests)} if tests else {})
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path or ""), os.environ.get("PYTHONPATH")]))
    files = sorted(path for pattern in patterns for path in (ROOT / "tests" / "integrations").glob(pattern))
    return subprocess.run([str(python), "-m", "pytest", *map(str, files)], cwd=ROOT, env=environment).returncode


def described(name: str, package: Path) -> str:
    """What was tested, by the hashes of the files whose functions are compared."""
    files = [package / file for file in LANES[name][1]]
    hashes = [f"{file.name} sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}" for file in files]
    return f"{name} of {package.parent}: {', '.join(hashes)}"


def installed(name: str, python: Path) -> Path:
    """The package of the framework in that environment."""
    program = f"import importlib.util; print(importlib.util.find_spec({name!r}).submodule_search_locations[0])"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True, cwd=ROOT / "tools")
    return Path(done.stdout.strip())


def main() -> int:
    """Run every lane, and say last what each of them was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("verl", "trl"):
        parser.add_argument(f"--{name}", type=Path, metavar="PYTHON", help=f"Python of the environment that has {name}")
    parser.add_argument("sources", nargs="?", type=Path, help="folder with checkouts, unpacked sources or wheels")
    arguments = parser.parse_args()
    # Absolute, because pytest runs elsewhere; not resolved, because the link makes it the environment's Python.
    pythons = {name: getattr(arguments, name).absolute() for name in ("verl", "trl") if getattr(arguments, name)}
    if not pythons:
        parser.error("name an environment: --verl PYTHON, --trl PYTHON, or both")
    if arguments.sources and not arguments.sources.is_dir():
        parser.error(f"SOURCES must be a folder; got {arguments.sources}")

    results = {}
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        cases = [(name, None) for name in pythons]
        if "verl" in pythons:
            pythons["verl_omni"] = pythons["verl"]
        if arguments.sources:
            cases += [case for case in found(arguments.sources.absolute(), folder) if case[0] in pythons]
        if arguments.sources and all(root is None for _, root in cases):
            parser.error(
                f"{arguments.sources} holds no sources and no wheel of {' or '.join(name for name, _ in cases)}"
            )
        for name, root in cases:
            package = installed(name, pythons[name]) if root is None else root / name
            has_tests = root is not None and name in OWN_TESTS and (root / "tests" / OWN_TESTS[name]).exists()
            tests = root / "tests" if root and has_tests else None
            path = None if root is None else alone(package.resolve(), folder)
            results[described(name, package)] = run(name, pythons[name], path, tests)

    for what, code in results.items():
        print(f"{'passed' if code == 0 else f'FAILED ({code})'}: {what}")
    return max(results.values(), default=0)


if __name__ == "__main__":
    sys.exit(main())
