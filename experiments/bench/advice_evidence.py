"""What `rollcorr advise` decides by: the finished cells as one table, and the limits that follow from it.

    python experiments/bench/advice_evidence.py            writes advice_evidence.csv, and prints the limits
    python experiments/bench/advice_evidence.py RUN        first measures the demo's log: see demo_log.json

The demo's log is what a user has before correcting: 16 steps with the stale 4-bit sampler and no correction,
`rollcorr train experiments/demo/demo.yaml run_dir=RUN model.path=experiments/demo/policy log.rollouts=true steps=16
'rollout.engine_options={compute_type: int8, weight_bits: 4, threads: 1}' rollout.refresh_every=8`.
`src/rollcorr/diagnostics/advice/rule.py` has the limits; tests/diagnostics/test_advice.py compares them. `bench.py`
writes the table together with its page.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TABLE = HERE / "advice_evidence.csv"
DEMO_LOG = HERE / "demo_log.json"
FIRST_ROLLOUTS = HERE / "first_rollouts.csv"
FOLDERS = {"study": HERE.parent / "mismatch_in_practice" / "trained" / "cells", "bench": HERE / "cells"}
FIRST_STEPS = 16
"""Steps of 64 responses whose mean ESS and kept share a row has: what a log of the start would show."""

SEQUENCE, TOKEN, NONE = "seq_tis", "token_tis", "none"
CLEAN = "clean"

Row = dict[str, Any]


def evidence_rows(folders: Mapping[str, Path] = FOLDERS) -> list[Row]:
    """Return a row for each log without correction, and for each cell: its first steps, its start and its end."""
    rows: list[Row] = [json.loads(DEMO_LOG.read_text(encoding="utf-8")), *log_rows()]
    for source, folder in folders.items():
        for path in sorted(folder.glob("*.json")):
            cell = json.loads(path.read_text(encoding="utf-8"))
            metrics, held_out = cell["metrics"], cell["held_out"]
            rows.append(
                {
                    "source": source,
                    "sampler": cell["column"],
                    "correction": cell["correction"],
                    "seed": cell["seed"],
                    "ess": _first(metrics.get("ess", ())),
                    "mean_weight": _first(metrics.get("mean_weight", ())),
                    "kept": f"{1 - float(_first(metrics['rejected']) or 0):.4f}",
                    "t_times_kl": _first(metrics["t_times_kl"]),
                    "start": f"{held_out[0]['accuracy']:.4f}",
                    "final": f"{held_out[-1]['accuracy']:.4f}",
                }
            )
    return rows


def log_rows() -> list[Row]:
    """Return what Seq-TIS 4 would do to each log of first_rollouts.py."""
    with FIRST_ROLLOUTS.open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["name"] == "Seq-TIS 4"]
    return [
        {
            "source": "log",
            "sampler": row["sampler"],
            "correction": "none",
            "seed": row["seed"],
            "ess": f"{float(row['sequence_ess']):.4f}",
            "mean_weight": f"{float(row['mean_weight']):.4f}",
            "kept": f"{float(row['kept']):.4f}",
            "t_times_kl": f"{float(row['t_times_kl']):.4f}",
            "start": "",
            "final": "",
        }
        for row in found
    ]


def limits(rows: Sequence[Row]) -> dict[str, float]:
    """Return the limits of the rule.

    Returns:
        NEGLIGIBLE_ESS: lowest ESS of sequence weights on the clean sampler. LOWEST_ESS and LOWEST_MEAN: lowest ESS and
        mean of those that ended ahead of token weights of their seed, in training and on the log without correction
        from which that training would have begun.
        FEWEST_KEPT: largest kept share of the trainings with rejection that ended behind sequence weights of their
        seed, or of all seeds if theirs is missing. All are rounded to the safe side.
    """
    final = {_key(row): float(row["final"]) for row in rows if row["final"]}
    sequence = [row for row in rows if row["correction"] == SEQUENCE]
    ahead = [row for row in rows if row["source"] == "demo"]
    for row in sequence:
        token = final.get(_key(row, TOKEN), math.inf)
        if row["sampler"] != CLEAN and final[_key(row)] > token:
            logs = [log for log in rows if log["source"] == "log" and _key(log)[1:] == _key(row, NONE)[1:]]
            ahead += [row, *logs]
    behind = []
    for row in rows:
        rivals = [other for other in sequence if other["sampler"] == row["sampler"]]
        own = [other for other in rivals if _key(other) == _key(row, SEQUENCE)] or rivals
        if float(row["kept"]) < 1 and own and float(row["final"]) < min(float(other["final"]) for other in own):
            behind.append(float(row["kept"]))
    clean = [float(row["ess"]) for row in sequence if row["sampler"] == CLEAN]
    return {
        "NEGLIGIBLE_ESS": math.floor(min(clean, default=1.0) * 1000 - 0.5) / 1000,
        "LOWEST_ESS": math.floor(min(float(row["ess"]) for row in ahead) * 100) / 100,
        "LOWEST_MEAN": math.floor(min(float(row["mean_weight"]) for row in ahead) * 100) / 100,
        "FEWEST_KEPT": math.ceil(max(behind, default=0.0) * 100) / 100,
    }


def measure_demo_log(run: str) -> None:
    """Measure what Seq-TIS 4 would do to the log of a run, and write `DEMO_LOG`."""
    from rollcorr.diagnostics import check_logs

    result = check_logs([run], candidates=True)
    whole = next(row for row in result.candidates if row.name == "Seq-TIS 4")
    row = {
        "source": "demo",
        "sampler": "stale_quantized",
        "correction": "none",
        "seed": "0",
        "ess": f"{whole.sequence_ess:.4f}",
        "mean_weight": f"{whole.mean_weight:.4f}",
        "kept": f"{whole.kept:.4f}",
        "t_times_kl": f"{result.metrics['rollout_corr/t_times_kl']:.4f}",
        "start": "",
        "final": "",
    }
    DEMO_LOG.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def write_evidence(path: Path = TABLE) -> None:
    """Write the table."""
    rows = evidence_rows()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_evidence(path: Path = TABLE) -> list[Row]:
    """Return the rows of the table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _first(series: Sequence[float]) -> str:
    """Return the mean over the first steps; empty without one."""
    used = series[:FIRST_STEPS]
    return f"{sum(used) / len(used):.4f}" if used else ""


def _key(row: Row, correction: str = "") -> tuple[str, str, str, int]:
    return row["source"], row["sampler"], correction or row["correction"], int(row["seed"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_demo_log(sys.argv[1])
    write_evidence()
    sys.stdout.write(json.dumps(limits(read_evidence()), indent=1) + "\n")
