"""Keep some rows of the judge's logs and of their nulls in three small files, for `make test`.

    python experiments/judge/compact_logs.py --root runs/judge

An outside fault keeps its first rows, a loop the first rows of each step. `tests/experiments/test_judge_answers.py`
checks them as a user does, and compares the answers with the key.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from make_logs import ROOT, Log, log_paths

from rollcorr import RolloutBatch, RolloutLogWriter, read_rollout_log

OUTSIDE_FILE = Path(__file__).with_name("outside_logs.npz")
LOOPS_FILE = Path(__file__).with_name("loop_logs.npz")
HEALTHY_FILE = Path(__file__).with_name("healthy_logs.npz")
HEALTHY = ("looping-0", "0.05-bf16-0", "0.3-bf16-0", "0.3-fp16-1", "0.6-bf16-1")
"""Healthy logs in which a few contexts recur."""
ROWS, TOKENS = 192, 2400
"""Most rows and tokens of an outside log that are kept."""
LOOP_TOKENS = 12_000
"""About how many tokens of a loop are kept."""
NULL_ROWS, NULL_TOKENS = 1024, 12_000
"""Most rows and tokens of a null that are kept."""
GROUP = 8
"""Rows of a loop are kept in whole groups, which share a prompt."""
COLUMNS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_prob", "old_log_prob")
TYPES = (np.uint16, np.uint16, np.bool_, np.float32, np.float32)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log that have a response."""
    rows = itertools.chain.from_iterable(batch.records.to_pylist() for batch in read_rollout_log(path))
    return [row for row in rows if len(row["response_ids"])]


def first_rows(path: Path, rows: int, tokens: int) -> list[dict[str, Any]]:
    """Return the first rows of a log: at most `rows` with at most `tokens`."""
    kept = rows_of(path)
    ends = np.cumsum([len(row["response_ids"]) for row in kept])
    return kept[: min(rows, int((ends <= tokens).sum()))]


def rows_of_steps(path: Path, tokens: int) -> list[dict[str, Any]]:
    """Return the first groups of each step of a log, of about `tokens` tokens in all."""
    rows = rows_of(path)
    of_step = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["step"])]
    share = tokens / sum(len(row["response_ids"]) for row in rows)
    return [row for group in of_step for row in group[: max(GROUP, round(share * len(group) / GROUP) * GROUP)]]


def packed(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the columns of rows, packed, with the lengths of prompts and responses and the recorded settings."""
    columns = {
        name: np.concatenate([row[name] for row in rows]).astype(kind)
        for name, kind in zip(COLUMNS, TYPES, strict=True)
    }
    for name in ("prompt_ids", "response_ids"):
        columns[f"{name}_lengths"] = np.array([len(row[name]) for row in rows], dtype=np.uint8)
    columns["step"] = np.array([row["step"] for row in rows], dtype=np.uint8)
    return columns


def settings_of(rows: list[dict[str, Any]]) -> np.ndarray:
    """Return the sampling settings of a log as JSON; all rows share them."""
    settings = {json.dumps(row["sampling"]) for row in rows}
    assert len(settings) == 1, f"rows of {len(settings)} settings"
    return np.array(settings.pop())


def write_logs(folder: Path, file: Path = OUTSIDE_FILE) -> Iterator[tuple[str, Path]]:
    """Write each log of a file as Parquet. Yields its name, nulls before the logs that need them, and its path."""
    stored = np.load(file)
    for name in dict.fromkeys(key.rsplit("/", 1)[0] for key in stored.files):
        column = {key.rsplit("/", 1)[1]: stored[key] for key in stored.files if key.rsplit("/", 1)[0] == name}
        ends = {one: np.cumsum(column[f"{one}_lengths"], dtype=np.int64)[:-1] for one in ("prompt_ids", "response_ids")}
        rows: list[dict[str, Any]] = [{"step": int(step)} for step in column["step"]]
        for one in COLUMNS:
            parts = np.split(column[one], ends["prompt_ids" if one == "prompt_ids" else "response_ids"])
            for row, part in zip(rows, parts, strict=True):
                row[one] = part.tolist()
        if "sampling" in column:
            sampling = json.loads(str(column["sampling"]))
            rows = [{**row, "sampling": sampling} for row in rows]
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        with RolloutLogWriter(path) as log:
            log.write(RolloutBatch.from_rows(rows))
        yield name, path


def compact_outside(root: Path) -> dict[str, np.ndarray]:
    """Return the columns of the outside logs of seed 0 and of their null."""
    null = packed(first_rows(root / "nulls/stories260K-0.parquet", NULL_ROWS, NULL_TOKENS))
    columns = {f"null/{name}": x for name, x in null.items()}
    for log, path in log_paths(root):
        # The recorded settings tell raw log-probs, and they are not kept.
        if (log.kind, log.seed) == ("outside", 0) and log.name != "raw_penalty":
            columns |= {f"{log.name}/{name}": x for name, x in packed(first_rows(path, ROWS, TOKENS)).items()}
    return columns


def compact_loops(root: Path) -> dict[str, np.ndarray]:
    """Return the columns of all loops that are there, by the log's path, and of their nulls."""
    return _with_nulls(root, [(log, path) for log, path in log_paths(root) if log.kind == "loops"])


def compact_healthy(root: Path) -> dict[str, np.ndarray]:
    """Return the columns of the logs `HEALTHY` and of their nulls."""
    wanted = {Path("healthy") / name for name in HEALTHY}
    return _with_nulls(root, [(log, path) for log, path in log_paths(root) if log.path in wanted])


def _with_nulls(root: Path, logs: list[tuple[Log, Path]]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    for log, path in logs:
        null = log.null.with_suffix("").as_posix()
        if f"{null}/step" not in columns:
            rows = first_rows(root / log.null, NULL_ROWS, NULL_TOKENS)
            columns |= {f"{null}/{name}": x for name, x in {**packed(rows), "sampling": settings_of(rows)}.items()}
        rows = rows_of_steps(path, LOOP_TOKENS)
        columns |= {f"{log.path.as_posix()}/{name}": x for name, x in packed(rows).items()}
        columns[f"{log.path.as_posix()}/sampling"] = settings_of(rows)
    return columns


def log_of(name: str) -> Log:
    """Return the log of a name in the file of loops or of healthy logs."""
    kind, *task, of_seed = name.split("/")
    fault, seed = of_seed.rsplit("-", 1)
    return Log(kind, fault, int(seed), *task)


def main() -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="where the logs are; defaults to runs/judge")
    parser.add_argument(
        "--only", choices=["outside", "loops", "healthy"], help="write one of the files; defaults to all"
    )
    chosen = parser.parse_args()
    for kind, file, compact in (
        ("outside", OUTSIDE_FILE, compact_outside),
        ("loops", LOOPS_FILE, compact_loops),
        ("healthy", HEALTHY_FILE, compact_healthy),
    ):
        if chosen.only in (None, kind):
            np.savez_compressed(file, **compact(chosen.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
