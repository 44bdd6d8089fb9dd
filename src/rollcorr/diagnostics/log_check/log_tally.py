"""One pass over a log, which `rollcorr check` and `rollcorr null` share: the column that π is in, and the tally."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.checks import in_one_line
from rollcorr.config.finding import Finding
from rollcorr.diagnostics.log_check.denoising import DENOISING_COLUMNS, has_exact_kl, timestep_values
from rollcorr.diagnostics.log_check.shard_readers import read_shards
from rollcorr.diagnostics.log_check.tally import COLUMNS, KEPT_COLUMNS, Measurement, Tally
from rollcorr.rollout_log import FileLimits, RolloutBatch, RolloutLogError, Shard, log_shards, read_shard
from rollcorr.rollout_log.frameworks import missing_column
from rollcorr.rollout_log.reader import Paths, log_files, path_texts
from rollcorr.run_directory.stored_run import BadInputError


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch: on batches of this size a second one costs four times the CPU and no less time.

    Several readers are several processes; the caller's number of threads is restored.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False, kw_only=True)
class LogTally:
    """What a pass over a log gave.

    Attributes:
        tally: what was seen.
        measurement: how.
        total: rows of the log; more than were read after an interrupt.
        unreadable: what could not be read, a sentence for each file.
        before: the files with rows, in the order of the log, each with the rows of the log before it.
    """

    tally: Tally
    measurement: Measurement
    total: int
    unreadable: tuple[str, ...] = ()
    before: tuple[tuple[int, str], ...] = ()

    def in_its_file(self, finding: Finding) -> Finding:
        """A finding whose first row is counted in the log, with that row's file, counted there."""
        if finding.first_row is None or finding.file is not None:
            return finding
        within = [(before, file) for before, file in self.before if before <= finding.first_row]
        before, file = max(within, default=(0, None))
        return replace(finding, file=file, first_row=finding.first_row - before)


def read_log(
    paths: Paths,
    config: RolloutCorrectionConfig,
    *,
    train_column: str | None = None,
    null_steps: tuple[int, int] | None = None,
    what_if: bool = False,
    candidates: bool = False,
    batch_size: int = 256,
    workers: int = 1,
    ray: str | None = None,
    keep_going: bool = False,
    file_limits: FileLimits | None = None,
    column_names: Mapping[str, str] | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> LogTally:
    """Read a log once. Arguments and errors are those of `check_logs`."""
    paths = path_texts(paths)
    if train_column not in (None, "old_log_prob", "log_prob"):
        raise BadInputError(f"the training side is old_log_prob or log_prob, not {train_column!r}")
    if workers < 1 or (workers > 1 and ray is not None):
        beside = " with a Ray cluster" if ray is not None else ""
        raise BadInputError(f"workers={workers}{beside}; give 1 or more, or the cluster")

    # A check counts what is missing and goes on.
    if config.nonfinite == "raise":
        config = replace(config, nonfinite="reject_token")

    unreadable: list[str] = []
    if keep_going:
        shards, unreadable = _readable_shards(paths, file_limits, column_names)
    else:
        shards = log_shards(paths, file_limits=file_limits, column_names=column_names)
    total, tally = sum(shard.rows for shard in shards), Tally()
    measurement = Measurement(
        config=config,
        train_column=train_column or "",
        batch_size=batch_size,
        null_steps=null_steps,
        what_if=what_if,
        candidates=candidates,
        keep_going=keep_going,
    )
    try:
        head, measurement, shards, without = _readable_head(shards, measurement)
        unreadable += without
        if head is not None:
            denoising = head.has("dimensions")
            measurement = replace(
                measurement,
                kept=head.has("kept_offsets"),
                denoising=denoising,
                timesteps=timestep_values(shards, batch_size) if denoising else (),
                with_exact_kl=denoising and has_exact_kl(head),
            )
        told = (lambda rows: None) if on_rows is None else (lambda rows: on_rows(rows, total))
        for part in read_shards(measurement, shards, told, workers=workers, ray=ray):
            tally = tally.merge(part)
    except KeyboardInterrupt:
        tally = replace(tally, interrupted=True)

    # A file in several shards is one file.
    problems = tuple(dict.fromkeys((*unreadable, *tally.unreadable)))
    if not tally.parts:
        seen = problems[0] if problems else "there is no row"
        seen = "nothing was read before the interrupt" if tally.interrupted else seen
        raise BadInputError(f"{', '.join(paths)}: {seen}; give a log with at least one sequence")
    return LogTally(
        tally=tally,
        measurement=measurement,
        total=total,
        unreadable=problems,
        before=tuple(dict.fromkeys((shard.before - shard.first_row, shard.file) for shard in shards)),
    )


def _readable_shards(
    paths: Sequence[str], file_limits: FileLimits | None, column_names: Mapping[str, str] | None
) -> tuple[list[Shard], list[str]]:
    """The shards of the files that are whole, and what is wrong with the others."""
    shards: list[Shard] = []
    unreadable = []
    for file in log_files(paths):
        try:
            found = log_shards([str(file)], file_limits=file_limits, column_names=column_names)
        except (RolloutLogError, OSError) as error:
            unreadable.append(in_one_line(error))
            continue
        before = sum(shard.rows for shard in shards)
        shards += [replace(shard, before=before + shard.before) for shard in found]
    return shards, unreadable


def _readable_head(
    shards: list[Shard], measurement: Measurement
) -> tuple[RolloutBatch | None, Measurement, list[Shard], list[str]]:
    """The first batch with both sides, the measurement of its columns, the shards from it on, and what others lack."""
    unreadable: list[str] = []
    for number, shard in enumerate(shards):
        try:
            # The reader ends here, so that no part of the file stays in memory.
            columns = COLUMNS + KEPT_COLUMNS + DENOISING_COLUMNS
            head = next(read_shard(shard, columns=columns, batch_size=measurement.batch_size), None)
            if head is not None:
                column = _train_column(head, shard, measurement)
                return head, replace(measurement, train_column=column), shards[number:], unreadable
        except (RolloutLogError, BadInputError) as error:
            if not measurement.keep_going:
                raise
            unreadable.append(in_one_line(error))
    return None, measurement, [], unreadable


def _train_column(batch: RolloutBatch, shard: Shard, measurement: Measurement) -> str:
    """The column that π is taken from in the whole log, from what its first batch records.

    Both sides must be there: the rest of a log that lacks one need not be read.
    """
    order = ("log_prob", "old_log_prob") if measurement.config.bypass_mode else ("old_log_prob", "log_prob")
    found = measurement.train_column or next((name for name in order if batch.has(name)), None)
    if found is None:
        raise BadInputError(str(missing_column(order, batch, shard.source, so=", so there is no training side")))
    for column in ("rollout_log_prob", found):
        if not batch.has(column):
            raise BadInputError(str(missing_column([column], batch, shard.source)))
    return found
