"""Measure and prove the GPU path in one sitting: one command, one GPU, no network, under 9 minutes.

    make gpu-wheels                                 # before, where there is a network: the peers, 6 MB
    python tools/gpu.py                             # every stage; writes benchmarks/results/gpu_cuda.json
    python tools/gpu.py --results $OUT              # … into another folder
    python tools/gpu.py --stages correctness,waiting
    python tools/gpu.py --device cpu --quick        # the same code without a GPU, on small sizes: a dry run (2 minutes)

Each stage runs in a process of its own, because an error on a GPU spoils its process, and with a limit of its own. It
writes what it has found after every row, so that a stage that fails or runs out of time leaves what it had; the next
one runs in any case. What was expected is in tools/gpu_stages/predictions.json, written before any run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from gpu_stages import STAGES, Plan  # noqa: E402
from gpu_stages.recorder import Recorder  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Run the stages; 1 when a stage failed or found a difference."""
    arguments = parse(argv)
    names = arguments.stages.split(",") if arguments.stages else list(STAGES)
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise SystemExit(f"there is no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    path = arguments.results / f"gpu_{arguments.device}{'_quick' if arguments.quick else ''}.json"
    recorder = Recorder(path)

    if arguments.inside:
        run_here(names[0], Plan(arguments.device, arguments.quick), recorder)
        return 0

    started = time.monotonic()
    recorder.start(command=" ".join(["python", "tools/gpu.py", *(argv if argv is not None else sys.argv[1:])]))
    for name in names:
        left = arguments.minutes * 60 - (time.monotonic() - started)
        limit = min(left, STAGES[name].seconds)
        if limit < 5:
            recorder.finish(name, "not run", f"the {arguments.minutes:g} minutes were over", 0.0)
        else:
            run_stage(name, arguments, recorder, limit)
        print(f"{name:12s} {recorder.stage(name)['status']:8s} {recorder.stage(name).get('reason', '')}", flush=True)
    print(f"wrote {path} after {time.monotonic() - started:.0f} s")
    return 0 if all(recorder.stage(name)["status"] == "done" for name in names) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="default cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether everything runs, not how fast")
    parser.add_argument("--stages", help=f"some of {', '.join(STAGES)}, with commas (default: all)")
    parser.add_argument("--minutes", type=float, default=8.5, help="for all stages together (default 8.5)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder to write to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_stage(name: str, arguments: argparse.Namespace, recorder: Recorder, limit: float) -> None:
    """Run a stage in a process of its own, and record how it ended."""
    command = [sys.executable, __file__, "--inside", "--stages", name, "--device", arguments.device]
    command += ["--results", str(arguments.results), *(["--quick"] if arguments.quick else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.getenv("PYTHONPATH")])),
    }
    log = recorder.path.with_suffix(f".{name}.log")
    started = time.monotonic()
    status, reason = "done", ""
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=limit)
            if done.returncode != 0:
                status, reason = "failed", f"exit code {done.returncode}: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            status, reason = "failed", f"stopped after its {limit:.0f} s; what it had found is kept"
    recorder.load()
    found = recorder.stage(name).get("wrong", 0)
    if status == "done" and found:
        status, reason = "wrong", f"{found} rows are not as they must be"
    recorder.finish(name, status, reason, time.monotonic() - started)
    if status == "done":
        log.unlink()


def run_here(name: str, plan: Plan, recorder: Recorder) -> None:
    """Run a stage in this process; rows go to the file as they come."""
    STAGES[name].run(plan, recorder.of(name))


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


if __name__ == "__main__":
    raise SystemExit(main())
