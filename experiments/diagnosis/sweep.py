"""How often the check names a cause, by how strong it is and how many rows show it.

    python experiments/diagnosis/sweep.py RESULTS [--seeds 10] [--first-seed 0] [--causes tempered,shifted]

The faults are those of `pair_faults.py`: pairs of log-probs of a synthetic policy, of which a share of the rows is
changed. RESULTS gets sweep.csv (one row per cause, severity and share), half.csv (the share of rows at which half of
the logs are named) and sweep.png.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from expected import CLASSES, NOT_A_CAUSE, class_of
from log_files import write_log
from pair_faults import EXPECTED, SWEEP, Pairs, healthy_pairs, inject
from score import judge, wilson

SHARES = (1.0, 0.5, 0.25, 0.1)
ROWS, LENGTH = 24, 128


def named(pairs: Pairs, scratch: Path) -> str:
    """The cause that a check of these pairs puts first; empty if it names none."""
    ends = pairs.cu_seqlens.tolist()
    rows = [slice(first, last) for first, last in pairwise(ends)]
    path = scratch / "pairs.parquet"
    write_log(
        path,
        prompt_ids=None,
        response_ids=None,
        rollout_log_prob=[pairs.rollout[row].tolist() for row in rows],
        old_log_prob=[pairs.train[row].tolist() for row in rows],
        response_mask=[pairs.mask[row].bool().tolist() for row in rows],
    )
    judged = judge(path)
    return "" if not judged.named or class_of(judged.first) in NOT_A_CAUSE else judged.first


def sweep(causes: Iterable[str], *, seeds: int, first_seed: int = 0) -> list[dict[str, object]]:
    """One row per cause, severity and share: how many of the seeds were named rightly, wrongly and not at all."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for cause in causes:
            accepted = accepted_codes(cause)
            for severity in SWEEP[cause]:
                for share in SHARES:
                    found = []
                    for seed in range(first_seed, first_seed + seeds):
                        healthy = healthy_pairs(rows=ROWS, length=LENGTH, seed=seed)
                        broken = inject(cause, healthy, severity=severity, share=share, seed=seed)
                        found.append(named(broken, Path(folder)))
                    right = sum(code in accepted for code in found)
                    wrong = sorted(code for code in found if code and code not in accepted)
                    low, high = wilson(right, seeds)
                    rows.append(
                        {
                            "cause": cause,
                            "severity": severity,
                            "share": share,
                            "seeds": seeds,
                            "right": right,
                            "low": round(low, 3),
                            "high": round(high, 3),
                            "wrong": len(wrong),
                            "wrong_codes": " ".join(wrong),
                        }
                    )
    return rows


def accepted_codes(cause: str) -> frozenset[str]:
    """The codes that are right for a cause: those that its author expects, and others of their classes."""
    classes = {class_of(code) for code in EXPECTED[cause]}
    return EXPECTED[cause].union(*(CLASSES.get(name, frozenset()) for name in classes))


def half_points(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Per cause and severity the share of rows at which half of the logs are named, between two shares by its log.

    It is empty where half is not reached, and the smallest share of the sweep where that one is still named.
    """
    points: list[dict[str, object]] = []
    for cause, severity in dict.fromkeys((row["cause"], row["severity"]) for row in rows):
        curve = [row for row in rows if (row["cause"], row["severity"]) == (cause, severity)]
        rates = {float(str(row["share"])): int(str(row["right"])) / int(str(row["seeds"])) for row in curve}
        points.append({"cause": cause, "severity": severity, "half_at_share": _crossing(rates)})
    return points


def _crossing(rates: Mapping[float, float]) -> float | str:
    shares = sorted(rates, reverse=True)
    if rates[shares[0]] < 0.5:
        return ""
    for above, below in pairwise(shares):
        if rates[below] < 0.5:
            part = (rates[above] - 0.5) / (rates[above] - rates[below])
            return round(math.exp(math.log(above) + part * (math.log(below) - math.log(above))), 3)
    return shares[-1]


def draw(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """One panel per cause: the naming rate over the share of rows, a line per severity."""
    from matplotlib.figure import Figure

    causes = list(dict.fromkeys(str(row["cause"]) for row in rows))
    columns = 4
    height = math.ceil(len(causes) / columns)
    figure = Figure(figsize=(3.1 * columns, 2.3 * height), layout="constrained")
    panels = list(figure.subplots(height, columns, squeeze=False, sharex=True, sharey=True).flat)
    for panel, cause in zip(panels, causes, strict=False):
        of_cause = [row for row in rows if row["cause"] == cause]
        for severity in dict.fromkeys(row["severity"] for row in of_cause):
            curve = [row for row in of_cause if row["severity"] == severity]
            panel.plot(
                [float(str(row["share"])) for row in curve],
                [int(str(row["right"])) / int(str(row["seeds"])) for row in curve],
                marker="o",
                markersize=3,
                label=str(severity),
            )
        panel.set_title(cause, fontsize=9)
        panel.set_xscale("log")
        panel.legend(fontsize=6)
    for panel in panels[len(causes) :]:
        panel.set_visible(False)
    figure.supxlabel("share of the rows that show it")
    figure.supylabel("share of the logs in which it is named first")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Sweep the causes that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--causes", default=",".join(SWEEP), help="separated by commas")
    options = parser.parse_args()

    started = time.perf_counter()
    rows = sweep(options.causes.split(","), seeds=options.seeds, first_seed=options.first_seed)
    options.results.mkdir(parents=True, exist_ok=True)
    for name, table in (("sweep.csv", rows), ("half.csv", half_points(rows))):
        with (options.results / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
    draw(rows, options.results / "sweep.png")

    logs = len(rows) * options.seeds
    wrong = sum(int(str(row["wrong"])) for row in rows)
    low, high = wilson(wrong, logs)
    sys.stdout.write(f"{logs} logs, {wrong} wrong names: {wrong / logs:.2%} ({low:.2%} to {high:.2%})\n")
    sys.stdout.write(f"{time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
