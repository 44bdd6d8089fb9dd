"""Keep the first rows of the outside faults of one seed and of their null in one small file, for `make test`.

    python experiments/judge/compact_logs.py --root runs/judge

`tests/experiments/test_judge_answers.py` checks them as a user does, and compares the answers with the key.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from make_logs import ROOT, log_paths

from rollcorr import RolloutBatch, RolloutLogWriter, read_rollout_log

FILE = Path(__file__).with_name("outside_logs.npz")
ROWS, TOKENS = 192, 2400
"""Most rows and tokens of a log that are kept."""
COLUMNS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_prob", "old_log_prob")
TYPES = (np.uint16, np.uint16, np.bool_, np.float32, np.float32)


def first_rows(path: Path, rows: int, tokens: int) -> dict[str, np.ndarray]:
    """Return the columns of a log's first rows, packed, with the lengths of prompts and responses."""
    kept: list[Any] = []
    for batch in read_rollout_log(path):
        kept += [row for row in batch.records.to_pylist() if len(row["response_ids"])]
    ends = np.cumsum([len(row["response_ids"]) for row in kept])
    kept = kept[: min(rows, int((ends <= tokens).sum()))]
    packed = {name: np.concatenate([row[name] for row in kept]) for name in COLUMNS}
    columns = {name: packed[name].astype(kind) for name, kind in zip(COLUMNS, TYPES, strict=True)}
    for name in ("prompt_ids", "response_ids"):
        columns[f"{name}_lengths"] = np.array([len(row[name]) for row in kept], dtype=np.uint8)
    columns["step"] = np.array([row["step"] for row in kept], dtype=np.uint8)
    return columns


def write_logs(folder: Path, file: Path = FILE) -> Iterator[tuple[str, Path]]:
    """Write each log of the file as Parquet. Yields its name, "null" first, and its path."""
    stored = np.load(file)
    for name in dict.fromkeys(key.rsplit("/", 1)[0] for key in stored.files):
        column = {key.rsplit("/", 1)[1]: stored[key] for key in stored.files if key.startswith(f"{name}/")}
        ends = {one: np.cumsum(column[f"{one}_lengths"], dtype=np.int64)[:-1] for one in ("prompt_ids", "response_ids")}
        rows: list[dict[str, Any]] = [{"step": int(step)} for step in column["step"]]
        for one in COLUMNS:
            parts = np.split(column[one], ends["prompt_ids" if one == "prompt_ids" else "response_ids"])
            for row, part in zip(rows, parts, strict=True):
                row[one] = part.tolist()
        path = folder / f"{name}.parquet"
        with RolloutLogWriter(path) as log:
            log.write(RolloutBatch.from_rows(rows))
        yield name, path


def main() -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="where the logs are; defaults to runs/judge")
    root = parser.parse_args().root
    columns = {f"null/{name}": x for name, x in first_rows(root / "nulls/stories260K-0.parquet", 1024, 12_000).items()}
    for log, path in log_paths(root):
        # The recorded settings tell raw log-probs, and they are not kept.
        if (log.kind, log.seed) == ("outside", 0) and log.name != "raw_penalty":
            columns |= {f"{log.name}/{name}": x for name, x in first_rows(path, ROWS, TOKENS).items()}
    np.savez_compressed(FILE, **columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
