"""Write constraints.txt: every package of [dev], [release] and [docs] with one version, for each supported Python.

`make lock` keeps the versions that the file has, where they still fit; `make lock ARGS=--upgrade` takes the newest.
It needs uv, which resolves for all versions of Python at once, and a package index.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints.txt"
HEADER = """\
# Written by `make lock`. Every package of [dev], [release] and [docs], pinned, for the Makefile and for CI.
# The package itself takes the ranges of pyproject.toml: it is tested with torch 2.6 too.
"""


def main(arguments: list[str]) -> int:
    """Resolve, and write the file whole or not at all."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.10"]
    command += ["--extra", "dev", "--extra", "release", "--extra", "docs", "--no-header", "--no-annotate"]
    command += ["--output-file", str(LOCK), *arguments, "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        return done.returncode
    pins = LOCK.read_text(encoding="utf-8")
    LOCK.write_text(HEADER + pins.removeprefix(HEADER), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
