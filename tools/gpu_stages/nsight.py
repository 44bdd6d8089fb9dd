"""Stage 6: hardware counters of the three launches, where Nsight Compute is there.

python -m gpu_stages.nsight     what is profiled: one correction of 8 M tokens
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_stages import Plan
from gpu_stages.recorder import Rows

TOOLS = Path(__file__).resolve().parents[1]
KERNELS = "read_tokens|decide_sequences|finish"
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed.sum",
    "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)


def run(plan: Plan, rows: Rows) -> None:
    """One row for each kernel, with its counters; clocks are left alone."""
    if plan.device == "cpu" or shutil.which("ncu") is None:
        rows.add("counters", not_run="Nsight Compute (ncu) is not here" if plan.device != "cpu" else "no GPU")
        return
    rows.attempt("counters", lambda: _counters(plan), required=False)


def _counters(plan: Plan) -> dict[str, object]:
    command = ["ncu", "--clock-control", "none", "--csv", "--kernel-name", f"regex:{KERNELS}", "--launch-skip", "3"]
    command += ["--launch-count", "3", "--metrics", ",".join(METRICS), sys.executable, "-m", "gpu_stages.nsight"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=50)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise RuntimeError(f"ncu reported nothing: {(done.stderr or done.stdout).strip()[-200:]}")
    kernels: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines):
        if row.get("Metric Name"):
            kernels.setdefault(row["Kernel Name"], {})[row["Metric Name"]] = (
                f"{row['Metric Value']} {row['Metric Unit']}"
            )
    return {"kernels": kernels, "quick": plan.quick}


def profiled() -> None:
    """Two corrections: the first compiles."""
    import torch

    from gpu_stages.batches import STANDARD, make_batch
    from rollcorr import correct

    batch = make_batch(1 << 23, "dense", "cuda")
    for _ in range(2):
        correct(batch.train, batch.rollout, batch.mask, impl="triton", **STANDARD)
    torch.cuda.synchronize()


if __name__ == "__main__":
    profiled()
