"""Time the correction against verl 0.9.1 and a copy of the same bytes, interleaved in one process.

    python benchmarks/correction.py                       # 1 M and 8 M tokens on the CPU, padded and packed
    python benchmarks/correction.py --rows 128 --repeats 30
    python benchmarks/correction.py --device cuda --rows 512 4096
    python benchmarks/correction.py --save                # also writes benchmarks/results/

verl is installed from its wheel, without what it does not need here, into benchmarks/.venv, which borrows this
environment's torch; the timing itself runs there. Every round runs every contender on every batch once (short ones ten
times), and ratios are of minima: what each takes when nobody disturbs it. "The copy" moves 14 bytes a token, 7 in and 7
out, between buffers that exist already: what weights and a mask cost at least.
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
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent
PEER = HERE / ".venv"
PEER_REQUIREMENTS = ["verl==0.9.1", "tensordict==0.10.0"]
PEER_PLAIN = ["codetiming", "hydra-core", "ray", "pandas", "cloudpickle", "orjson", "importlib_metadata", "pyvers"]
INSIDE = "ROLLCORR_BENCHMARK_INSIDE"
VERL, COPY = "verl 0.9.1", "copy"
LENGTH = 8192

Contenders = dict[str, Callable[[], object]]


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
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 1024], help="sequences (default 128 1024)")
    parser.add_argument("--repeats", type=int, default=8, help="timed rounds (default 8)")
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
    """Count, then time, and print both."""
    import torch

    load = os.getloadavg()[0]
    counts = count(arguments)
    print(f"{'asked of torch, on one thread':44s} {'operations':>10s} {'waits':>6s} {'bytes a token':>14s}")
    for name, row in counts.items():
        print(f"{name:44s} {row['operations']:10d} {row['waits']:6d} {row['bytes_per_token']:14.0f}")
    torch.set_num_threads(arguments.threads)
    batches = {
        f"{rows * LENGTH:,} tokens, {layout}": contenders(arguments, rows, layout)
        for rows in arguments.rows
        for layout in ("padded", "dense", "packed")
    }
    times = measure(arguments, batches)
    for title, of in times.items():
        least = {name: min(run.wall for run in runs) for name, runs in of.items()}
        print(f"\n{title}, {arguments.device}, {arguments.threads} threads, torch {torch.__version__}")
        print(f"{'ms':44s} {'min':>9s} {'median':>9s} {'CPU':>9s} {'× verl':>9s} {'× copy':>7s}")
        for name, runs in of.items():
            median, busy = statistics.median(run.wall for run in runs), min(run.cpu for run in runs)
            line = f"{name:44s} {least[name] * 1e3:9.2f} {median * 1e3:9.2f} {busy * 1e3:9.2f}"
            print(f"{line} {least[VERL] / least[name]:9.1f} {least[name] / least[COPY]:7.2f}")
    if arguments.save:
        save(arguments, times, counts, load)


def measure(arguments: argparse.Namespace, batches: dict[str, Contenders]) -> dict[str, dict[str, list[Run]]]:
    """Seconds of every contender, round by round: whatever disturbs one disturbs its neighbours too."""
    import torch

    times: dict[str, dict[str, list[Run]]] = {title: {name: [] for name in of} for title, of in batches.items()}
    for round_number in range(arguments.repeats + 1):  # the first round warms up
        for title, of in batches.items():
            for name, run in of.items():
                values = times[title][name]
                for _ in range(10 if values and values[-1].wall < 0.1 else 1):
                    busy, start = time.process_time(), time.perf_counter()
                    run()
                    if arguments.device != "cpu":
                        torch.cuda.synchronize()
                    values.append(Run(time.perf_counter() - start, time.process_time() - busy))
                if round_number == 0:
                    del values[:-1]
    return {title: {name: values[1:] for name, values in of.items()} for title, of in times.items()}


class Run(NamedTuple):
    """Seconds of one run: on the clock, and of all threads together, which others on the machine disturb less."""

    wall: float
    cpu: float


class Case(NamedTuple):
    """One batch: what verl gets, what rollcorr gets, and buffers for its outputs."""

    padded: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    cu_seqlens: torch.Tensor | None
    out: tuple[torch.Tensor, torch.Tensor]


def case(rows: int, length: int, layout: str, device: str) -> Case:
    """Log-probs of well-matched policies: responses of T/8 to T tokens, padded or packed, or all of T ("dense").

    verl takes padded tensors, so it gets those also where rollcorr takes the same tokens packed.
    """
    import torch

    from rollcorr.core.layout import pack

    generator = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand((rows, length), generator=generator)
    train = rollout + 0.02 * torch.randn((rows, length), generator=generator)
    lengths = torch.randint(length // 8, length + 1, (rows,), generator=generator)
    mask = torch.arange(length) < (torch.full_like(lengths, length) if layout == "dense" else lengths)[:, None]
    padded = train.to(device), rollout.to(device), mask.to(device)
    own, cu_seqlens = padded, None
    if layout == "packed":
        (packed, cu_seqlens), (packed_rollout, _) = pack(train, mask), pack(rollout, mask)
        own = packed.to(device), packed_rollout.to(device), torch.ones_like(packed, dtype=torch.bool, device=device)
        cu_seqlens = cu_seqlens.to(device)
    return Case(padded, own, cu_seqlens, (torch.ones_like(own[0]), torch.ones_like(own[2])))


def contenders(arguments: argparse.Namespace, rows: int, layout: str, length: int = LENGTH) -> Contenders:
    """Token weights and one sequence criterion, every metric on the host, unless a name says otherwise."""
    import torch

    warnings.simplefilter("ignore")
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verl_helper

    from rollcorr import RolloutCorrectionConfig, correct
    from rollcorr.core.metrics import CRITERIA

    batch = case(rows, length, layout, arguments.device)
    fields = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    config = RolloutCorrectionConfig(**fields)
    thresholds = ",".join("0.5_2.0" if name.endswith("k1") else "1.0" for name in CRITERIA)
    every = RolloutCorrectionConfig(rollout_is="token", rollout_rs=",".join(CRITERIA), rollout_rs_threshold=thresholds)
    out, tokens = batch.out, batch.own[0].numel()
    source = torch.ones(7 * tokens, dtype=torch.uint8, device=arguments.device)
    target = torch.ones_like(source)

    def corrected(config: object, **options: object) -> object:
        return correct(*batch.own, config, cu_seqlens=batch.cu_seqlens, **options)

    fast = "triton" if arguments.device == "cuda" else "cpu"
    return {
        VERL: lambda: verl_helper(*batch.padded, rollout_is_threshold=2.0, **fields),
        COPY: lambda: target.copy_(source),
        f"{fast}, out=, metrics not read": lambda: corrected(config, out=out, impl=fast),
        f"{fast}, out=": lambda: corrected(config, out=out, impl=fast).metrics(),
        f"{fast}, fresh outputs": lambda: corrected(config, impl=fast).metrics(),
        f"{fast}, metrics only": lambda: corrected("disabled", impl=fast).metrics(),
        f"{fast}, eleven criteria, out=": lambda: corrected(every, out=out, impl=fast).metrics(),
        f"{fast}, histograms and the worst, out=": lambda: corrected(config, out=out, impl=fast, detail=True).metrics(),
        "blocked, out=": lambda: corrected(config, out=out, impl="blocked").metrics(),
        "blocked, fresh outputs": lambda: corrected(config, impl="blocked").metrics(),
        "blocked, eleven criteria, out=": lambda: corrected(every, out=out, impl="blocked").metrics(),
    }


def count(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What each asks of torch for 64 sequences of 2,048 tokens."""
    import torch
    from counting import Counts

    torch.set_num_threads(1)
    rows, length = 64, 2048
    found = {}
    for name, run in contenders(arguments, rows, "dense", length).items():
        run()
        with Counts() as counts:
            run()
        moved = counts.bytes_moved / (rows * length)
        found[name] = {"operations": counts.operations, "waits": counts.waits, "bytes_per_token": moved}
    return found


def save(
    arguments: argparse.Namespace,
    times: dict[str, dict[str, list[Run]]],
    counts: dict[str, dict[str, float]],
    load: float,
) -> None:
    """Write the figures with what is needed to repeat them. docs/performance.md is made from them."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    result = {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/correction.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else processor(),
        "threads": arguments.threads,
        "load": round(load, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "counts": counts,
        "seconds": {
            title: {
                name: {
                    "min": min(run.wall for run in runs),
                    "median": statistics.median(run.wall for run in runs),
                    "cpu": min(run.cpu for run in runs),
                    "runs": len(runs),
                }
                for name, runs in of.items()
            }
            for title, of in times.items()
        },
    }
    path = HERE / "results" / f"correction_{arguments.device}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print("wrote", path.relative_to(HERE.parent), "- now run python tools/generate_docs.py")


def processor() -> str:
    """The CPU's name and core count."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().split("\n") if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()} ({os.cpu_count()} cores)"


if __name__ == "__main__":
    main()
