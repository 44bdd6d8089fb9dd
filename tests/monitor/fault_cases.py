"""A Monitor on a disk that fails for a while, and the required state of the run afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from faulty_disk import Faults, faulty_disk

from rollcorr import Monitor, RolloutSample, read_rollout_log, read_run
from rollcorr.diagnostics.report import run_report
from rollcorr.run_directory import read_metrics

STEPS = 8
ROWS = 6


def run_on(folder: Path, faults: Faults, *, group: Any = None) -> list[dict[str, float]]:
    """Steps on a disk that fails; it works again before the Monitor is closed. Returns the metrics of the steps."""
    rank = 0 if group is None else group.rank()
    found = []
    with (
        faulty_disk(folder, faults),
        Monitor(folder, "decoupled_token_is", group=group, rollouts=RolloutSample()) as monitor,
    ):
        faults.happen = True
        for step in range(1, STEPS + 1):
            generator = torch.Generator().manual_seed(100 * rank + step)
            train = -torch.rand(ROWS, step, generator=generator) - 0.1
            monitor.correct(train, train + 0.01, torch.ones(ROWS, step, dtype=torch.bool))
            found.append(monitor.step(reward=torch.full((ROWS,), float(step)), number=float(step)))
            monitor.flush()  # one attempt at this step's files and one at the failed ones
        faults.happen = False
    return found


def faults_of(folder: Path, found: list[dict[str, float]], *, ranks: int = 1, log: str = "") -> list[str]:
    """Return the faults after `run_on`."""
    wrong = []
    lines = read_metrics(folder / "metrics.jsonl")
    if [line["step"] for line in lines] != list(range(1, STEPS + 1)):
        wrong.append(f"steps {[line['step'] for line in lines]}")
    for line, metrics in zip(lines, found, strict=False):
        tokens = ROWS * line["step"] * ranks
        own = (line["number"], line["reward/mean"], line["rollout_corr/token_count"])
        if own != (line["step"], line["step"], tokens) or metrics["rollout_corr/token_count"] != tokens:
            wrong.append(f"step {line['step']} has the numbers {own}")
    if any("monitor/lost_rollout_logs" in metrics for metrics in found):
        wrong.append("a rollout log is lost")

    # The rows of every step are there.
    rows = [row["step"] for part in read_rollout_log(folder) for row in part.to_rows()]
    if (rows != sorted(rows) and ranks == 1) or {rows.count(step) for step in range(1, STEPS + 1)} != {ROWS * ranks}:
        wrong.append(f"rows {rows}")
    run = read_run(folder)
    if run.remarks:
        wrong.append(f"remarks {run.remarks}")
    run_report(run)
    if "Traceback" in log:
        wrong.append(f"a traceback: {log[-600:]}")
    with Monitor(folder, start=5) as monitor:
        monitor.step()
    if [metrics["step"] for metrics in read_run(folder).series] != [1, 2, 3, 4, 5, 6]:
        wrong.append("it does not go on after step 5")
    # Files that a rank could not delete go when that rank starts again.
    wrong += [f"{path.name} is left" for path in (folder / "rollouts").glob(".step_*")]
    return wrong
