"""Writing rollout logs, and the index that says what each of them holds."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from rollcorr import RolloutBatch, RolloutLogWriter, SamplingSpec

INDEX = "index.csv"


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """One row of the index of a folder of logs.

    Attributes:
        path: the log, below the folder of the index.
        fault: what was wrong; "healthy" with what follows for a log without a fault.
        engine: what sampled: fp32, bf16, int8, or ctranslate2.
        temperature: of the sampling.
        null: the log to make a null from, below the folder; empty when there is none.
        rows: responses.
        tokens: their tokens.
        k3: mean of exp(d) − 1 − d over the tokens, d = log π − log μ.
        null_k3: the same of the null log; NaN without one.
        detail: what varies within the fault.
    """

    path: str
    fault: str
    engine: str
    temperature: float
    null: str
    rows: int
    tokens: int
    k3: float
    null_k3: float
    detail: str = ""


def write_log(
    path: Path,
    *,
    prompt_ids: Sequence[Sequence[int]] | None,
    response_ids: Sequence[Sequence[int]] | None,
    rollout_log_prob: Sequence[Sequence[float]],
    old_log_prob: Sequence[Sequence[float]],
    response_mask: Sequence[Sequence[bool]] | None = None,
    sampling: SamplingSpec | None = None,
    steps: Sequence[int] | None = None,
    versions: Sequence[int] | None = None,
    kept: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
) -> None:
    """Write one log with the columns that are given; one `versions` value per row covers the whole response."""
    rows: list[dict[str, object]] = []
    for row, (rollout, train) in enumerate(zip(rollout_log_prob, old_log_prob, strict=True)):
        columns: dict[str, object] = {
            "sequence_id": str(row),
            "rollout_log_prob": list(rollout),
            "old_log_prob": list(train),
            "response_mask": [True] * len(rollout) if response_mask is None else list(response_mask[row]),
        }
        if prompt_ids is not None:
            columns["prompt_ids"] = list(prompt_ids[row])
        if response_ids is not None:
            columns["response_ids"] = list(response_ids[row])
        if steps is not None:
            columns["step"] = int(steps[row])
        if versions is not None:
            columns["policy_versions"] = [{"start": 0, "length": len(rollout), "version": int(versions[row])}]
        if kept is not None:
            columns["kept_ids"], columns["kept_offsets"] = (list(part) for part in kept[row])
        if sampling is not None:
            columns |= _metadata(sampling)
        rows.append(columns)

    path.parent.mkdir(parents=True, exist_ok=True)
    with RolloutLogWriter(path, overwrite=True) as log:
        log.write(RolloutBatch.from_rows(rows))


def _metadata(sampling: SamplingSpec) -> dict[str, object]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    names = (*names, "min_new_tokens", "logprobs")
    columns: dict[str, object] = {"sampling": {name: getattr(sampling, name) for name in names} | {"logit_bias": ""}}
    return columns | {"engine": sampling.engine, "engine_version": sampling.engine_version}


def mean_k3(rollout_log_prob: Sequence[Sequence[float]], old_log_prob: Sequence[Sequence[float]]) -> float:
    """Mean of exp(d) − 1 − d over all tokens, d = log π − log μ in nats."""
    rows = zip(old_log_prob, rollout_log_prob, strict=True)
    d = torch.tensor([a - b for old, rollout in rows for a, b in zip(old, rollout, strict=True)], dtype=torch.float64)
    return float((torch.expm1(d) - d).mean())


def write_index(folder: Path, entries: Sequence[LogEntry]) -> None:
    """Write or extend the index of a folder; an entry of the same path is replaced."""
    merged = {entry.path: entry for entry in (*read_index(folder), *entries)}
    with (folder / INDEX).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(LogEntry)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(merged[path]) for path in sorted(merged))


def read_index(folder: Path) -> tuple[LogEntry, ...]:
    """The entries of a folder's index; none if there is no index yet."""
    if not (folder / INDEX).exists():
        return ()
    with (folder / INDEX).open(encoding="utf-8", newline="") as file:
        return tuple(_entry(row) for row in csv.DictReader(file))


def _entry(row: Mapping[str, str]) -> LogEntry:
    numbers = {name: float(row[name]) for name in ("temperature", "k3", "null_k3")}
    counts = {name: int(row[name]) for name in ("rows", "tokens")}
    return LogEntry(**{**row, **numbers, **counts})
