"""Check a rollout log: stream it through the correction, merge the statistics, and judge them.

Each reader keeps one batch in memory. The verdict covers all rows and equals the verdict of a single call on them,
because statistics merge exactly. The panels show each training step if the log records steps. The split into shards
depends only on the log, so any number of readers returns bit-identical numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from rollcorr.config import Finding, RolloutCorrectionConfig
from rollcorr.config.checks import in_one_line
from rollcorr.config.conversion import resolve
from rollcorr.config.layers import read_document
from rollcorr.diagnostics.advice.candidates import CandidateRow
from rollcorr.diagnostics.faults import fault, is_rise
from rollcorr.diagnostics.health.evidence import Evidence, bare_metrics
from rollcorr.diagnostics.health.health_check import HealthReport, evidence_of, measured_findings, report_of
from rollcorr.diagnostics.log_check.draws import judge_draws, tests_draws
from rollcorr.diagnostics.log_check.log_null import picture_null
from rollcorr.diagnostics.log_check.log_tally import (
    LogTally,
    log_findings,
    log_metrics,
    log_remarks,
    mixed_settings,
    one_thread,
    read_log,
)
from rollcorr.diagnostics.log_check.log_totals import HeavyToken, WhatIf
from rollcorr.diagnostics.log_check.log_weights import JudgedRows, in_excess, judge_rows
from rollcorr.diagnostics.log_check.tally import Measurement, Tally
from rollcorr.diagnostics.null import MismatchNull, MismatchProfile, PictureNull
from rollcorr.diagnostics.null.picture_judgment import clip_advice, judge_pictures
from rollcorr.diagnostics.null.routing import judge_routing
from rollcorr.diagnostics.null.run_null import any_null_beside
from rollcorr.diagnostics.null.version_cells import LagRow, TurnRow, judge_versions, lag_rows
from rollcorr.diagnostics.null.weight_judgment import WeightJudgment
from rollcorr.diagnostics.provenance.provenance_findings import Provenance
from rollcorr.diagnostics.resolver import resolve_findings, standing
from rollcorr.rollout_log import FileLimits, RolloutBatch
from rollcorr.rollout_log.reader import Paths, log_files, path_texts
from rollcorr.run_directory.stored_run import BadInputError

DIAGNOSIS = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_threshold=2.0, rollout_token_veto_threshold=1e-4, apply_is=False
)
"""Default configuration of `rollcorr check`: token weights truncated at 2 and the veto's share; no rejection criterion.

Token weights stay informative at any length. The other levels and criteria are informative only once a level and a band
are chosen: measure them with `--preset` or `--config`.
"""


def choose_config(*, preset: str | None = None, settings: Sequence[str] = ()) -> RolloutCorrectionConfig:
    """Return the configuration to measure: a preset, option names of any generation, or the default `DIAGNOSIS`.

    Args:
        preset: name of the preset; excludes `settings`.
        settings: as on a command line: at most one YAML file, and `dotted.name=value` overrides.

    Returns:
        The resolved configuration.

    Raises:
        BadInputError: both are given, the settings are not a configuration, or they switch the correction off.
    """
    text = " ".join(settings)
    if preset is not None and settings:
        raise BadInputError(f"--preset {preset} and --config {text} exclude each other; give one")
    if preset is None and not settings:
        return DIAGNOSIS
    try:
        config = resolve(preset or read_document(settings))
    except (ValueError, TypeError) as error:
        raise BadInputError(f"{text or '--preset'}: {in_one_line(error)}") from error
    if config is None:
        raise BadInputError(f"{text}: no rollout correction there, so nothing to measure; try --preset disabled")
    return config


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of a check: the mismatch of a log and the verdict on it.

    Attributes:
        health: verdict over all rows.
        metrics: every metric over all rows, by prefixed name.
        series: metrics of each step, with "step" and, if recorded, "reward/mean"; a single entry if there are no steps.
        rows: number of rows read.
        files: paths of the log's files.
        train_column: column that contains log π.
        provenance: estimate of the sampling settings behind the log-probs, from a spread sample of the rows.
        config: configuration that was measured.
        remarks: notes on the input, one sentence each.
        interrupted: True if reading stopped before the end.
        unreadable: one sentence for each file that could not be read, with `keep_going`.
        hypotheses: possible causes, most likely first, from the pairs of log-probs and from the comparison with a null.
            Hypotheses that decide the verdict are also findings of `health`.
        profile: mismatch of all rows.
        null: the null that the log was compared with, or None.
        what_if: effect of each preset; empty unless requested, and for denoising steps.
        candidates: effect of each correction that `advise` chooses from; empty unless requested.
        worst_tokens: the tokens that carry most of k3; empty unless a few tokens do.
        lags: mismatch by the age of the sampler's weights; empty unless steps and versions are recorded.
        turns: mismatch by turn; empty if no row has several turns.
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
    unreadable: tuple[str, ...]
    hypotheses: tuple[Finding, ...]
    profile: MismatchProfile = field(repr=False)
    null: MismatchNull | None = field(repr=False)
    what_if: tuple[WhatIf, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()
    worst_tokens: tuple[HeavyToken, ...] = ()
    lags: tuple[LagRow, ...] = ()
    turns: tuple[TurnRow, ...] = ()

    def _repr_html_(self) -> str:
        """Return the verdict for a notebook, with the few tokens that carry most of k3."""
        from rollcorr.diagnostics.notebook import verdict_html

        return verdict_html(self.health, self.worst_tokens)

    @property
    def causes(self) -> tuple[Finding, ...]:
        """Return the causes that no test refuted, most likely first."""
        return standing(self.health.findings)


@one_thread()
def check_logs(
    paths: Paths,
    config: RolloutCorrectionConfig = DIAGNOSIS,
    *,
    train_column: str | None = None,
    diffusion: bool = False,
    null: MismatchNull | PictureNull | None = None,
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
) -> CheckResult:
    """Judge rollout logs, or the dumps of other frameworks, without a training run.

    Args:
        paths: files, folders (also run folders) or glob patterns.
        config: configuration to measure; default `DIAGNOSIS`. Nothing is trained: weights and rejections are only
            counted.
        train_column: column that contains log π: old_log_prob or log_prob. The default is old_log_prob if recorded,
            else log_prob; with `bypass_mode` the reverse, because old_log_prob is then a copy of rollout_log_prob.
        diffusion: True if the log-probs are densities: positive values are valid, and the diffusion rules apply.
        null: mismatch between two correct policies on this setup (`read_null`, `null_of_logs`). Defaults to `null.json`
            in the run directory, if `paths` is a single run that contains one.
        null_steps: first and last step of this log to use as the null, if these steps are known to be correct. Without
            any null, a log of at least 10 steps uses its first steps, and its start stays unjudged.
        what_if: also measure the effect of every preset, in the same pass.
        candidates: also measure the corrections that `advise` chooses from.
        batch_size: maximum number of rows that a reader keeps in memory; fewer if rows are long.
        workers: number of reader processes; default 1. Additional workers are spawned, so the calling script needs
            `if __name__ == "__main__":`.
        ray: address of a Ray cluster whose nodes read instead: "auto", "local" or "ray://host:port". The nodes need
            this package, and the files under the same paths.
        keep_going: skip unreadable files and judge the rest; the verdict is then "not judged" at best.
        file_limits: size limits of a file; default limits if omitted.
        column_names: mapping from the log's column to its name in the files, as in `read_rollout_log`.
        on_rows: progress callback: receives the rows read since the last call, and the total rows of the log.

    Returns:
        The result. After a KeyboardInterrupt it covers the rows read so far, and its remarks report the interrupt.

    Raises:
        BadInputError: the log is empty, it lacks the log-probs of one side, or the null was measured with a different
            engine, sampling settings or vocabulary.
        RolloutLogError: a log cannot be read; the message contains file, row and column.
        TypeError: the null is not an object that `read_null` returns.
        ImportError: `ray` is given and Ray is not installed.
        OSError: no cluster at the address, or a worker was killed.
    """
    if null is not None and not isinstance(null, MismatchNull | PictureNull):
        raise TypeError(f"null is a {type(null).__name__}, not a MismatchNull: give read_null({str(null)!r})")
    if null is not None and null_steps is not None:
        raise BadInputError(
            f"a null ({null.name}) and steps {null_steps[0]}:{null_steps[1]} exclude each other; give one"
        )
    files, given = log_files(paths), path_texts(paths)
    if null is None and null_steps is None and len(given) == 1:
        null = any_null_beside(given[0])
    read = read_log(
        paths,
        config,
        train_column=train_column,
        null_steps=null_steps,
        what_if=what_if,
        candidates=candidates,
        batch_size=batch_size,
        workers=workers,
        ray=ray,
        keep_going=keep_going,
        file_limits=file_limits,
        column_names=column_names,
        on_rows=on_rows,
    )
    return _result(read, config, diffusion=diffusion, null=null, null_steps=null_steps, files=tuple(map(str, files)))


def check_batches(batches: Sequence[RolloutBatch], *, null: MismatchNull | None = None) -> CheckResult:
    """Judge rollouts in memory, as `check_logs` judges them in a file.

    Args:
        batches: rollouts with `old_log_prob`, in log order.
        null: as in `check_logs`; default: no null.

    Returns:
        The result, as `check_logs` returns it.

    Raises:
        NullMismatchError: the null was measured with a different engine, sampling settings or vocabulary.
    """
    kept = batches[0].has("kept_offsets")
    measurement = Measurement(config=DIAGNOSIS, train_column="old_log_prob", batch_size=256, kept=kept)
    tally = measurement.of_batches(batches)
    return _result(LogTally(tally=tally, measurement=measurement, total=tally.rows), DIAGNOSIS, null=null)


def _result(
    read: LogTally,
    config: RolloutCorrectionConfig,
    *,
    diffusion: bool = False,
    null: MismatchNull | PictureNull | None = None,
    null_steps: tuple[int, int] | None = None,
    files: tuple[str, ...] = (),
) -> CheckResult:
    """Judge the tally of a log. Args, Returns and Raises are as in `check_logs`."""
    tally = read.tally
    diffusion = diffusion or read.measurement.denoising
    measured = log_metrics(tally)
    provenance = tally.sample.estimate()
    provenance = replace(provenance, findings=tuple(map(read.in_its_file, provenance.findings)))

    # The verdict is about all rows; steps are only history for rules and panels. Densities of a diffusion sampler have
    # no tokens, so they have separate rules.
    evidence = evidence_of(measured.whole, config, series=measured.history, diffusion=diffusion)
    evidence = replace(evidence, sampling=bool(tally.origin.sampling) or tests_draws(tally.draws))
    judged = JudgedRows()
    if read.measurement.denoising:
        judged = JudgedRows(weights=_judge_pictures(tally, null, null_steps))
    elif isinstance(null, PictureNull):
        raise BadInputError(f"{null.name} is a null of pictures, and this log is of tokens; give a null of such a log")
    elif not diffusion and bare_metrics(measured.whole).get("token_count", 0.0) > 0:
        settings = read.measurement.config
        judged = judge_rows(tally, null, null_steps, provenance, evidence, settings, ages=measured.ages)
    report, hypotheses = _verdict(read, judged, provenance, replace(evidence, noise=judged.noise))
    return CheckResult(
        health=report,
        metrics=measured.whole,
        series=measured.series,
        rows=tally.rows,
        files=files,
        train_column=read.measurement.train_column,
        provenance=provenance,
        config=config,
        remarks=(*log_remarks(read, diffusion=diffusion), *judged.weights.remarks),
        interrupted=tally.interrupted,
        unreadable=read.unreadable,
        hypotheses=hypotheses,
        profile=tally.profile,
        null=judged.used,
        what_if=tally.presets.rows(),
        candidates=tally.candidates.table(),
        worst_tokens=tally.worst.carriers(float(tally.profile.cells[3].sum()), tally.profile.tokens),
        lags=lag_rows(tally.versions.by_lag()),
        turns=tally.turns.by_turn(),
    )


def _judge_pictures(
    tally: Tally, null: MismatchNull | PictureNull | None, null_steps: tuple[int, int] | None
) -> WeightJudgment:
    """Judge pictures by a null, or by the log steps that serve as one; those steps are not judged."""
    if isinstance(null, MismatchNull):
        raise BadInputError(f"{null.name} is a null of tokens, and this log is of pictures; give a null of pictures")
    rows = tally.pictures
    if null_steps is not None:
        null = picture_null(tally, null_steps, name=f"steps {null_steps[0]} to {null_steps[1]} of this log")
        of_step = rows.column("step")
        rows = rows.where(~((of_step >= null_steps[0]) & (of_step <= null_steps[1])))
        if not len(rows):
            first, last = null_steps
            raise BadInputError(f"every step of this log lies in {first}:{last}; nothing is left to be judged")
    judged = judge_pictures(rows, null)
    remarks = () if null is None else null.remarks(tally.origin)

    # Only a passed comparison with a null shows that the log-ratios are noise, which a clip should let through.
    advice = clip_advice(rows) if judged.judged_against and not in_excess(judged) else ""
    return replace(judged, remarks=(*remarks, advice) if advice else remarks)


def _verdict(
    read: LogTally, judged: JudgedRows, provenance: Provenance, evidence: Evidence
) -> tuple[HealthReport, tuple[Finding, ...]]:
    """Return the verdict and all hypotheses; a fault may appear in several sources."""
    tally, weights = read.tally, judged.weights
    found = log_findings(tally, provenance, diffusion=evidence.diffusion, kept=read.measurement.kept)
    found += judge_draws(tally.draws)
    if read.measurement.denoising:
        evidence = replace(evidence, changes={})  # averages over D and windows hide R of a timestep
    measured = judged.attribute(measured_findings(evidence), with_rises=True)

    # Densities show no settings, record no versions of weights, and have no router.
    implied: tuple[Finding, ...] = ()
    of_versions: tuple[Finding, ...] = ()
    of_null = weights.findings
    if not evidence.diffusion:
        # A judgment by a null is more informative than "no setting matched".
        implied = tuple(f for f in provenance.findings if f.code != "matched" or not weights.findings)
        of_null = (*judge_routing(tally.routing, judged.used, in_excess=in_excess(weights)), *of_null)
        of_versions = judged.attribute(judge_versions(tally.versions))

    # Metrics show symptoms, and steps show courses. Print each finding once, below its cause.
    resolved = resolve_findings(
        pairs=(*found, *implied),
        null=of_null,
        steps=of_versions,
        metrics=(*measured, *mixed_settings(tally.origin)),
        evidence=judged.evidence or evidence,
    )
    of_tokens = {finding.code for finding in (*found, *implied, *of_null, *of_versions)}
    hypotheses = tuple(f for f in resolved if f.code in of_tokens or fault(f.code).kind == "course" or is_rise(f))

    # Notes of the pairs are only hypotheses, so the verdict omits them.
    notes = {finding.code for finding in implied if finding.severity == "note"}
    shown = [finding for finding in resolved if finding.severity != "note" or finding.code not in notes]
    by_metrics = evidence.diffusion and not read.measurement.denoising
    report = report_of(evidence, shown, None if by_metrics else weights.judged_against)
    count = len(read.unreadable)
    partial = f"this is the verdict on part of the log: {count} file{'s' * (count != 1)} could not be read to the end"
    not_judged = ((partial,) * bool(count), weights.not_judged, report.not_judged)
    return replace(report, not_judged=tuple(chain(*not_judged))), hypotheses
