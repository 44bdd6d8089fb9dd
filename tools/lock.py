"""Write the lock: every package of [dev], [release] and [docs] with one version, for each supported Python.

`constraints.txt` has the versions, for every installation. `requirements.lock` has the SHA-256 of their files too, for
the workflows and for a release (`make … HASHES=1`). Torch, and the packages for a GPU that it brings, are not in it: a
machine without a GPU takes a build for the CPU from another index, and such files have other hashes.

`make lock` keeps the versions that the file has, where they still fit; `make lock ARGS=--upgrade` takes the newest.
It needs uv, which resolves for all versions of Python at once, and a package index.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK, HASHED = ROOT / "constraints.txt", ROOT / "requirements.lock"
HEADER = """\
# Written by `make lock`. Every package of [dev], [release] and [docs], pinned, for the Makefile and for CI.
# The package itself takes the ranges of pyproject.toml: it is tested with torch 2.6 too.
"""
HASHED_HEADER = """\
# Written by `make lock`. The pins of constraints.txt with the SHA-256 of each file; without torch.
# `make … HASHES=1` installs them in pip's hash-checking mode.
"""
OF_TORCH = re.compile(r"(torch|triton|nvidia-[^=]*|cuda-[^=]*)==")


def main(arguments: list[str]) -> int:
    """Resolve, and write each file whole or not at all."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.10"]
    command += ["--extra", "dev", "--extra", "release", "--extra", "docs", "--no-header", "--no-annotate"]
    command += ["pyproject.toml"]
    done = subprocess.run([*command, "--output-file", str(LOCK), *arguments], cwd=ROOT)
    if done.returncode:
        return done.returncode
    pins = LOCK.read_text(encoding="utf-8").removeprefix(HEADER)
    LOCK.write_text(HEADER + pins, encoding="utf-8")

    # The second resolution may choose nothing: every version is a constraint.
    hashes = [*command, "--generate-hashes", "--constraint", str(LOCK)]
    done = subprocess.run(hashes, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    HASHED.write_text(HASHED_HEADER + "".join(without_torch(done.stdout)), encoding="utf-8")
    return 0


def without_torch(lock: str) -> list[str]:
    """Return the entries of a lock with hashes, each of several lines, without torch and what it brings."""
    return [entry for entry in re.split(r"(?m)^(?=\S)", lock) if entry and not OF_TORCH.match(entry)]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
