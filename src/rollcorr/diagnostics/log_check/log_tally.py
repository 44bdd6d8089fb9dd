"""One pass over a log, which `rollcorr check` and `rollcorr null` share: the column that π is in, and the tally."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.diagnostics.log_check.shard_readers import read_shards
from rollcorr.diagnostics.log_check.tally import COLUMNS, KEPT_COLUMNS, Measurement, Tally
from rollcorr.rollout_log import FileLimits, RolloutBatch, Shard, log_shards, missing_column, read_shard
from rollcorr.run_directory.stored_run import BadInputError


@dataclass(frozen=True, eq=False, kw_only=True)
class LogTally:
    """What a pass over a log gave.

    Attributes:
        tally: what was seen.
        total: rows of the log; more than were read after an interrupt.
        train_column: the column that π was taken from.
        kept: the log has kept sets.
    """

    tally: Tally
    total: int
    train_column: str
    kept: bool


def read_log(
    paths: Sequence[str | Path],
    config: RolloutCorrectionConfig,
    *,
    train_column: str | None = None,
    null_steps: tuple[int, int] | None = None,
    batch_size: int = 256,
    workers: int = 1,
    ray: str | None = None,
    file_limits: FileLimits | None = None,
    column_names: Mapping[str, str] | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> LogTally:
    """Read a log once. Arguments and errors are those of `check_logs`."""
    if train_column not in (None, "old_log_prob", "log_prob"):
        raise BadInputError(f"the training side is old_log_prob or log_prob, not {train_column!r}")
    if workers < 1 or (workers > 1 and ray is not None):
        beside = " with a Ray cluster" if ray is not None else ""
        raise BadInputError(f"workers={workers}{beside}; give 1 or more, or the cluster")

    # A check counts what is missing and goes on.
    if config.nonfinite == "raise":
        config = replace(config, nonfinite="reject_token")

    shards = log_shards([str(path) for path in paths], file_limits=file_limits, column_names=column_names)
    total, tally = sum(shard.rows for shard in shards), Tally()
    column, kept = train_column or "", False
    try:
        head = _first_batch(shards, batch_size)
        if head is not None:
            column = column or _train_column(head, config, shards[0])
            _check_recorded(head, column, shards[0])
        kept = head is not None and head.has("kept_offsets")
        measurement = Measurement(
            config=config, train_column=column, batch_size=batch_size, kept=kept, null_steps=null_steps
        )
        told = (lambda rows: None) if on_rows is None else (lambda rows: on_rows(rows, total))
        for part in read_shards(measurement, shards, told, workers=workers, ray=ray):
            tally = tally.merge(part)
    except KeyboardInterrupt:
        tally = replace(tally, interrupted=True)
    if not tally.parts:
        seen = "nothing was read before the interrupt" if tally.interrupted else "there is no row"
        raise BadInputError(f"{', '.join(map(str, paths))}: {seen}; give a log with at least one sequence")
    return LogTally(tally=tally, total=total, train_column=column, kept=kept)


def _first_batch(shards: Sequence[Shard], batch_size: int) -> RolloutBatch | None:
    """The first batch of a log. The reader ends here, so that no part of the file stays in memory."""
    if not shards:
        return None
    return next(read_shard(shards[0], columns=COLUMNS + KEPT_COLUMNS, batch_size=batch_size), None)


def _train_column(batch: RolloutBatch, config: RolloutCorrectionConfig, shard: Shard) -> str:
    """The column that π is taken from in the whole log, from what its first batch records."""
    order = ("log_prob", "old_log_prob") if config.bypass_mode else ("old_log_prob", "log_prob")
    found = next((name for name in order if batch.has(name)), None)
    if found is None:
        raise BadInputError(str(missing_column(order, batch, shard.source, so=", so there is no training side")))
    return found


def _check_recorded(batch: RolloutBatch, train_column: str, shard: Shard) -> None:
    """Both sides must be in the first batch: the rest of a log that lacks one need not be read."""
    for column in ("rollout_log_prob", train_column):
        if not batch.has(column):
            raise BadInputError(str(missing_column([column], batch, shard.source)))
