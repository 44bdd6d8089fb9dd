"""`import rollcorr` in a checkout finds the checkout; in a script next to a clone, the installed package."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rollcorr

ROOT = Path(__file__).parents[1]
WHERE = "import rollcorr; print(rollcorr.__file__)"


def test_the_tests_and_the_programs_that_they_start_run_this_checkout():
    own = ROOT / "src" / "rollcorr" / "__init__.py"
    done = subprocess.run([sys.executable, "-c", WHERE], capture_output=True, text=True, check=True)
    assert Path(rollcorr.__file__) == Path(done.stdout.strip()) == own


def test_a_script_in_the_folder_above_a_clone_imports_the_installed_package(tmp_path):
    """The clone's folder, also named rollcorr, comes first on the path."""
    pytest.importorskip("setuptools", minversion="77", reason="an installation builds with setuptools 77 or newer")
    clone = tmp_path / "rollcorr"
    compiled = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", clone / "src", ignore=compiled)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)

    # An editable install without network and compiler.
    build = "from setuptools.build_meta import build_editable; print(build_editable('..'))"
    environment = {**os.environ, "CC": "false", "PYTHONPATH": ""}
    built = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build], cwd=clone, env=environment, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        paths = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert len(paths) == 1
        on_the_path = wheel.read(paths[0]).decode().strip()
    assert Path(on_the_path).resolve() == (clone / "src").resolve()

    # Python appends the line of a .pth file to its path; PYTHONPATH stands for that here.
    (tmp_path / "script.py").write_text(WHERE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": on_the_path}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).resolve() == (clone / "src" / "rollcorr" / "__init__.py").resolve()


def test_every_file_that_the_makefile_names_is_there():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w./=])(?:tests|tools|examples|benchmarks|src)/[\w./*]*[\w*]", text)
    assert len(named) > 10
    assert [name for name in named if not list(ROOT.glob(name))] == []


def test_stubs_are_read_in_every_locale():
    """lazy_loader opens them when a package is imported, in the encoding of the locale."""
    stubs = list((ROOT / "src" / "rollcorr").rglob("*.pyi"))
    assert stubs
    assert [stub.name for stub in stubs if not stub.read_bytes().isascii()] == []
