"""Score `rollcorr check --json` on the judge's logs by the answer key, and print a table per fault.

    python experiments/judge/score_logs.py --root runs/judge --answers runs/judge/answers.jsonl

Each log is checked as a user does: `rollcorr null` on correct rollouts, then `rollcorr check LOG --null FILE`. If
`rollcorr null` refuses the rollouts, the log is checked without a null. Answers are kept, so the same command goes on;
delete the file after a change of the code.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from judge_key import Key, excess_in, first_cause, read_key, wilson
from make_logs import ROOT, Log, log_paths

from rollcorr.cli import main as rollcorr

CONFIDENCE_BINS = (0.7, 0.9, 0.95, 0.99)
"""Edges of the bins of the printed confidence."""
OUTCOMES = ("right", "unknown", "false", "not judged", "healthy")


def run(*arguments: str) -> tuple[int, str]:
    """Run the `rollcorr` command in this process. Returns its exit code and what it printed."""
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["rollcorr", *arguments]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            rollcorr()
        except SystemExit as end:
            return int(end.code or 0), output.getvalue()
    return 0, output.getvalue()


def null_of(log: Log, root: Path, precision: str | None) -> tuple[Path | None, str]:
    """Return the log's null file, measured now unless it is there; None and the reason if it is refused."""
    rollouts = root / log.null
    path = rollouts.with_suffix(".json")
    if path.exists():
        return path, ""
    declared = ["--engine-precision", precision] if precision else []
    code, printed = run("null", str(rollouts), "-o", str(path), *declared)
    if code == 2 and declared:
        # A version without this option: the engine stays undeclared.
        code, printed = run("null", str(rollouts), "-o", str(path))
    return (None, printed.strip()) if code else (path, "")


def answer_of(log: Log, path: Path, root: Path, key: Key) -> dict[str, Any]:
    """Return what `check` answers for a log, shortened."""
    null, refused = null_of(log, root, key.of(log).engine_precision)
    code, printed = run("check", str(path), "--json", *(["--null", str(null)] if null else []))
    if code not in (0, 1, 3):
        return {"log": str(log.path), "verdict": "error", "findings": [], "error": printed.strip()[-300:]}
    answer = json.loads(printed[printed.index("{") :])
    kept = {name: answer[name] for name in ("verdict", "findings", "hypotheses") if name in answer}
    return {"log": str(log.path), "null_refused": refused, **kept}


def answers(root: Path, file: Path, key: Key, only: str) -> dict[str, dict[str, Any]]:
    """Return the answers for all logs that are there, by path; asks for those that `file` lacks."""
    known = {}
    if file.exists():
        known = {one["log"]: one for one in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    with file.open("a", encoding="utf-8") as lines:
        for log, path in log_paths(root):
            if str(log.path) not in known and only in str(log.path):
                known[str(log.path)] = answer_of(log, path, root, key)
                lines.write(json.dumps(known[str(log.path)]) + "\n")
                lines.flush()
    return known


def table(root: Path, found: Mapping[str, Mapping[str, Any]], key: Key) -> list[str]:
    """Return one line per kind and name: outcomes, Wilson interval, onset, place and false names."""
    rows: dict[str, list[tuple[Log, Mapping[str, Any]]]] = collections.defaultdict(list)
    for log, _path in log_paths(root):
        if str(log.path) in found:
            name = log.kind if log.kind == "healthy" else f"{log.kind}/{log.name}"
            rows[name].append((log, found[str(log.path)]))

    lines = ["| logs | " + " | ".join(OUTCOMES) + " | right, 95 % | onset | place | other first codes |"]
    lines.append("|---|" + "---|" * (len(OUTCOMES) + 4))
    for name, pairs in rows.items():
        outcomes = collections.Counter(key.judge(*pair) for pair in pairs)
        low, high = wilson(outcomes["right"], len(pairs))
        wrong = collections.Counter(
            first_cause(answer).get("code", answer["verdict"])
            for log, answer in pairs
            if key.judge(log, answer) != "right"
        )
        others = ", ".join(f"{code} {count}" for code, count in wrong.most_common(4))
        numbers = " | ".join(str(outcomes[outcome]) for outcome in OUTCOMES)
        lines.append(
            f"| {name} | {numbers} | {low:.2f}–{high:.2f} of {len(pairs)} | {onsets(pairs, key)} "
            f"| {places(pairs, root)} | {others} |"
        )
    return lines


def onsets(pairs: list[tuple[Log, Mapping[str, Any]]], key: Key) -> str:
    """Return how many first causes have the key's onset, and how many are within two steps."""
    errors = [
        abs(cause["first_step"] - onset)
        for log, answer in pairs
        if (onset := key.of(log).onset) and (cause := first_cause(answer)).get("first_step") is not None
    ]
    return f"{sum(e == 0 for e in errors)}, {sum(e <= 2 for e in errors)}" if errors else ""


def places(pairs: list[tuple[Log, Mapping[str, Any]]], root: Path) -> str:
    """Return how many printed places contain 80 % of the excess."""
    shares = [
        excess_in(place, root / log.path / "excess.npz")
        for log, answer in pairs
        if (place := first_cause(answer).get("where")) and (root / log.path / "excess.npz").exists()
    ]
    return f"{sum(share >= 0.8 for share in shares)} of {len(shares)}" if shares else ""


def confidences(root: Path, found: Mapping[str, Mapping[str, Any]], key: Key) -> list[str]:
    """Return the share of right first causes for each bin of the printed confidence; "unknown" names no cause."""
    bins: dict[int, list[bool]] = collections.defaultdict(list)
    for log, _path in log_paths(root):
        cause = first_cause(found.get(str(log.path), {"findings": []}))
        if cause.get("confidence") is not None and cause["severity"] != "note":
            outcome = key.judge(log, found[str(log.path)])
            if outcome in ("right", "false"):
                bins[sum(cause["confidence"] >= edge for edge in CONFIDENCE_BINS)].append(outcome == "right")
    lines = ["", "| confidence from | logs | right | 95 % |", "|---|---|---|---|"]
    for number, right in sorted(bins.items()):
        low, high = wilson(sum(right), len(right))
        edge = (0.0, *CONFIDENCE_BINS)[number]
        lines.append(f"| {edge:g} | {len(right)} | {sum(right) / len(right):.2f} | {low:.2f}–{high:.2f} |")
    return lines


def main() -> int:
    """Ask, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="where the logs are; defaults to runs/judge")
    parser.add_argument("--answers", type=Path, help="JSON lines; defaults to ROOT/answers.jsonl")
    parser.add_argument("--only", default="", help="ask for logs whose path contains this")
    chosen = parser.parse_args()
    key = read_key()
    found = answers(chosen.root, chosen.answers or chosen.root / "answers.jsonl", key, chosen.only)
    print("\n".join([*table(chosen.root, found, key), *confidences(chosen.root, found, key)]))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
