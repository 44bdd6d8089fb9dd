"""Time the correction against verl 0.9.1 and a copy of the same bytes, interleaved in one process.

    python benchmarks/correction.py                     # 1,024 × 8,192 tokens on the CPU
    python benchmarks/correction.py --device cuda --rows 4096
    python benchmarks/correction.py --save              # also writes benchmarks/results/

verl is installed from its wheel, without what it does not need here, into benchmarks/.venv, which borrows this
environment's torch; the timing itself runs there. Figures are medians and ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
PEER = HERE / ".venv"
PEER_REQUIREMENTS = ["verl==0.9.1", "tensordict==0.10.0"]
PEER_PLAIN = ["codetiming", "hydra-core", "ray", "pandas", "cloudpickle", "orjson", "importlib_metadata", "pyvers"]
INSIDE = "ROLLCORR_BENCHMARK_INSIDE"


def main() -> None:
    """Prepare the peer's environment, then run the timing inside it."""
    arguments = parse()
    if os.environ.get(INSIDE):
        report(arguments)
        return
    prepare()
    environment = {**os.environ, INSIDE: "1", "PYTHONPATH": str(HERE.parent)}
    raise SystemExit(subprocess.run([PEER / "bin" / "python", __file__, *sys.argv[1:]], env=environment).returncode)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="sequences, B (default 1024)")
    parser.add_argument("--length", type=int, default=8192, help="padded length, T (default 8192)")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    return parser.parse_args()


def prepare() -> None:
    """Create the environment that holds verl beside this environment's packages."""
    done = PEER / ".installed"
    if done.exists():
        return
    print("installing verl 0.9.1 into", PEER)
    venv.create(PEER, with_pip=True, clear=True)
    site = next((PEER / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [PEER / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", *PEER_REQUIREMENTS], check=True)
    subprocess.run([*pip, *PEER_PLAIN], check=True)
    done.touch()


def report(arguments: argparse.Namespace) -> None:
    """Time each contender in turn and print the medians."""
    import torch

    torch.set_num_threads(arguments.threads)
    contenders = build(arguments)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(arguments.repeats + 1):  # the first round warms up
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if arguments.device != "cpu":
                torch.cuda.synchronize()
            if round_number:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    tokens = arguments.rows * arguments.length
    print(f"{tokens:,} tokens, {arguments.device}, {arguments.threads} threads, torch {torch.__version__}")
    for name, seconds in medians.items():
        line = f"{name:42s} {seconds * 1e3:9.1f} ms  {medians['verl 0.9.1'] / seconds:7.1f} × verl 0.9.1"
        print(f"{line}  {seconds / medians['copy of the same bytes']:7.1f} × the copy")
    if arguments.save:
        save(arguments, times)


def build(arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The contenders, over one batch: token weights, one sequence criterion, every metric on the host."""
    import torch

    warnings.simplefilter("ignore")
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verl_helper

    from rollcorr import RolloutCorrectionConfig, correct

    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows, arguments.length)
    rollout = -2 * torch.rand(shape, generator=generator)
    train = rollout + 0.02 * torch.randn(shape, generator=generator)
    lengths = torch.randint(arguments.length // 8, arguments.length + 1, shape[:1], generator=generator)
    mask = torch.arange(arguments.length) < lengths[:, None]
    train, rollout, mask = (tensor.to(arguments.device) for tensor in (train, rollout, mask))
    fields = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    config = RolloutCorrectionConfig(**fields)

    def copy() -> object:
        return train.clone(), rollout.clone(), mask.clone()

    return {
        "verl 0.9.1": lambda: verl_helper(train, rollout, mask, rollout_is_threshold=2.0, **fields),
        "rollcorr, weights, mask and all metrics": lambda: correct(train, rollout, mask, config).metrics(),
        "rollcorr, metrics only": lambda: correct(train, rollout, mask, "disabled").metrics(),
        "copy of the same bytes": copy,
    }


def save(arguments: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """Write the figures with what is needed to repeat them."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else processor()
    result = {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/correction.py", *sys.argv[1:]]),
        "device": device,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tokens": arguments.rows * arguments.length,
        "seconds": times,
    }
    path = HERE / "results" / f"correction_{arguments.device}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print("wrote", path.relative_to(HERE.parent))


def processor() -> str:
    """The CPU's name and core count."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().split("\n") if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()} ({os.cpu_count()} cores)"


if __name__ == "__main__":
    main()
