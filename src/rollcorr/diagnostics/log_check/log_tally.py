"""Read a log once, for `rollcorr check` and `rollcorr null`, and compute its metrics.

Metrics over all rows are judged; metrics of each step are their history. Findings and remarks come from the log's own
record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from rollcorr.config import Finding, RolloutCorrectionConfig
from rollcorr.config.checks import in_one_line
from rollcorr.core.metric_registry import finalize
from rollcorr.diagnostics.faults import FAULTS, fault
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.trend import AGE
from rollcorr.diagnostics.log_check.denoising import DENOISING_COLUMNS, has_exact_kl, timestep_values
from rollcorr.diagnostics.log_check.shard_readers import read_shards
from rollcorr.diagnostics.log_check.tally import COLUMNS, KEPT_COLUMNS, Measurement, Part, Tally, merge_parts
from rollcorr.diagnostics.null import MismatchProfile, Origin, TokenSums
from rollcorr.diagnostics.null.null_file import FEW_TOKENS
from rollcorr.diagnostics.null.version_cells import lag_metrics, lag_rows, mean_lag
from rollcorr.diagnostics.provenance.provenance_findings import Provenance
from rollcorr.rollout_log import FileLimits, RolloutBatch, RolloutLogError, Shard, log_shards, read_shard
from rollcorr.rollout_log.frameworks import missing_column
from rollcorr.rollout_log.reader import Paths, log_files, path_texts
from rollcorr.run_directory.stored_run import BadInputError


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one torch thread: at these batch sizes, a second thread costs four times the CPU and saves no time.

    Parallel readers are processes. The caller's thread count is restored on exit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False, kw_only=True)
class LogTally:
    """Result of one pass over a log.

    Attributes:
        tally: merged sums.
        measurement: settings of the pass.
        total: number of rows in the log; more than were read after an interrupt.
        unreadable: one sentence for each unreadable file.
        before: (rows of the log before the file, path) of each file with rows, in log order.
    """

    tally: Tally
    measurement: Measurement
    total: int
    unreadable: tuple[str, ...] = ()
    before: tuple[tuple[int, str], ...] = ()

    def in_its_file(self, finding: Finding) -> Finding:
        """Return a finding with the file of its first row, and the row number counted within that file."""
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
    """Read a log once. Args and Raises are as in `check_logs`."""
    paths = path_texts(paths)
    if train_column not in (None, "old_log_prob", "log_prob"):
        raise BadInputError(f"the training side is old_log_prob or log_prob, not {train_column!r}")
    if workers < 1 or (workers > 1 and ray is not None):
        suffix = " with a Ray cluster" if ray is not None else ""
        raise BadInputError(f"workers={workers}{suffix}; give 1 or more, or the cluster")

    # A check counts missing values and continues.
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
        report_rows = (lambda rows: None) if on_rows is None else (lambda rows: on_rows(rows, total))
        for part in read_shards(measurement, shards, report_rows, workers=workers, ray=ray):
            tally = tally.merge(part)
    except KeyboardInterrupt:
        tally = replace(tally, interrupted=True)

    # Report a file once, even if several of its shards failed.
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
    """Return the shards of all readable files, and one sentence for each unreadable file."""
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
    """Return the first batch with both sides, the measurement with its train column, its shards and the errors.

    With `keep_going`, shards before the first readable one are skipped; each adds an error sentence.
    """
    unreadable: list[str] = []
    for number, shard in enumerate(shards):
        try:
            # Drop the reader after its first batch, so that no part of the file stays in memory.
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
    """Return the column that contains log π in the entire log, chosen from its first batch.

    Raises:
        BadInputError: the batch lacks the log-probs of one side, so the remaining log need not be read.
    """
    order = ("log_prob", "old_log_prob") if measurement.config.bypass_mode else ("old_log_prob", "log_prob")
    found = measurement.train_column or next((name for name in order if batch.has(name)), None)
    if found is None:
        raise BadInputError(str(missing_column(order, batch, shard.source, so=", so there is no training side")))
    for column in ("rollout_log_prob", found):
        if not batch.has(column):
            raise BadInputError(str(missing_column([column], batch, shard.source)))
    return found


@dataclass(frozen=True)
class LogMetrics:
    """Metrics of a log.

    Attributes:
        whole: metrics over all rows, by prefixed name.
        steps: metrics of each step, with "step", the reward and the age of the weights; empty if no step is recorded.
        ages: step → mean age of the weights behind its tokens, by metric name.
    """

    whole: Mapping[str, float]
    steps: tuple[Mapping[str, float], ...]
    ages: Mapping[int, Mapping[str, float]]

    @property
    def series(self) -> tuple[Mapping[str, float], ...]:
        """Return the metrics of each step; without steps, a single entry over all rows."""
        return self.steps or ({"step": 0, **self.whole},)

    @property
    def history(self) -> tuple[Mapping[str, float], ...]:
        """Return the steps for rules over time; empty for a single step."""
        return self.steps if len(self.steps) > 1 else ()


def log_metrics(tally: Tally) -> LogMetrics:
    """Compute the metrics of a tally."""
    lags = tally.versions.by_lag()
    ages = {step: {AGE: mean_lag(cells)} for step, cells in lags.items()}
    measured = metrics_of_parts(tally.parts, tally.profile, ages)
    if not lags:
        return measured
    steps = tuple({**step, **lag_metrics(lag_rows({0: lags.get(int(step["step"]), {})}))} for step in measured.steps)
    return replace(measured, whole={**measured.whole, **lag_metrics(lag_rows(lags))}, steps=steps)


def metrics_of_parts(
    parts: Mapping[int | None, Part], profile: MismatchProfile, ages: Mapping[int, Mapping[str, float]]
) -> LogMetrics:
    """Compute the metrics of some rows from their parts by step, their profile, and the weight ages of the steps."""
    whole = _metrics(merge_parts(parts.values()))
    whole.pop("log/token_id_share", None)  # computed from folded ids; its limits apply to exact ids
    whole |= _id_share(profile.ids)
    steps = sorted(step for step in parts if step is not None)
    return LogMetrics(
        whole, tuple({"step": step, **_metrics(parts[step]), **ages.get(step, {})} for step in steps), ages
    )


def _metrics(part: Part) -> dict[str, float]:
    """Compute the metrics of a part: registered metrics, the mean reward, and counts of raw log-probs."""
    metrics = finalize(part.statistics.read())
    tokens = bare_metrics(metrics).get("token_count", 0.0)
    if part.rewards:
        metrics["reward/mean"] = part.reward / part.rewards
    metrics["log/zero_fraction"] = part.zeros / tokens if tokens else 0.0
    metrics["log/contradicted_zero_count"] = float(part.contradicted)
    metrics["log/positive_count"] = float(part.positive)
    return metrics | _id_share(part.ids)


def _id_share(ids: TokenSums) -> dict[str, float]:
    """Return the share of Var(d) that token ids explain; empty unless enough tokens have recorded ids."""
    share = ids.share()
    return {"log/token_id_share": share.share} if share.tokens >= FEW_TOKENS and not ids.repeats else {}


def log_remarks(read: LogTally, *, diffusion: bool) -> Iterator[str]:
    """Yield notes on the input, one line each."""
    yield f"π is the column {read.measurement.train_column}, μ is rollout_log_prob"
    if read.measurement.denoising:
        yield "log-probs are of denoising steps; weights and bounds are of the joint likelihood ratio, over all D"
    for finding in read.tally.findings:
        rows, plain = finding.rows or 0, finding.code not in FAULTS

        # Validation messages are about tokens; denoising steps keep only the title.
        if plain and diffusion:
            yield finding.title + f", in {rows:,} picture{'s' * (rows != 1)}" * bool(rows)
        elif plain:
            yield str(finding)
    if read.tally.interrupted:
        yield f"interrupted: this covers {read.tally.rows} of {read.total} rows only"
    yield from (f"left out: {problem}" for problem in read.unreadable)


def log_findings(tally: Tally, provenance: Provenance, *, diffusion: bool, kept: bool) -> list[Finding]:
    """Return findings from the log's validation, its recorded settings and its log-probs.

    Validation codes without a row in the table of faults concern the file, and become remarks.
    """
    found = []
    for finding in tally.findings:
        if finding.code in FAULTS:
            # Logits instead of log-probs explain a mismatch of all rows; a value above 0 explains only its own row.
            rows = finding.rows or 0
            share = rows / tally.rows if fault(finding.code).part == "rows" else finding.row_share
            judged = replace(finding, row_share=share, metric=f"log/{finding.column}", value=float(rows))
            found.append(replace(judged, limit="0 sequences", severity="warning"))

    # Densities may exceed 1 or be 0, so rules about token probabilities do not apply.
    if diffusion:
        row = fault("sentinel")
        return [
            replace(finding, reason=row.reason, fix=row.fix, limit="0 pictures", tokens=None)
            for finding in found
            if finding.code == "sentinel"
        ]
    sets = "; this log has the sets, in kept_ids and kept_offsets"
    implied = [
        replace(finding, fix=finding.fix + sets) if kept and finding.code == "truncated" else finding
        for finding in provenance.warnings
        if fault(finding.code).number
    ]
    return [*found, *tally.claims.values(), *implied]


def mixed_settings(origin: Origin) -> list[Finding]:
    """Return a note if a log mixes settings, engines or models: a verdict on all rows may not fit each group."""
    settings = [json.loads(text) for text in origin.sampling]
    recorded = {
        name: dict.fromkeys(str(one.get(name, "not recorded")) for one in settings)
        for name in dict.fromkeys(name for one in settings for name in one)
    }
    recorded |= {name: dict.fromkeys(getattr(origin, name)) for name in ("engine", "engine_version", "model")}
    mixed = [f"{name.replace('_', ' ')}: {', '.join(values)}" for name, values in recorded.items() if len(values) > 1]
    note = replace(fault("mixed_settings").finding, metric="log/sampling", reason="; ".join(mixed), severity="note")
    return [note] if mixed else []
