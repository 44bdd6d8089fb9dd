"""Build what a release would upload, install each file into a clean environment, and try it: `make release-check`.

    dist/rollcorr-VERSION.tar.gz                            the sources, with the tests of the correction
    dist/rollcorr-VERSION-py3-none-manylinux_….whl          with the compiled kernel
    dist/rollcorr-VERSION-py3-none-any.whl                  without it
    dist/rollcorr_demo_models-….whl, ….tar.gz               the models of the demos

Two environments are made once, under `.venv-release`: `base` holds what `pip install rollcorr` brings, and `tools` what
builds and tests. A clean environment is a fresh one that sees `base` and nothing else: no checkout, and no compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
MODELS = Path("src") / "rollcorr_demo_models"
TORCH_VERSION = re.compile(r"^torch==.*$", re.MULTILINE)
KERNELS = ("avx512", "avx2") if platform.machine().lower() in ("x86_64", "amd64") else ("portable",)
"""The libraries of a compiled wheel. x86-64 processors without AVX2 are older than 2015, and compute in eager torch."""
LIMIT = 1_000_000
"""Bytes of each file of rollcorr. The models of the demos may be larger."""

EXAMPLE = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
SMOKE = """
import rollcorr, torch
from pathlib import Path
assert Path(rollcorr.__file__).is_relative_to({environment!r}), rollcorr.__file__
train = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)) - 2
rollout, mask = train - 0.1, torch.ones(64, 33)
results = [rollcorr.correct(train, rollout, mask, "decoupled_token_is", impl=impl) for impl in ("auto", "reference")]
assert torch.allclose(results[0].weights, results[1].weights)
assert abs(results[0].metrics()["rollout_corr/kl"] + 0.1) < 1e-4, results[0].metrics()
"""
SDIST_TESTS = ("tests/core", "tests/layouts", "tests/kernels/test_cpu_kernel.py")


@dataclass(frozen=True)
class Upload:
    """One file of a release.

    Attributes:
        path: where it is.
        members: the names in it, with their sizes in bytes.
    """

    path: Path
    members: dict[str, int]

    @classmethod
    def of(cls, path: Path) -> Upload:
        """List an archive."""
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                return cls(path, {info.filename: info.file_size for info in wheel.infolist()})
        with tarfile.open(path) as archive:
            return cls(path, {member.name: member.size for member in archive if member.isfile()})


def main() -> int:
    """Build, list, install and try; 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-release", help="where environments are kept")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the files go")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = environment(options.environments / "base", project["dependencies"])
    tools = environment(options.environments / "tools", project["optional-dependencies"]["release"])

    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        sources = tracked_files(folder / "sources")
        built = build(sources, folder, tools)
        uploads = [Upload.of(path) for path in collect(built, options.dist)]
        show(uploads)
        refuse(uploads, (str(ROOT), str(folder)))
        say("twine check")
        run(tools, "-m", "twine", "check", "--strict", *(upload.path for upload in uploads), folder=folder)
        try_all({kind_of(upload): upload.path for upload in uploads}, folder, base, tools)
    say("nothing is wrong: a release could upload the files of dist/")
    return 0


def environment(folder: Path, requirements: list[str]) -> Path:
    """The Python of an environment that holds what is asked for, pinned; made once for each lock file."""
    python = folder / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    wanted = "\n".join([*requirements, constraints.read_text(encoding="utf-8")])
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    say(f"make {folder.name}")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    quiet = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    # Torch first: some indexes serve a build for the CPU to a version that is asked for exactly.
    torch = TORCH_VERSION.findall(constraints.read_text(encoding="utf-8"))
    if any(requirement.startswith("torch") for requirement in requirements):
        run(python, *quiet, *torch)
    run(python, *quiet, "--constraint", constraints, *requirements)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def tracked_files(target: Path) -> Path:
    """A copy of what git tracks, as it is in the work tree: nothing that an earlier build left can get in."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def build(sources: Path, folder: Path, tools: Path) -> Path:
    """Build every file, and hold the tag of the compiled wheel against what its libraries need."""
    built, raw = folder / "built", folder / "raw"
    make = ("-m", "build", "--outdir")

    # The wheels come from the source archive, as they would on a user's machine. The first build is isolated, so that
    # [build-system] is proved too.
    say("build the source archive, and from it the wheel with the compiled kernel")
    run(tools, *make, raw, sources, folder=folder, compiler=True, ROLLCORR_KERNELS=",".join(KERNELS))
    archive = next(raw.glob("*.tar.gz"))
    built.mkdir()
    shutil.move(archive, built)
    archive = built / archive.name

    say("hold the platform tag against the libraries")
    wheel = next(raw.glob("*.whl"))
    if "-py3-none-linux" not in wheel.name:
        raise SystemExit(f"{wheel.name} is no py3-none-linux wheel: is there a C compiler?")
    print(run(tools, "-m", "auditwheel", "show", wheel, folder=folder).strip(), flush=True)
    smaller = ("--strip", "--zip-compression-level", 9)
    run(tools, "-m", "auditwheel", "repair", *smaller, "--wheel-dir", built, wheel, folder=folder, compiler=True)
    leave_folders_out(next(built.glob("*.whl")))

    say("build the wheel without the compiled kernel, and the models")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    unpacked = next((folder / "unpacked").iterdir())
    same_tools = (*make, built, "--no-isolation")
    run(tools, *same_tools, "--wheel", unpacked, folder=folder, compiler=True, ROLLCORR_KERNELS="none")
    run(tools, *same_tools, sources / MODELS, folder=folder)
    return built


def leave_folders_out(wheel: Path) -> None:
    """Write a wheel anew without the entries of its folders: auditwheel adds them, and nothing reads them."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            if not entry.is_dir():
                new.writestr(entry, old.read(entry), compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)
    smaller.replace(wheel)


def collect(built: Path, dist: Path) -> list[Path]:
    """The files, in a folder that holds nothing else."""
    shutil.rmtree(dist, ignore_errors=True)
    shutil.copytree(built, dist)
    return sorted(dist.iterdir())


def kind_of(upload: Upload) -> str:
    """What a file is: models, sources, compiled or portable."""
    name = upload.path.name
    if name.startswith("rollcorr_demo_models"):
        return "models" if name.endswith(".whl") else "models, sources"
    if name.endswith(".tar.gz"):
        return "sources"
    return "portable" if name.endswith("-py3-none-any.whl") else "compiled"


def show(uploads: list[Upload]) -> None:
    """Print what an upload would contain."""
    say("an upload would contain")
    for upload in uploads:
        size = upload.path.stat().st_size
        print(f"{size:>10,}  {upload.path.name}: {kind_of(upload)}, {len(upload.members)} files; the largest:")
        for name, bytes_in_all in sorted(upload.members.items(), key=lambda item: -item[1])[:4]:
            print(f"{'':>10}    {bytes_in_all:>10,}  {name}")
    sys.stdout.flush()


def refuse(uploads: list[Upload], private: tuple[str, ...]) -> None:
    """Stop when a file is too large, holds what does not belong there, or tells where it was built."""
    wrong = []
    kinds = sorted(map(kind_of, uploads))
    if kinds != ["compiled", "models", "models, sources", "portable", "sources"]:
        wrong.append(f"the files are of the kinds {kinds}")
    for upload in uploads:
        name, kind, size = upload.path.name, kind_of(upload), upload.path.stat().st_size
        if not kind.startswith("models") and size >= LIMIT:
            wrong.append(f"{name} has {size:,} bytes, and the limit is {LIMIT:,}")
        libraries = [member for member in upload.members if member.endswith(".so")]
        if bool(libraries) != (kind == "compiled"):
            wrong.append(f"{name} holds the libraries {libraries}")
        strange = [m for m in upload.members if re.search(r"__pycache__|\.pyc$|\.venv|/runs/", m)]
        strange += [m for m in upload.members if kind in ("compiled", "portable") and m.endswith((".c", ".h"))]
        strange += [m for m in upload.members if m.endswith(".safetensors") and not kind.startswith("models")]
        wrong += [f"{name} holds {member}" for member in strange]
        wrong += [f"{name}: {member} names {path}" for member, path in naming(upload.path, private)]
    if wrong:
        raise SystemExit("\n".join(wrong))


def naming(path: Path, private: tuple[str, ...]) -> list[tuple[str, str]]:
    """Members of an archive that name a folder of this machine."""
    found = []

    def look(member: str, content: bytes) -> None:
        found.extend((member, folder) for folder in private if folder.encode() in content)

    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for member in wheel.namelist():
                look(member, wheel.read(member))
    else:
        with tarfile.open(path) as archive:
            for member in filter(tarfile.TarInfo.isfile, archive):
                look(member.name, archive.extractfile(member).read())
    return found


def try_all(files: dict[str, Path], folder: Path, base: Path, tools: Path) -> None:
    """Install each file where nothing else is, and try it."""
    compiled = clean(folder, "compiled", base)
    install(compiled, base, files["compiled"])
    try_package(compiled, folder, kernel=None)

    portable = clean(folder, "portable", base)
    install(portable, base, files["portable"])
    try_package(portable, folder, kernel="this wheel leaves it out")
    try_models(portable, folder, lambda: install(portable, base, files["models"]))

    # The environment sees setuptools, which builds, and no compiler.
    sources = clean(folder, "sources without a compiler", base, tools)
    install(sources, base, files["sources"], "--no-build-isolation")
    try_package(sources, folder, kernel="no library was built at install (no C compiler")

    say("the tests of the source archive")
    unpacked = next((folder / "unpacked").iterdir())
    tester = clean(folder, "sources with a compiler", base, tools)
    run(tester, "setup.py", "--quiet", "build_ext", "--inplace", folder=unpacked, compiler=True)
    told = run(tester, "-m", "pytest", "--quiet", *SDIST_TESTS, folder=unpacked, compiler=True)
    print(told.strip().splitlines()[-1], flush=True)


def clean(folder: Path, name: str, *seen: Path) -> Path:
    """The Python of a fresh environment that sees the packages of others, and nothing of this checkout."""
    say(f"a clean environment: {name}")
    target = folder / name.replace(" ", "_")
    venv.create(target, with_pip=False)
    python = target / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", where).strip())
    others = [run(other, "-c", where) for other in seen]
    (packages / "others.pth").write_text("".join(others), encoding="utf-8")
    return python


def install(python: Path, base: Path, file: Path, *options: str) -> None:
    """Install a file. Nothing is fetched: what it declares must be what `base` holds."""
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet", "--no-index")
    run(base, *pip, *options, file, folder=file.parent)


def try_package(python: Path, folder: Path, *, kernel: str | None) -> None:
    """The README's first example, the command line, and a correction held against the reference.

    Args:
        python: of the environment.
        folder: to run in.
        kernel: what `rollcorr info` must say about the compiled kernel; None when the kernel must run.
    """
    program, wanted = EXAMPLE.search((ROOT / "README.md").read_text(encoding="utf-8")).groups()
    printed = run(python, "-c", program, folder=folder)
    if wanted is not None and printed.rstrip() != wanted.rstrip():
        raise SystemExit(f"the first example of README.md printed\n{printed}")
    run(python, "-c", SMOKE.format(environment=str(python.parents[1])), folder=folder)

    command = python.parent / "rollcorr"
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src/rollcorr/__init__.py").read_text(encoding="utf-8"))[1]
    if run(command, "--version", folder=folder) != f"{version}\n":
        raise SystemExit(f"{command} --version is not {version}")
    run(command, "presets", folder=folder)
    told = json.loads(run(command, "info", "--json", folder=folder))
    print(run(command, "info", folder=folder).partition("\nextras")[0].rstrip(), flush=True)
    cpu = next(entry for entry in told["kernels"] if entry["name"] == "cpu")
    if cpu["usable"] != (kernel is None) or (kernel or "") not in cpu["note"]:
        raise SystemExit(f"rollcorr info says {cpu}, and it should say {kernel or 'that the kernel runs'}")


def try_models(python: Path, folder: Path, install_models: Callable[[], None]) -> None:
    """Without the models of the demos the error names them; with them they are found."""
    say("the models of the demos")
    code = (
        "from rollcorr.train.model_files import demo_model_directory as find\n"
        "for name in ('demo', 'shapes'):\n"
        "    try:\n"
        "        print(len(list(find(name).rglob('*.safetensors'))))\n"
        "    except FileNotFoundError as error:\n"
        "        print(error)\n"
    )
    before = run(python, "-c", code, folder=folder)
    if before.count("pip install rollcorr-demo-models") != 2:
        raise SystemExit(f"without the models: {before}")
    install_models()
    after = run(python, "-c", code, folder=folder)
    if after.split() != ["1", "2"]:
        raise SystemExit(f"with the models: {after}")


def run(
    program: Path,
    *arguments: object,
    folder: Path = ROOT,
    compiler: bool = False,
    **variables: str,
) -> str:
    """What a program prints, in an environment without a user's settings; stop when it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    for name in ("CC", "CFLAGS", "LDFLAGS"):
        kept.pop(name, None)
    searched = [program.parent] + ([os.environ.get("PATH", os.defpath)] if compiler else [])
    kept |= {"PATH": os.pathsep.join(map(str, searched)), "PYTHONNOUSERSITE": "1", "COLUMNS": "160", **variables}
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def say(text: str) -> None:
    """A heading."""
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
