"""How the compiled kernel comes to be: built without a warning, absent without a complaint, and never out of bounds."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run_python

from rollcorr.kernels.correction.cpu.job import MAX_CRITERIA
from rollcorr.kernels.correction.cpu.library import ABI, FOLDER, LEVELS, Library, library, load, status

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("gcc")
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no gcc here: install it, for instance with apt install gcc"
)


def build(into: Path, **environment: str) -> Path:
    """Build the libraries of an installation in a temporary folder."""
    pytest.importorskip("setuptools")
    folders = ["--build-lib", str(into / "lib"), "--build-temp", str(into / "temp")]
    command = [sys.executable, "-W", "ignore", "setup.py", "--quiet", "build_ext", *folders]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True)
    return into / "lib" / FOLDER.relative_to(ROOT / "src")


@needs_compiler
def test_every_instruction_set_builds_without_a_warning(tmp_path):
    folder = build(tmp_path, CFLAGS="-Wall -Wextra -Werror")
    assert not (folder / "not_built.txt").exists()
    levels = LEVELS if platform.machine().lower() in ("x86_64", "amd64") else ("portable",)
    assert sorted(path.name for path in folder.glob("*.so")) == sorted(f"correction_{level}.so" for level in levels)
    assert isinstance(load(folder, "portable"), Library)


@needs_compiler
def test_where_there_is_a_compiler_no_installation_of_this_checkout_has_failed_to_build():
    """A checkout that was never installed has neither libraries nor this file."""
    assert not (FOLDER / "not_built.txt").exists(), f"{load(FOLDER, 'portable')}: `make install` builds it"


def arm64_compiler() -> list[str] | None:
    """A compiler that makes arm64 code here."""
    if gcc := shutil.which("aarch64-linux-gnu-gcc"):
        return [gcc]
    target = ["cc", "-target", "aarch64-linux-gnu"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", *target]
    zig = shutil.which("zig")
    return [zig, *target] if zig else None


@pytest.mark.slow
@pytest.mark.skipif(arm64_compiler() is None, reason="no compiler for arm64: make test-arm installs one")
def test_it_compiles_for_arm64_without_a_warning(tmp_path):
    """With the flags of an installation, into a library that exports the functions that Python calls."""
    flags = ["-std=gnu11", "-O2", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    command = [*arm64_compiler(), *flags, "-shared", "-fPIC", "-pthread", "-s", FOLDER / "correction.c"]
    subprocess.run([*command, "-o", tmp_path / "arm64.so", "-lm"], check=True)
    library = (tmp_path / "arm64.so").read_bytes()
    assert library[:5] == b"\x7fELF\x02"
    assert int.from_bytes(library[18:20], "little") == 183  # EM_AARCH64
    assert b"rollcorr_correct" in library


def test_without_a_compiler_the_reason_is_noted(tmp_path):
    folder = build(tmp_path, CC="false")
    assert not list(folder.glob("*.so"))
    reason = "no library was built at install (false returned non-zero exit status 1)"
    assert [load(folder, level) for level in LEVELS] == [reason] * len(LEVELS)


def test_a_compiler_that_lacks_one_instruction_set_is_noted_for_that_one(tmp_path):
    (tmp_path / "not_built.txt").write_text("avx512: gcc returned non-zero exit status 1\n", encoding="utf-8")
    reason = "the avx512 library was not built at install (gcc returned non-zero exit status 1)"
    assert load(tmp_path, "avx512") == reason
    assert "is not installed" in load(tmp_path, "avx2")


def test_a_library_that_was_never_built_says_what_to_do(tmp_path):
    assert load(tmp_path, "portable") == (
        "the portable library is not installed; install a C compiler, then reinstall rollcorr"
    )


@needs_compiler
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("long long rollcorr_abi(void) { return 0; }", "built from another version of rollcorr; reinstall rollcorr"),
        (f"long long rollcorr_abi(void) {{ return {ABI}; }}", "built from another version"),
    ],
)
def test_a_library_of_another_version_is_not_used(tmp_path, source, said):
    stubs = "long long rollcorr_job_size(void) { return 1; }"
    (tmp_path / "old.c").write_text(f"{source}\n{stubs}\n")
    target = tmp_path / "correction_portable.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", tmp_path / "old.c", "-o", target], check=True)
    assert said in load(tmp_path, "portable")


def test_a_damaged_library_is_a_reason_and_no_crash(tmp_path):
    (tmp_path / "correction_avx2.so").write_bytes(b"not a library")
    assert load(tmp_path, "avx2").startswith("correction_avx2.so does not load (")


def test_without_the_library_torch_does_the_work_and_asking_for_it_says_why(tmp_path):
    code = f"""
import pathlib, torch, rollcorr
from rollcorr.kernels.correction import implementations
from rollcorr.kernels.correction.cpu import library
library.FOLDER = pathlib.Path({str(tmp_path)!r})
x = torch.zeros(2, 3)
assert rollcorr.correct(x, x, x + 1, "decoupled_token_is").loss_mask.all()
assert implementations()["cpu"][0] is False
try:
    rollcorr.correct(x, x, x + 1, "decoupled_token_is", impl="cpu")
except ImportError as error:
    print(error)
"""
    done = run_python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "the compiled CPU kernel cannot be used: the avx512 library is not installed" in done.stdout
    assert not done.stderr


def test_an_unknown_instruction_set_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="'avx512', 'avx2', 'portable', got 'sse9'"):
        library("sse9")


def test_python_and_c_agree_on_numbers():
    text = (FOLDER / "job.h").read_text(encoding="utf-8")
    for name, value in (("ABI", ABI), ("MAX_CRITERIA", MAX_CRITERIA)):
        assert re.search(rf"#define {name} (\d+)", text).group(1) == str(value)


@pytest.mark.parametrize(
    ("capability", "levels"),
    [
        ("AVX512", LEVELS),
        ("AVX512_VNNI", LEVELS),
        ("AVX2", LEVELS[1:]),
        ("DEFAULT", LEVELS[2:]),
        ("SVE256", LEVELS[2:]),
    ],
)
def test_a_library_runs_where_torch_finds_its_instructions(capability, levels, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for level in LEVELS:
        found = load.__wrapped__(FOLDER, level)
        refused = found == f"torch finds no {level} on this processor"
        assert refused == (level not in levels and (FOLDER / f"correction_{level}.so").exists())


@needs_compiler
@pytest.mark.skipif("ROLLCORR_SANITIZERS" not in os.environ, reason="10 seconds: make test-sanitizers")
def test_no_batch_makes_it_read_or_write_out_of_bounds(tmp_path):
    """Under the address and undefined-behavior sanitizers, at the widest vectors that run here, called from Python."""
    flags = {"avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"], "avx2": ["-mavx2", "-mfma"]}
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    level, script = status()[0] or "portable", Path(__file__).with_name("cpu_sanitize.py")
    options = ["-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-pthread", *flags.get(level, []), *sanitize]
    output = ["-o", tmp_path / f"correction_{level}.so", "-lm"]
    built = subprocess.run([COMPILER, *options, FOLDER / "correction.c", *output], capture_output=True, text=True)
    if "cannot find -lasan" in built.stderr or "cannot find -lubsan" in built.stderr:
        pytest.skip("gcc lacks its sanitizer libraries: install libasan and libubsan")
    assert built.returncode == 0, built.stderr

    # Python was not built with the address sanitizer, so that library must come first. Leaks of Python are not ours.
    asan = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    path = os.pathsep.join([str(ROOT / "src"), str(script.parent)])
    environment = {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, tmp_path]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
