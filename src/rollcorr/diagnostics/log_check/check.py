"""Check a rollout log: stream it through the correction, merge the statistics, and judge them.

A reader holds one batch in memory. The verdict is about all rows together, exactly as one call on all of them would
give it (statistics merge exactly); the panels show each training step, where the log records steps. The log is cut into
shards that depend on it alone, so any number of readers gives the same numbers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollcorr.config import Finding, RolloutCorrectionConfig, resolve
from rollcorr.config.checks import in_one_line
from rollcorr.config.yaml_text import read_yaml
from rollcorr.core.metric_registry import finalize
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.health_check import HealthReport, health
from rollcorr.diagnostics.log_check.denoising import DENOISING_COLUMNS, has_exact_kl, timestep_values
from rollcorr.diagnostics.log_check.shard_readers import read_shards
from rollcorr.diagnostics.log_check.tally import COLUMNS, KEPT_COLUMNS, Measurement, Part, Tally, merge_parts
from rollcorr.diagnostics.provenance.provenance_findings import NOT_COMPARABLE, Provenance
from rollcorr.rollout_log import FileLimits, RolloutBatch, Shard, log_files, log_shards, missing_column, read_shard
from rollcorr.run_directory.stored_run import BadInputError

DIAGNOSIS = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_threshold=2.0, rollout_token_veto_threshold=1e-4, apply_is=False
)
"""What `rollcorr check` measures by default: token weights truncated at 2 and the veto's share, no rejection criterion.

Token weights are the ones that stay informative at any length; the other levels and criteria say little before a level
and a band have been chosen, and are measured with `--preset` or `--config`.
"""

_ABOUT_THE_POLICIES = {"positive", "sentinel", "zeros", "kept", "kept_length", "kept_offsets", "kept_twice"}
"""Codes of the log's validation that make the verdict: they are about the policies. The rest become remarks."""


def choose_config(*, preset: str | None = None, file: Path | None = None) -> RolloutCorrectionConfig:
    """What to measure: a preset, a YAML file of any generation, or `DIAGNOSIS` when neither is given.

    Raises:
        BadInputError: both are given, or what is given is no configuration or switches the correction off.
    """
    if preset is not None and file is not None:
        raise BadInputError(f"--preset {preset} and --config {file} exclude each other; give one")
    if preset is None and file is None:
        return DIAGNOSIS
    try:
        config = resolve(preset if file is None else read_yaml(file))
    except (ValueError, TypeError) as error:
        raise BadInputError(f"{file or '--preset'}: {in_one_line(error)}") from error
    if config is None:
        raise BadInputError(f"{file}: no rollout correction there, so nothing to measure; try --preset disabled")
    return config


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a log says about the mismatch.

    Attributes:
        health: the verdict over all rows.
        metrics: every metric over all rows, prefixed.
        series: the metrics of each step, with "step" and, where recorded, "reward/mean"; one entry without steps.
        rows: rows read.
        files: files of the log.
        train_column: the column that π was taken from.
        provenance: what the log-probs imply about the sampling behind them, from a spread sample of the rows.
        config: the configuration that was measured.
        remarks: what the reader should know about the input.
        interrupted: reading stopped before the end.
    """

    health: HealthReport
    metrics: Mapping[str, float]
    series: tuple[Mapping[str, float], ...]
    rows: int
    files: tuple[str, ...]
    train_column: str
    provenance: Provenance
    config: RolloutCorrectionConfig
    remarks: tuple[str, ...]
    interrupted: bool


def check_logs(
    paths: Sequence[str | Path],
    config: RolloutCorrectionConfig = DIAGNOSIS,
    *,
    train_column: str | None = None,
    diffusion: bool = False,
    batch_size: int = 256,
    workers: int = 1,
    ray: str | None = None,
    file_limits: FileLimits | None = None,
    column_names: Mapping[str, str] | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> CheckResult:
    """Judge rollout logs, or the dumps of other frameworks, without a training run.

    Args:
        paths: files, folders (also run folders) or patterns.
        config: what to measure; nothing is trained, so what it would apply is only counted.
        train_column: where π is: old_log_prob or log_prob. None takes old_log_prob where recorded, else log_prob; with
            `bypass_mode` the other way round, because there old_log_prob is a copy of rollout_log_prob.
        diffusion: the log-probs are densities: positive ones are not a finding, and the diffusion rules warn.
        batch_size: most rows that a reader has in memory at once; fewer where they are long.
        workers: processes that read. Several are started as new interpreters, so a script that asks for them needs
            `if __name__ == "__main__":`.
        ray: instead, the address of a Ray cluster whose nodes read: "auto", "local" or "ray://host:port". They need
            this package, and the files under the same names.
        file_limits: what a file may hold; None for the defaults.
        column_names: column of the log → its name in the files, as in `read_rollout_log`.
        on_rows: called now and then with the rows read since the last call, and the rows of the whole log.

    Returns:
        The result. After a KeyboardInterrupt it covers the rows read until then, and says so.

    Raises:
        BadInputError: there is no row, or the log lacks the log-probs of a side.
        RolloutLogError: a log cannot be read; the message names file, row and column.
        ImportError: Ray is asked for and not installed.
        OSError: there is no cluster at the address, or a worker was killed.
    """
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
        denoising = head is not None and head.has("dimensions")
        diffusion = diffusion or denoising
        measurement = Measurement(
            config=config,
            train_column=column,
            batch_size=batch_size,
            kept=kept,
            denoising=denoising,
            timesteps=timestep_values(shards, batch_size) if denoising else (),
            with_exact_kl=denoising and head is not None and has_exact_kl(head),
        )
        told = (lambda rows: None) if on_rows is None else (lambda rows: on_rows(rows, total))
        for part in read_shards(measurement, shards, told, workers=workers, ray=ray):
            tally = tally.merge(part)
    except KeyboardInterrupt:
        tally = replace(tally, interrupted=True)
    if not tally.parts:
        seen = "nothing was read before the interrupt" if tally.interrupted else "there is no row"
        raise BadInputError(f"{', '.join(map(str, paths))}: {seen}; give a log with at least one sequence")

    remarks = [f"π is the column {column}, μ is rollout_log_prob"]
    if denoising:
        remarks.append(
            "the tokens are denoising steps; weights and bounds are of the joint likelihood ratio, over all D"
        )
    remarks += [str(finding) for finding in tally.findings if finding.code not in _ABOUT_THE_POLICIES]
    if tally.interrupted:
        remarks.append(f"interrupted: this covers {tally.rows} of {total} rows only")

    # All rows together are judged. The steps are history, for the rules and the panels.
    whole = _metrics(merge_parts(tally.parts.values()))
    steps = sorted(step for step in tally.parts if step is not None)
    series = tuple({"step": step, **_metrics(tally.parts[step])} for step in steps) or ({"step": 0, **whole},)
    verdict = health(whole, config, series=series if len(steps) > 1 else (), diffusion=diffusion)
    provenance = tally.sample.estimate()
    found = _log_findings(tally, provenance, diffusion=diffusion, kept=kept)
    return CheckResult(
        health=replace(verdict, findings=(*verdict.warnings, *found, *verdict.notes)),
        metrics=whole,
        series=series,
        rows=tally.rows,
        files=tuple(str(file) for file in log_files([str(path) for path in paths])),
        train_column=column,
        provenance=provenance,
        config=config,
        remarks=tuple(remarks),
        interrupted=tally.interrupted,
    )


def _first_batch(shards: Sequence[Shard], batch_size: int) -> RolloutBatch | None:
    """The first batch of a log. The reader ends here, so that no part of the file stays in memory."""
    if not shards:
        return None
    return next(read_shard(shards[0], columns=COLUMNS + KEPT_COLUMNS + DENOISING_COLUMNS, batch_size=batch_size), None)


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


def _log_findings(tally: Tally, provenance: Provenance, *, diffusion: bool, kept: bool) -> list[Finding]:
    """What the log's validation, its recorded settings and the log-probs themselves add to the verdict."""
    found = [_judged(finding) for finding in tally.findings if finding.code in _ABOUT_THE_POLICIES]

    # Densities may exceed 1, and follow no rule of token probabilities.
    if diffusion:
        return [finding for finding in found if finding.code != "positive"]
    found += tally.claims.values()
    return found + [_implied(finding, kept=kept) for finding in provenance.warnings if finding.code in NOT_COMPARABLE]


def _metrics(part: Part) -> dict[str, float]:
    """The metrics of a part: the registry's, the reward, and what was counted in the raw log-probs."""
    metrics = finalize(part.statistics.read())
    tokens = bare_metrics(metrics).get("token_count", 0.0)
    if part.rewards:
        metrics["reward/mean"] = part.reward / part.rewards
    metrics["log/zero_fraction"] = part.zeros / tokens if tokens else 0.0
    metrics["log/contradicted_zero_count"] = float(part.contradicted)
    return metrics


def _judged(finding: Finding) -> Finding:
    """A finding of the log's validation, as one that makes the verdict."""
    return replace(
        finding,
        metric=f"log/{finding.column}",
        value=float(finding.rows or 0),
        limit="0 sequences",
        severity="warning",
    )


def _implied(finding: Finding, *, kept: bool) -> Finding:
    """A finding of provenance, with what this log has for its fix."""
    if kept and finding.code == "truncated":
        return replace(finding, fix=f"{finding.fix}; this log has the sets, in kept_ids and kept_offsets")
    return finding
