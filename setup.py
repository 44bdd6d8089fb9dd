"""Build the CPU kernel where a C compiler can; install without it where none can, and note why.

The wheel is called py3-none-PLATFORM with it and py3-none-any without. Everything else is in pyproject.toml.
"""

import os
import platform
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src")
FOLDER = Path("rollcorr/kernels/correction/cpu")
NOTE = "not_built.txt"
WANTED = "ROLLCORR_KERNELS"
"""Environment variable: the libraries to build, as in "avx2,avx512"; "none": a wheel for every platform."""

LEFT_OUT = "this wheel leaves it out; pip install --no-binary rollcorr rollcorr compiles it"
FLAGS = [
    "-std=gnu11",
    "-O2",
    "-g0",
    "-fno-asynchronous-unwind-tables",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
]
LEVELS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "portable": [],
}


class BuildOptional(build_ext):
    """One plain shared library for each instruction set; a compiler that fails is noted and otherwise ignored."""

    def run(self) -> None:
        """Build, then write down what failed."""
        self.reasons = {}
        super().run()
        here = SOURCES if self.inplace or getattr(self, "editable_mode", False) else Path(self.build_lib)
        note = here / FOLDER / NOTE
        note.unlink(missing_ok=True)
        self.built = set(LIBRARIES) - set(self.reasons)
        for level in self.reasons:
            (here / FOLDER / f"correction_{level}.so").unlink(missing_ok=True)  # what an earlier build left
        if self.reasons:
            note.parent.mkdir(parents=True, exist_ok=True)
            same = not self.built and len(set(self.reasons.values())) == 1
            reasons = {"all": next(iter(self.reasons.values()))} if same else self.reasons
            note.write_text("".join(f"{level}: {reason}\n" for level, reason in reasons.items()), encoding="utf-8")

    def build_extension(self, ext: Extension) -> None:
        """Build one library, or keep the reason."""
        level, shared_temp = ext.name.rpartition("_")[2], self.build_temp
        if level not in os.environ.get(WANTED, level).split(","):
            self.reasons[level] = LEFT_OUT
            return
        self.build_temp = os.path.join(shared_temp, level)  # the levels compile one source into different objects
        try:
            super().build_extension(ext)
        except Exception as error:  # whatever a compiler's wrapper raises, the package works without this library
            self.reasons[level] = brief(error)
        finally:
            self.build_temp = shared_temp

    def get_ext_filename(self, fullname: str) -> str:
        """No Python version in the name: the library knows nothing of Python."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """No PyInit function."""
        return []


class WheelForEveryPython(bdist_wheel):
    """One wheel for all versions of Python: the libraries know nothing of it."""

    def run(self) -> None:
        """Build first: only then is it known whether there is anything that a platform matters for."""
        self.run_command("build")
        self.skip_build = True
        if not self.get_finalized_command("build_ext").built:
            self.root_is_pure, self.distribution.ext_modules = True, []
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-any without libraries, py3-none-PLATFORM with them."""
        _, _, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


def brief(error: Exception) -> str:
    """A compiler's failure in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    failed = re.match(r"Command '\['([^']+)'.* (returned non-zero exit status \d+)", text)
    if "No such file" in text:  # what a compiler itself misses stands in its own output, not here
        return f"no C compiler: {text[:200]}"
    return " ".join(failed.groups()) if failed else text[:200]


def extension(level: str) -> Extension:
    """The library of one instruction set."""
    return Extension(
        f"rollcorr.kernels.correction.cpu.correction_{level}",
        [str(SOURCES / FOLDER / "correction.c")],
        depends=[str(header) for header in sorted((SOURCES / FOLDER).glob("*.h"))],
        extra_compile_args=[*FLAGS, *LEVELS[level]],
        extra_link_args=["-pthread"],
        libraries=["m"],
        optional=True,
    )


X86 = platform.machine().lower() in ("x86_64", "amd64")
LIBRARIES = [level for level in LEVELS if X86 or level == "portable"]

setup(
    ext_modules=[extension(level) for level in LIBRARIES],
    cmdclass={"build_ext": BuildOptional, "bdist_wheel": WheelForEveryPython},
)
