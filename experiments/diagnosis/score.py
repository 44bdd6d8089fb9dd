"""Score the check on logs whose fault is known: what it names first, what it calls healthy, and when it notices.

    python experiments/diagnosis/score.py RESULTS [--live DIR] [--healthy DIR] [--series DIR] [--threads DIR]

Each folder is what the script of that lane wrote. RESULTS gets one CSV per lane and a figure. Shares come with Wilson's
95 % interval.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from expected import FAULTS, NOT_A_CAUSE, class_of, names, right_alone
from log_files import LogEntry, read_index
from series_faults import STEPS, SeriesEntry, read_series
from threads import THREADS

from rollcorr.diagnostics import check_logs, null_of_logs
from rollcorr.rollout_log import read_rollout_log

NULL_STEPS = (0, 4)
"""Steps of a series that serve as its null."""

DELAYS = (0, 3, 6, 10)
"""Steps after k3 has reached five times its start at which a series is checked."""

ONSET_TOLERANCE = 3

CONFIDENCE_BINS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 1.01)
"""Edges of the bins in which the printed confidence is compared with the share of right answers."""

ID_EXPLAINS = 0.2
"""Share of Var(d) that the token id explains, from which on the weights must be named without a null."""


@dataclass(frozen=True)
class Judged:
    """What one check said.

    Attributes:
        verdict: healthy, unhealthy or not judged.
        named: codes of the hypotheses, most likely first.
        cause: code of the first hypothesis that names something wrong and warns; empty when none does.
        warnings: codes of the findings that warn.
        onsets: first steps that the warnings give.
        id_share: share of Var(d) that the token id explains; NaN without ids.
        confidence: of the first cause; NaN without one.
    """

    verdict: str
    named: tuple[str, ...]
    cause: str
    warnings: tuple[str, ...]
    onsets: tuple[int, ...]
    id_share: float
    confidence: float

    @property
    def first(self) -> str:
        """The first hypothesis; empty without any."""
        return self.named[0] if self.named else ""


def judge(path: Path, *, null: Any = None, null_steps: tuple[int, int] | None = None) -> Judged:  # noqa: ANN401
    """Run the check as `rollcorr check [--null] [--null-steps]` does: the one place that knows its interface."""
    result = check_logs([path], null=null, null_steps=null_steps)
    warned = result.causes
    return Judged(
        result.health.verdict,
        tuple(finding.code for finding in result.hypotheses),
        next((finding.code for finding in warned if class_of(finding.code) not in NOT_A_CAUSE), ""),
        tuple(finding.code for finding in result.health.warnings),
        tuple(finding.first_step for finding in result.health.warnings if finding.first_step is not None),
        result.metrics.get("log/token_id_share", math.nan),
        next((cause.confidence for cause in warned if cause.confidence is not None), math.nan),
    )


class Nulls:
    """The nulls of a folder's logs, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, dict[str, Any]()

    def of(self, entry: LogEntry) -> Any:  # noqa: ANN401
        """The null of a log's engine."""
        if entry.null not in self._made:
            self._made[entry.null] = null_of_logs([self._folder / entry.null])
        return self._made[entry.null]


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    z, share = 1.959964, hits / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return max(0.0, middle - half), min(1.0, middle + half)


def score_live(folder: Path, results: Path) -> list[dict[str, object]]:
    """Faults made live: per log what came first, with and without a null; returns one row per fault."""
    nulls, logs = Nulls(folder), []
    for entry in read_index(folder):
        if entry.fault == "null":
            continue
        with_null, alone = judge(folder / entry.path, null=nulls.of(entry)), judge(folder / entry.path)
        logs.append(
            {
                "path": entry.path,
                "fault": entry.fault,
                "engine": entry.engine,
                "temperature": entry.temperature,
                "k3": entry.k3,
                "k3_of_null": entry.null_k3,
                "verdict": with_null.verdict,
                "first": with_null.first,
                "named": " ".join(with_null.named),
                "right": _right(entry.fault, with_null),
                "confidence": round(with_null.confidence, 4),
                "verdict_without_null": alone.verdict,
                "first_without_null": alone.first,
                "id_share": round(alone.id_share, 3),
                "right_without_null": _right_alone(entry.fault, alone),
                "detail": entry.detail,
            }
        )
    _write(results / "live_logs.csv", logs)
    _write(results / "confidence.csv", calibration(logs))

    faults = []
    for fault in dict.fromkeys(log["fault"] for log in logs):
        of_fault = [log for log in logs if log["fault"] == fault]
        large = [log for log in of_fault if log["k3"] >= 3 * log["k3_of_null"]]
        right = sum(bool(log["right"]) for log in of_fault)
        low, high = wilson(right, len(of_fault))
        faults.append(
            {
                "fault": fault,
                "logs": len(of_fault),
                "right_first": right,
                "low": round(low, 3),
                "high": round(high, 3),
                "k3_above_3_nulls": len(large),
                "right_first_of_these": sum(bool(log["right"]) for log in large),
                "called_healthy_of_these": sum(log["verdict"] == "healthy" for log in large),
                "called_healthy_without_null": sum(log["verdict_without_null"] == "healthy" for log in of_fault),
                "first": _counted(log["first"] for log in of_fault),
                "first_without_null": _counted(log["first_without_null"] for log in of_fault),
            }
            | _alone(of_fault)
        )
    _write(results / "live.csv", faults)
    whole = _alone([log for log in logs if log["fault"] in FAULTS])
    sys.stdout.write(f"\nall faults without a null: {'  '.join(f'{name} {count}' for name, count in whole.items())}\n")
    return faults


def calibration(logs: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """For each bin of the printed confidence, the share of logs whose first cause is right, and Wilson's interval."""
    bins = []
    for low, high in pairwise(CONFIDENCE_BINS):
        of_bin = [log for log in logs if log["fault"] in FAULTS and low <= log["confidence"] < high]
        right, mean = sum(bool(log["right"]) for log in of_bin), math.nan
        if of_bin:
            mean = sum(log["confidence"] for log in of_bin) / len(of_bin)
        least, most = wilson(right, len(of_bin))
        bins.append(
            {
                "from": low,
                "below": high,
                "logs": len(of_bin),
                "printed": round(mean, 3),
                "right": right,
                "low": round(least, 3),
                "high": round(most, 3),
                "calibrated": least <= mean <= most,
            }
        )
    return bins


def _alone(logs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Logs that are right without a null, of those that the token id explains, and of the others."""
    counted = {}
    for name, explained in (("id_explains", True), ("others", False)):
        right = [bool(log["right_without_null"]) for log in logs if (log["id_share"] >= ID_EXPLAINS) is explained]
        counted[f"right_without_null_{name}"] = f"{sum(right)}/{len(right)}"
    return counted


def _right_alone(fault: str, alone: Judged) -> bool:
    """As `_right`, for a check without a null, which never says healthy."""
    if fault in FAULTS:
        return right_alone(fault, alone.first, id_explains=alone.id_share >= ID_EXPLAINS)
    return not alone.cause


def _right(fault: str, judged: Judged) -> bool:
    """A fault is right when its class comes first; a control when nothing is named and the verdict is healthy."""
    if fault in FAULTS:
        return names(fault, judged.first)
    return judged.verdict == "healthy" and not judged.cause


def score_healthy(folder: Path, results: Path) -> list[dict[str, object]]:
    """Logs without a fault: warnings and named causes, with a null of the same engine and without one."""
    nulls, logs = Nulls(folder), []
    for entry in read_index(folder):
        if entry.fault != "healthy":
            continue
        for against, null in (("null", nulls.of(entry)), ("nothing", None)):
            judged = judge(folder / entry.path, null=null)
            logs.append(
                {
                    "path": entry.path,
                    "against": against,
                    "rows": entry.rows,
                    "tokens": entry.tokens,
                    "detail": entry.detail,
                    "verdict": judged.verdict,
                    "warnings": " ".join(judged.warnings),
                    "cause": judged.cause,
                }
            )
    _write(results / "healthy_logs.csv", logs)

    rates = []
    for against in ("null", "nothing"):
        judged_logs = [log for log in logs if log["against"] == against]
        for what in ("warnings", "cause"):
            hits = sum(bool(log[what]) for log in judged_logs)
            low, high = wilson(hits, len(judged_logs))
            rates.append(
                {
                    "against": against,
                    "what": what,
                    "hits": hits,
                    "logs": len(judged_logs),
                    "share": round(hits / max(1, len(judged_logs)), 4),
                    "low": round(low, 4),
                    "high": round(high, 4),
                    "codes": _counted(code for log in judged_logs for code in str(log[what]).split()),
                }
            )
    _write(results / "healthy.csv", rates)
    return rates


def score_series(folder: Path, results: Path) -> list[dict[str, object]]:
    """Series: how late a fault is noticed, whether its onset is right, and how often a sound series alarms."""
    found = []
    for entry in read_series(folder):
        row: dict[str, object] = {
            "path": entry.path,
            "kind": entry.kind,
            "onset": entry.onset,
            "fivefold": entry.fivefold,
        }
        judged, delay = _noticed(folder, entry)
        codes = " ".join(judged.warnings)
        found.append(row | {"delay": delay, "onset_found": _nearest(judged.onsets, entry.onset), "warnings": codes})
    _write(results / "series_logs.csv", found)

    kinds = []
    for kind in dict.fromkeys(row["kind"] for row in found):
        of_kind = [row for row in found if row["kind"] == kind]
        noticed = [row for row in of_kind if row["delay"] is not None]
        onsets = [row for row in noticed if row["onset_found"] is not None]
        right = [row for row in onsets if abs(int(row["onset_found"]) - int(row["onset"])) <= ONSET_TOLERANCE]
        kinds.append(
            {
                "kind": kind,
                "series": len(of_kind),
                "noticed": len(noticed),
                "delays": _counted(str(row["delay"]) for row in noticed),
                "onset_right": len(right),
                "warnings": _counted(code for row in of_kind for code in str(row["warnings"]).split()),
            }
        )
    _write(results / "series.csv", kinds)
    return kinds


def _noticed(folder: Path, entry: SeriesEntry) -> tuple[Judged, int | None]:
    """The check at the last of `DELAYS`, and the first delay at which one warns; None if none does.

    A sound series is checked over all its steps, with delay 0 if that warns.
    """
    if entry.kind == "healthy":
        judged = judge(folder / entry.path, null_steps=NULL_STEPS)
        return judged, 0 if judged.warnings else None

    *earlier, latest = DELAYS
    judged = _judged_until(folder, entry, latest)
    if not judged.warnings:
        return judged, None
    return judged, next((delay for delay in earlier if _judged_until(folder, entry, delay).warnings), latest)


def _judged_until(folder: Path, entry: SeriesEntry, delay: int) -> Judged:
    """What a check says some steps after k3 has become five times that of the start."""
    last = min(STEPS - 1, entry.fivefold + delay)
    with tempfile.TemporaryDirectory() as scratch:
        return judge(_until(folder / entry.path, last, Path(scratch)), null_steps=NULL_STEPS)


def _until(path: Path, last: int, scratch: Path) -> Path:
    """The log with its steps up to `last` only."""
    from rollcorr import RolloutBatch, RolloutLogWriter

    shortened = scratch / "series.parquet"
    with RolloutLogWriter(shortened) as log:
        for batch in read_rollout_log([path]):
            rows = [row for row in batch.to_rows() if row["step"] <= last]
            if rows:
                log.write(RolloutBatch.from_rows(rows))
    return shortened


def _nearest(onsets: Sequence[int], onset: int) -> int | None:
    return min(onsets, key=lambda step: abs(step - onset)) if onsets else None


def score_threads(folder: Path, results: Path) -> list[dict[str, object]]:
    """Public threads: whether the first hypothesis is what the thread found."""
    rows = []
    for thread in THREADS:
        judged = judge(folder / f"{thread.name}.parquet", null_steps=thread.null_steps)
        right = names(thread.cause, judged.first) and (thread.cause == "noise") == (not judged.cause)
        row = {"thread": f"{thread.repository}#{thread.number}", "cause": thread.cause, "first": judged.first}
        rows.append(
            row
            | {
                "written_late": thread.written_late,
                "right": right,
                "verdict": judged.verdict,
                "named": " ".join(judged.named),
            }
        )
    _write(results / "threads.csv", rows)
    return rows


def draw(faults: Sequence[Mapping[str, object]], path: Path) -> None:
    """The confusion of faults and first hypotheses, as a figure."""
    from matplotlib.figure import Figure

    counts = {str(row["fault"]): _uncounted(str(row["first"])) for row in faults}
    classes = sorted({class_of(code) for found in counts.values() for code in found})
    figure = Figure(figsize=(1.6 + 0.8 * len(classes), 1.2 + 0.34 * len(counts)), layout="constrained")
    axes = figure.subplots()
    table = [
        [sum(n for code, n in row.items() if class_of(code) == name) for name in classes] for row in counts.values()
    ]
    axes.imshow(table, cmap="Blues", aspect="auto")
    for at, row in enumerate(table):
        for column, count in enumerate(row):
            if count:
                axes.text(column, at, str(count), ha="center", va="center", color="black" if count < 6 else "white")
    axes.set_xticks(range(len(classes)), classes, rotation=40, ha="right")
    axes.set_yticks(range(len(counts)), list(counts))
    axes.set_title("What comes first, by fault (with a null)")
    figure.savefig(path, dpi=120)


def _counted(codes: Iterable[object]) -> str:
    return " ".join(f"{code or '-'}:{count}" for code, count in Counter(map(str, codes)).most_common())


def _uncounted(text: str) -> dict[str, int]:
    return {code: int(count) for code, count in (part.rsplit(":", 1) for part in text.split())}


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Score the lanes that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    for lane in ("live", "healthy", "series", "threads"):
        parser.add_argument(f"--{lane}", type=Path, help=f"logs of {lane}")
    options = parser.parse_args()

    lanes = {"live": score_live, "healthy": score_healthy, "series": score_series, "threads": score_threads}
    for lane, scored in lanes.items():
        folder = getattr(options, lane)
        if folder is None:
            continue
        started = time.perf_counter()
        rows = scored(folder, options.results)
        if lane == "live":
            draw(rows, options.results / "confusion.png")
        sys.stdout.write(f"\n{lane}, {time.perf_counter() - started:.0f} s\n")
        for row in rows:
            sys.stdout.write("  ".join(f"{name} {value}" for name, value in row.items()) + "\n")


if __name__ == "__main__":
    main()
