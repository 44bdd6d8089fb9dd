"""Peers without a network: their wheels, fetched beforehand, and stand-ins for what they import but do not use here.

python tools/gpu_stages/carried.py --fetch      # make gpu-wheels
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

WHEELS = Path(__file__).resolve().parents[2] / "benchmarks" / "wheels"
PEERS = ("verl==0.9.1", "trl==1.16.0", "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1")
OWN = ("lazy-loader", "typer", "rich", "pytest", "hypothesis", "iniconfig", "pluggy", "sortedcontainers", "shellingham")
OWN += ("markdown-it-py", "mdurl", "pygments", "click", "annotated-doc", "omegaconf>=2.4.0.dev0", "packaging")
"""What rollcorr and the oracle import, where the machine has it not."""


def fetch() -> None:
    """Download every wheel: all are of pure Python, so they fit any machine."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--pre"]
    command += ["--only-binary=:all:", "--platform", "any", "--dest", str(WHEELS)]
    for requirement in (*PEERS, *OWN):
        pre = [] if "dev" in requirement else ["--no-pre"]
        arguments = [x for x in command if x != "--pre"] if pre else command
        done = subprocess.run([*arguments, requirement], capture_output=True, text=True)
        print(
            f"{requirement:32s} {'fetched' if done.returncode == 0 else 'NOT fetched: ' + done.stderr.strip()[-200:]}"
        )
    total = sum(path.stat().st_size for path in WHEELS.glob("*.whl"))
    print(f"{total / 1e6:.1f} MB in {WHEELS}")


def offer() -> None:
    """Put the wheels behind everything that is installed: what the machine has itself comes first."""
    if not WHEELS.is_dir():
        return
    folder = Path(tempfile.gettempdir()) / "rollcorr-gpu-wheels"
    for wheel in sorted(WHEELS.glob("*.whl")):
        place = folder / wheel.stem
        if not place.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
        if str(place) not in sys.path:
            sys.path.append(str(place))


class _StandIn(types.ModuleType):
    """A module that has every name, each a class that does nothing: it lets an import statement pass."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


class _Finder:
    """Finds stand-ins for the packages named."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


UNUSED = ("ray", "tensordict", "codetiming", "hydra", "omegaconf", "pandas", "orjson", "transformers", "torchdata")
UNUSED += ("datasets", "accelerate", "cachetools", "importlib_metadata", "pyvers", "cloudpickle", "peft", "dill")
"""What the peers import and what is timed does not use. Where one is installed, it is taken itself."""


def allow_peers() -> None:
    """From now on the peers can be imported in this process, with stand-ins for what is missing of `UNUSED`."""
    offer()
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return

    # A folder that an uninstalled package left behind is found too, as a package without a file.
    found = {name: importlib.util.find_spec(name) for name in UNUSED}
    missing = tuple(name for name, spec in found.items() if spec is None or spec.origin is None)
    sys.meta_path.insert(0, _Finder(missing))  # type: ignore[arg-type]


def verl_helper() -> Callable[..., Any]:
    """verl's correction, from its wheel. Without tensordict its weights come in a dictionary: a few µs in its favor."""
    allow_peers()
    from verl.trainer.ppo import rollout_corr_helper

    if isinstance(sys.modules.get("tensordict"), _StandIn):
        rollout_corr_helper.DataProto = _Weights
    return rollout_corr_helper.compute_rollout_correction_and_rejection_mask  # type: ignore[no-any-return]


class _Weights:
    """In the place of verl's DataProto."""

    @staticmethod
    def from_dict(tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", required=True, help="download the wheels")
    parser.parse_args()
    fetch()
