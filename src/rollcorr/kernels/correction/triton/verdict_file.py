"""Verdicts about the Triton kernels, kept from one process to the next: a small JSON file for each kind of machine.

They lie in `$XDG_CACHE_HOME/rollcorr/kernels`, by default `~/.cache/rollcorr/kernels`. A verdict that cannot be read is
none, and one that cannot be written is made again by the next process: neither is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

import rollcorr


class Verdict(NamedTuple):
    """Whether the kernels agree with torch on a machine.

    Attributes:
        agrees: whether they do.
        reason: what differs or failed; empty if they agree.
        failed: whether they could not be run at all. That may pass, so the next process tries again.
    """

    agrees: bool
    reason: str = ""
    failed: bool = False


def machine_of(device: torch.device) -> dict[str, str]:
    """What a verdict holds for: device, driver, and versions of torch, Triton and these kernels."""
    machine = {
        "device": device.type,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "rollcorr": f"{rollcorr.__version__}+{_source_digest()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["device"] = f"{properties.name}, {properties.major}.{properties.minor}"
        machine["driver"] = _driver()
    return machine


def read_verdict(machine: dict[str, str]) -> Verdict | None:
    """What an earlier process found, or None: never asked, damaged, or of another machine."""
    try:
        kept = json.loads(_path(machine).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return None
    if not isinstance(kept, dict) or kept.get("machine") != machine:
        return None
    agrees, reason = kept.get("agrees"), kept.get("reason")
    return Verdict(agrees, reason) if isinstance(agrees, bool) and isinstance(reason, str) else None


def write_verdict(machine: dict[str, str], verdict: Verdict) -> None:
    """Keep a verdict; whole or not at all, and without complaint where there is no place for it."""
    if verdict.failed:
        return
    content = json.dumps({"machine": machine, "agrees": verdict.agrees, "reason": verdict.reason}, indent=2)
    with suppress(OSError, RuntimeError):
        path = _path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)


def _path(machine: dict[str, str]) -> Path:
    """The file of a machine. RuntimeError: there is no home directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "rollcorr" / "kernels" / f"{name}.json"


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """A digest of the kernels' own files: between two versions a checkout changes, and its version does not."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _driver() -> str:
    """The driver as its module reports it, else the version that the runtime knows."""
    with suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].strip()
    if torch.version.hip is not None:
        with suppress(OSError):
            return Path("/sys/module/amdgpu/version").read_text(encoding="utf-8").strip()
        return f"hip {torch.version.hip}"
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return "unknown" if version is None else f"cuda {version()}"
