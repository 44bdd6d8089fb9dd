"""What the benchmarks share: environments that hold a peer beside this one's packages, fair timing, and provenance."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Hashable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

HERE = Path(__file__).parent
INSIDE = "ROLLCORR_BENCHMARK_INSIDE"


def run_beside(script: str, name: str, peers: list[str], plain: list[str] | None = None) -> None:
    """Run a script again in an environment with peers in it, and exit; return when this is that run.

    The environment is benchmarks/.venv/NAME. It borrows this environment's packages, torch among them.

    Args:
        script: the file.
        name: of the environment.
        peers: requirements that are installed without what they require.
        plain: requirements that are installed with it.
    """
    if os.environ.get(INSIDE):
        return
    home = HERE / ".venv" / name
    python = home / "bin" / "python"
    done = home / ".installed"
    wanted = "\n".join([*peers, *(plain or [])])
    if not done.exists() or done.read_text() != wanted:
        print("installing", ", ".join(peers), "into", home)
        venv.create(home, with_pip=True, clear=True)
        site = next((home / "lib").glob("python*/site-packages"))
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", *peers], check=True)
        if plain:
            subprocess.run([*pip, *plain], check=True)
        done.write_text(wanted)
    environment = {**os.environ, INSIDE: "1", "PYTHONPATH": str(HERE.parent / "src")}
    raise SystemExit(subprocess.run([python, script, *sys.argv[1:]], env=environment).returncode)


class Run(NamedTuple):
    """Seconds of one call: by the clock, and those that the process computed, on all threads together."""

    wall: float
    cpu: float


Name = TypeVar("Name", bound=Hashable)


def interleaved(
    contenders: Mapping[Name, Callable[[], object]], rounds: int, *, synchronize: Callable[[], object] | None = None
) -> dict[Name, list[Run]]:
    """Every contender, round by round, short ones ten times: whatever disturbs one disturbs its neighbors too."""
    times: dict[Name, list[Run]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):  # the first round warms up
        for name, run in contenders.items():
            values = times[name]
            for _ in range(10 if values and values[-1].wall < 0.1 else 1):
                busy, start = time.process_time(), time.perf_counter()
                run()
                if synchronize is not None:
                    synchronize()
                values.append(Run(time.perf_counter() - start, time.process_time() - busy))
            if round_number == 0:
                del values[:-1]
    return {name: values[1:] for name, values in times.items()}


def summary(runs: list[Run]) -> dict[str, float]:
    """What is kept of a contender's runs."""
    return {
        "min": min(run.wall for run in runs),
        "median": statistics.median(run.wall for run in runs),
        "cpu": min(run.cpu for run in runs),
        "runs": len(runs),
    }


def provenance(script: str, device: str, threads: int) -> dict[str, Any]:
    """What it takes to repeat a figure."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name and core count."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().split("\n") if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()} ({os.cpu_count()} cores)"
