"""Release preconditions: lock file, extras, wheel names, uploaded files, and jobs that are make targets."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

packaging = pytest.importorskip("packaging.requirements")
try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = (ROOT / "constraints.txt").read_text(encoding="utf-8")
HASHED = (ROOT / "requirements.lock").read_text(encoding="utf-8")
NOT_TOGETHER = {"vllm", "triton"}
"""vllm brings the torch that it was built with, and torch for a GPU brings the Triton that it was built with."""

FOR_DEVELOPERS = {"all", "dev", "docs", "release"}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def own_requirements(extra):
    """Return the requirements of an extra, with its nested extras resolved."""
    found = {}
    for line in EXTRAS[extra]:
        requirement = packaging.Requirement(line)
        if requirement.name == "rollcorr":
            for joined in requirement.extras:
                found |= own_requirements(joined)
        else:
            found[canonical(requirement.name)] = requirement
    return found


def pinned():
    """Names of the lock, with the versions that they have for some Python."""
    versions = {}
    for line in LOCK.splitlines():
        if line and not line.startswith("#"):
            name, version = re.match(r"([A-Za-z0-9_.-]+)==([^ ;]+)", line).groups()
            versions.setdefault(canonical(name), set()).add(version)
    return versions


def test_all_joins_every_extra_that_can_be_installed_together():
    joined = packaging.Requirement(EXTRAS["all"][0]).extras
    assert len(EXTRAS["all"]) == 1
    assert joined == set(EXTRAS) - NOT_TOGETHER - FOR_DEVELOPERS


def test_the_lock_pins_one_version_per_line_and_holds_no_address():
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    strange = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!+-]+( ; [^/@]+)?", line)]
    assert strange == []
    assert not re.search(r"://|file:|--|@", LOCK)
    assert len(lines) > 50


def test_the_hashed_lock_has_the_same_pins_and_a_hash_of_each():
    entries = re.split(r"(?m)^(?=[^\s#])", HASHED)[1:]
    hashes = {" ".join(entry.partition("\\\n")[0].split()): re.findall(r"--hash=(\S+)", entry) for entry in entries}
    pins = [line for line in LOCK.splitlines() if not re.match(r"#|(torch|triton|nvidia-[^=]*|cuda-[^=]*)==", line)]
    assert list(hashes) == pins
    assert all(found and all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in found) for found in hashes.values())
    assert not re.search(r"://|file:|@", HASHED)


def test_workflows_install_by_hash_and_name_actions_by_commit():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        used = re.findall(r"uses: (.*)", text)
        assert used
        assert [use for use in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", use)] == []
        assert yaml.safe_load(text)["env"]["HASHES"] == "1"
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "install", "HASHES=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    hashed, *others = [line for line in shown.replace("\\\n", " ").splitlines() if "pip install" in line]
    assert "--require-hashes --no-deps" in hashed
    assert len(others) == 2
    plain = subprocess.run(
        ["make", "--dry-run", "--always-make", "install"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name != "HASHES"},
    )  # fmt: skip
    assert "--require-hashes" not in plain.stdout


def test_the_lock_names_everything_that_a_development_environment_holds():
    """Walks from the requirements of [dev] over the installed packages."""
    waiting = [packaging.Requirement(line) for line in PROJECT["dependencies"]] + [*own_requirements("dev").values()]
    walked = set()
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in walked:
                continue
            walked.add((name, extra))
            try:
                needs = metadata.requires(requirement.name) or []
            except metadata.PackageNotFoundError:  # an optional package that this environment lacks
                needs = []
            parsed = map(packaging.Requirement, needs)
            waiting += [need for need in parsed if need.marker is None or need.marker.evaluate({"extra": extra})]
    names = {name for name, _ in walked}
    assert len(names) > 50
    assert names - set(pinned()) == set()


def test_the_lock_fits_the_ranges_of_the_package():
    asked = [packaging.Requirement(line) for line in PROJECT["dependencies"]]
    asked += [*own_requirements("dev").values(), *own_requirements("release").values()]
    versions = pinned()
    wrong = [
        (str(requirement), version)
        for requirement in asked
        for version in versions[canonical(requirement.name)]
        if not requirement.specifier.contains(version, prereleases=True)
    ]
    assert wrong == []


@pytest.fixture
def sources(tmp_path):
    """Files that a build of the package reads."""
    pytest.importorskip("setuptools", minversion="77", reason="a wheel is built with setuptools 77 or newer")
    clone = tmp_path / "clone"
    left_out = shutil.ignore_patterns("*.so", "not_built.txt", "__pycache__", "*.egg-info", "*.safetensors")
    shutil.copytree(ROOT / "src", clone / "src", ignore=left_out)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    return clone


def wheel_of(sources, **environment):
    """The wheel that an installation builds."""
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return sources.parent / done.stdout.split()[-1]


def test_a_wheel_without_the_kernel_is_for_every_platform_and_says_so(sources):
    path = wheel_of(sources, ROLLCORR_KERNELS="none", CC="false")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        note = wheel.read("rollcorr/kernels/correction/cpu/not_built.txt").decode()
        about = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: true" in wheel.read(about).decode()
    assert note.startswith("all: this wheel leaves it out")
    assert not [name for name in names if name.endswith(".so") or name.startswith("rollcorr_demo_models")]
    assert "rollcorr/kernels/correction/cpu/library.py" in names


@pytest.fixture
def compiler(tmp_path):
    """A program that writes an empty library wherever a compiler would write one."""
    if os.name != "posix":
        pytest.skip("a shell script stands for the compiler")
    path = tmp_path / "compiler"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n', encoding="utf-8")
    path.chmod(0o755)
    return {"CC": str(path), "LDSHARED": str(path)}


def test_a_wheel_with_the_kernel_names_the_platform_and_no_python(sources, compiler):
    path = wheel_of(sources, **compiler)
    assert re.search(r"-py3-none-(linux|macosx)\w+\.whl$", path.name), path.name
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        about = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in wheel.read(about).decode()
    assert "rollcorr/kernels/correction/cpu/correction_portable.so" in names
    assert not [name for name in names if name.endswith("not_built.txt")]


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="other processors have one library")
def test_a_wheel_holds_the_libraries_that_are_asked_for_and_notes_the_others(sources, compiler):
    path = wheel_of(sources, **compiler, ROLLCORR_KERNELS="avx512,avx2")
    folder = "rollcorr/kernels/correction/cpu"
    with zipfile.ZipFile(path) as wheel:
        libraries = {Path(name).name for name in wheel.namelist() if name.endswith(".so")}
        note = wheel.read(f"{folder}/not_built.txt").decode()
    assert libraries == {"correction_avx512.so", "correction_avx2.so"}
    assert note.startswith("portable: this wheel leaves it out")
    assert "compiles it" in note
    assert len(note.splitlines()) == 1


def release_check():
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "tools" / "release_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_what_does_not_belong_into_an_upload_is_named(tmp_path):
    tool = release_check()
    contents = {
        "rollcorr-1-py3-none-any.whl": {"rollcorr/a.so": b"", "rollcorr/b.py": b"from /home/me/clone"},
        "rollcorr-1-py3-none-manylinux_2_28_x86_64.whl": {"rollcorr/c.py": os.urandom(tool.LIMIT)},
    }
    for name, members in contents.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for member, content in members.items():
                wheel.writestr(member, content)
    uploads = [tool.Upload.of(tmp_path / name) for name in contents]
    with pytest.raises(SystemExit) as refused:
        tool.refuse(uploads, ("/home/me/clone",))
    said = str(refused.value)
    for part in (
        "the files are of the kinds ['compiled', 'portable']",
        "any.whl holds the libraries ['rollcorr/a.so']",
        "any.whl: rollcorr/b.py names /home/me/clone",
        "x86_64.whl holds the libraries []",
        "bytes, and the limit is 1,000,000",
    ):
        assert part in said


def test_every_job_of_the_workflows_is_a_make_target():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called, pythons = set(), set()
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    for path in workflows:
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            pythons.update(matrix.get("python", ()))
            commands = [step["run"] for step in job["steps"] if "run" in step]
            assert commands
            for command in commands:
                made = re.fullmatch(r"make (\S+|\$\{\{ matrix\.target \}\}) PYTHON=python", command)[1]
                called |= {entry["target"] for entry in matrix["include"]} if "matrix" in made else {made}
    assert len(workflows) == 2
    assert pythons == {"3.10", "3.13"}
    assert called <= targets
    assert {"check", "test", "test-oldest", "coverage", "release-check", "wheels"} <= called
