"""Compare two checkouts: run the same work in each in turn, and print the ratio of medians.

    git worktree add ../base COMMIT
    python benchmarks/paired.py ../base                     # correction and Monitor, 30 pairs
    python benchmarks/paired.py ../base --cases monitor --pairs 100
    python benchmarks/paired.py ../base --pairs 20 --trl .venv-trl/bin/python

One process per checkout stays alive, so imports and warm-up are not measured. Each pair runs one case in both
processes, and the order changes from pair to pair: a busy neighbor slows both alike. Corrections are timed by the
clock, a Monitor by the processor time of the loop's thread. The ratio is this checkout over the other; the interval is
that of 2,000 bootstrap samples of the pairs. `--trl` runs `benchmarks/trl_step.py` of each checkout instead, in an
environment that has TRL. Build the compiled kernel in both checkouts first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
LIMIT = 1.05


def main() -> None:
    """Print a line per case, and exit with 1 if a ratio is beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of each case (default 30)")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="tokens of a batch (default 1 M)")
    parser.add_argument("--trl", metavar="PYTHON", help="compare steps of TRL's trainer, with this interpreter")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    if arguments.base is None or not (arguments.base / "src" / "rollcorr").is_dir():
        parser.error(f"the other checkout must contain src/rollcorr, got {arguments.base}")

    checkouts = arguments.base.resolve(), HERE.parent
    times = trl_pairs(arguments, checkouts) if arguments.trl else case_pairs(arguments, checkouts)
    print(f"{'median ms':44s} {'other':>9s} {'this':>9s} {'ratio':>7s}  95 % interval")
    beyond = False
    for name, pairs in times.items():
        ratio, low, high = ratio_of_medians(pairs)
        beyond |= ratio > LIMIT
        other, this = (1e3 * median(column) for column in zip(*pairs, strict=True))
        print(f"{name:44s} {other:9.3f} {this:9.3f} {ratio:7.3f}  {low:.3f} to {high:.3f}")
    raise SystemExit(int(beyond))


def ratio_of_medians(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return median(this) / median(other), and the 2.5 and 97.5 % points of its bootstrap distribution."""

    def ratio(chosen: list[tuple[float, float]]) -> float:
        other, this = zip(*chosen, strict=True)
        return median(this) / median(other)

    draw = random.Random(0)
    found = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return ratio(pairs), found[50], found[-51]


def case_pairs(arguments: argparse.Namespace, checkouts: tuple[Path, Path]) -> dict[str, list[tuple[float, float]]]:
    """Run each case in both checkouts in turn. Returns name → (seconds of the other, seconds of this one)."""
    options = ["--worker", "--tokens", str(arguments.tokens), "--cases", arguments.cases]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *options],
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for checkout in checkouts
    ]
    names, _ = (json.loads(worker.stdout.readline()) for worker in workers)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for pair in range(-2, arguments.pairs):  # two pairs warm up
        for name in names:
            seconds = [0.0, 0.0]
            for side in (0, 1) if pair % 2 else (1, 0):
                workers[side].stdin.write(name + "\n")
                workers[side].stdin.flush()
                seconds[side] = float(workers[side].stdout.readline())
            if pair >= 0:
                times[name].append((seconds[0], seconds[1]))
    for worker in workers:
        worker.stdin.close()
        worker.wait()
    return times


def trl_pairs(arguments: argparse.Namespace, checkouts: tuple[Path, Path]) -> dict[str, list[tuple[float, float]]]:
    """Run each checkout's own `trl_step.py` in turn. Returns figure → (seconds of the other, seconds of this one)."""
    times: dict[str, list[tuple[float, float]]] = {"step_cpu_ms": [], "adapter_cpu_ms": []}
    for pair in range(arguments.pairs):
        found: list[dict[str, float]] = [{}, {}]
        for side in (0, 1) if pair % 2 else (1, 0):
            command = [os.path.abspath(arguments.trl), "benchmarks/trl_step.py", "--steps", "5"]
            environment = {**os.environ, "PYTHONPATH": str(checkouts[side] / "src"), "OMP_NUM_THREADS": "1"}
            run = subprocess.run(command, cwd=checkouts[side], env=environment, capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(f"{checkouts[side]}: {' '.join(command)} failed\n{run.stderr[-2000:]}")
            found[side] = json.loads(run.stdout[run.stdout.rindex("{\n") :])
        for name, pairs in times.items():
            pairs.append((found[0][name] / 1e3, found[1][name] / 1e3))
    return times


def work(arguments: argparse.Namespace) -> None:
    """Print the names of the cases, then the seconds of each case whose name arrives."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: run for name, run in all_cases(arguments.tokens, folder).items() if arguments.cases in name}
        print(json.dumps(list(cases)), flush=True)
        for line in sys.stdin:
            run = cases[line.strip()]

            # A Monitor writes in a thread of its own, so its cost is the time of the loop's thread, as in monitor.py.
            clock = time.thread_time if line.startswith("monitor") else time.perf_counter

            # Short calls are repeated until they fill about 20 ms, so that the clock's resolution does not matter.
            start = clock()
            run()
            repeats = max(1, int(0.02 / max(clock() - start, 1e-6)))
            start = clock()
            for _ in range(repeats):
                run()
            print((clock() - start) / repeats, flush=True)


def all_cases(tokens: int, folder: str) -> dict[str, Callable[[], object]]:
    """Return name → one call: the corrections of `correction.py`, and the parts of a step of `monitor.py`."""
    cases: dict[str, Callable[[], object]] = {}
    for layout in ("padded", "dense", "packed"):
        cases |= correction_cases(tokens, layout)
    return cases | loss_cases(tokens) | monitor_cases(tokens, folder)


def correction_cases(tokens: int, layout: str) -> dict[str, Callable[[], object]]:
    """Token weights and one sequence criterion, with every metric on the host."""
    from correction import case

    from rollcorr import RolloutCorrectionConfig, correct

    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)
    batch = case(max(1, tokens // 8192), 8192, layout, "cpu")

    def corrected(**options: object) -> object:
        return correct(*batch.own, config, cu_seqlens=batch.cu_seqlens, out=batch.out, **options).metrics()

    return {
        f"correction, {layout}, cpu": lambda: corrected(impl="cpu"),
        f"correction, {layout}, cpu, detail": lambda: corrected(impl="cpu", detail=True),
        f"correction, {layout}, torch": lambda: corrected(impl="torch"),
    }


def loss_cases(tokens: int) -> dict[str, Callable[[], object]]:
    """Compute the loss of a corrected batch, forward only."""
    from correction import case

    from rollcorr import PolicyLogProbs, correct, policy_loss

    train, rollout, mask = case(max(1, tokens // 8192), 8192, "padded", "cpu").own
    correction = correct(train, rollout, mask, "decoupled_token_is")
    log_prob = train.clone().requires_grad_()
    policies = PolicyLogProbs(log_prob=log_prob, old_log_prob=train, rollout_log_prob=rollout)
    return {"policy_loss, padded": lambda: policy_loss(policies, rollout, mask, correction=correction)}


def monitor_cases(tokens: int, folder: str) -> dict[str, Callable[[], object]]:
    """End a step of a Monitor, without a correction and with one."""
    import torch
    from correction import case

    from rollcorr import Monitor

    batch = case(max(1, tokens // 8192), 8192, "dense", "cpu")
    rewards = torch.rand(len(batch.own[0]))
    monitor = Monitor(Path(folder) / "run", "decoupled_token_is")

    def step() -> object:
        return monitor.step(reward=rewards, loss=0.1, lr=1e-4, grad_norm=0.5, entropy=0.3)

    def corrected_step() -> object:
        monitor.correct(*batch.own, out=batch.out)
        return step()

    return {"monitor, step alone": step, "monitor, correct and step": corrected_step}


if __name__ == "__main__":
    main()
