"""Check a rollout log: stream it through the correction, merge the statistics, and judge them.

A reader holds one batch in memory. The verdict is about all rows together, exactly as one call on all of them would
give it (statistics merge exactly); the panels show each training step, where the log records steps. The log is cut into
shards that depend on it alone, so any number of readers gives the same numbers to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollcorr.config import Finding, RolloutCorrectionConfig, resolve
from rollcorr.config.checks import in_one_line
from rollcorr.config.yaml_text import read_yaml
from rollcorr.core.metric_registry import finalize
from rollcorr.diagnostics.health.causes import COURSE, with_causes
from rollcorr.diagnostics.health.evidence import bare_metrics
from rollcorr.diagnostics.health.health_check import HealthReport, health
from rollcorr.diagnostics.health.trend import AGE
from rollcorr.diagnostics.hypotheses import rank_hypotheses
from rollcorr.diagnostics.log_check.log_null import first_steps_null
from rollcorr.diagnostics.log_check.log_tally import LogTally, one_thread, read_log
from rollcorr.diagnostics.log_check.preset_totals import WhatIf
from rollcorr.diagnostics.log_check.tally import Part, Tally, merge_parts
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull, NullMismatchError
from rollcorr.diagnostics.null.origin import Origin
from rollcorr.diagnostics.null.other_rows import judge_other_rows
from rollcorr.diagnostics.null.routing import judge_routing
from rollcorr.diagnostics.null.run_null import noise_of
from rollcorr.diagnostics.null.version_cells import judge_versions
from rollcorr.diagnostics.null.weight_judgment import NOT_JUDGED, WeightJudgment, judge_weights
from rollcorr.diagnostics.provenance.provenance_findings import NOT_COMPARABLE, Provenance
from rollcorr.rollout_log import FileLimits, log_files
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
        unreadable: what could not be read, a sentence for each file, where reading went on.
        hypotheses: what may be wrong, most likely first, from the pairs of log-probs and from the comparison with a
            null; those that make the verdict are also among the findings of `health`.
        profile: the mismatch of all rows.
        null: what it was compared with; None without any.
        what_if: what each preset would do, where that was asked for and the tokens are of a language model.
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


@one_thread()
def check_logs(
    paths: Sequence[str | Path],
    config: RolloutCorrectionConfig = DIAGNOSIS,
    *,
    train_column: str | None = None,
    diffusion: bool = False,
    null: MismatchNull | None = None,
    null_steps: tuple[int, int] | None = None,
    what_if: bool = False,
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
        paths: files, folders (also run folders) or patterns.
        config: what to measure; nothing is trained, so what it would apply is only counted.
        train_column: where π is: old_log_prob or log_prob. None takes old_log_prob where recorded, else log_prob; with
            `bypass_mode` the other way round, because there old_log_prob is a copy of rollout_log_prob.
        diffusion: the log-probs are densities: positive ones are not a finding, and the diffusion rules warn.
        null: what two correct policies differ by here (`read_null`, `null_of_logs`).
        null_steps: instead, the first and the last step of this log that serve as its null: they are known to be right.
            With neither, the first steps of a log of 10 steps or more do, and its start stays unjudged.
        what_if: also measure what every preset would do, in the same pass.
        batch_size: most rows that a reader has in memory at once; fewer where they are long.
        workers: processes that read. Several are started as new interpreters, so a script that asks for them needs
            `if __name__ == "__main__":`.
        ray: instead, the address of a Ray cluster whose nodes read: "auto", "local" or "ray://host:port". They need
            this package, and the files under the same names.
        keep_going: judge what can be read where a file cannot; the verdict is then "not judged" at best.
        file_limits: what a file may hold; None for the defaults.
        column_names: column of the log → its name in the files, as in `read_rollout_log`.
        on_rows: called now and then with the rows read since the last call, and the rows of the whole log.

    Returns:
        The result. After a KeyboardInterrupt it covers the rows read until then, and says so.

    Raises:
        BadInputError: there is no row, the log lacks the log-probs of a side, or the null is of another engine, other
            sampling settings or another vocabulary.
        RolloutLogError: a log cannot be read; the message names file, row and column.
        TypeError: the null is not one that was read (`read_null`).
        ImportError: Ray is asked for and not installed.
        OSError: there is no cluster at the address, or a worker was killed.
    """
    if null is not None and not isinstance(null, MismatchNull):
        raise TypeError(f"null is a {type(null).__name__}, not a MismatchNull: give read_null(Path({str(null)!r}))")
    if null is not None and null_steps is not None:
        raise BadInputError(
            f"a null ({null.name}) and steps {null_steps[0]}:{null_steps[1]} exclude each other; give one"
        )
    read = read_log(
        paths,
        config,
        train_column=train_column,
        null_steps=null_steps,
        what_if=what_if,
        batch_size=batch_size,
        workers=workers,
        ray=ray,
        keep_going=keep_going,
        file_limits=file_limits,
        column_names=column_names,
        on_rows=on_rows,
    )
    tally, column = read.tally, read.train_column
    diffusion = diffusion or read.denoising

    remarks = [f"π is the column {column}, μ is rollout_log_prob"]
    if read.denoising:
        remarks.append(
            "log-probs are of denoising steps; weights and bounds are of the joint likelihood ratio, over all D"
        )
    remarks += [_remark(finding, diffusion) for finding in tally.findings if finding.code not in _ABOUT_THE_POLICIES]
    if tally.interrupted:
        remarks.append(f"interrupted: this covers {tally.rows} of {read.total} rows only")

    remarks += [f"left out: {problem}" for problem in read.unreadable]

    # All rows together are judged. The steps are history, for the rules and the panels.
    whole = _metrics(merge_parts(tally.parts.values()))
    steps = sorted(step for step in tally.parts if step is not None)
    ages = _ages(tally)
    series = tuple({"step": step, **_metrics(tally.parts[step]), **ages.get(step, {})} for step in steps)
    series = series or ({"step": 0, **whole},)
    provenance = tally.sample.estimate()
    found = _log_findings(tally, provenance, diffusion=diffusion, kept=read.kept)

    # Densities of a diffusion sampler have no tokens, and rules of their own.
    used, weights = None, WeightJudgment()
    if not diffusion and bare_metrics(whole).get("token_count", 0.0) > 0:
        used, weights = _judge_weights(tally, null, null_steps, provenance)
        remarks += weights.remarks
    verdict = health(
        whole,
        config,
        series=series if len(steps) > 1 else (),
        diffusion=diffusion,
        null=None if used is None else noise_of(used, is_null=False),  # the weights are judged by `judge_weights`
        judged_against=None if diffusion else weights.judged_against,
    )
    versions = judge_versions(tally.versions, used) if not diffusion else ()
    course = [finding for finding in verdict.findings if finding.code in COURSE]
    implied = () if diffusion else provenance.findings
    routing = () if diffusion else judge_routing(tally.routing, used, in_excess=_in_excess(weights))
    hypotheses = rank_hypotheses(
        pairs=(*found, *implied), profile=(*routing, *weights.findings), series=(*versions, *course)
    )

    # A hypothesis is shown once, and what only measures the mismatch goes under the one that explains it.
    causes = [finding for finding in hypotheses if finding.severity != "note"]
    named = {finding.code for finding in hypotheses}
    others = [finding for finding in (*found, *verdict.findings) if finding.code not in named]
    notes = [finding for finding in (*routing, *weights.findings, *course) if finding.severity == "note"]
    return CheckResult(
        health=replace(
            verdict,
            findings=with_causes((*causes, *others, *notes, *_mixed(tally.origin))),
            not_judged=(
                *_partial(read),
                *(_with_settings(sentence, hypotheses, tally) for sentence in weights.not_judged),
                *verdict.not_judged,
            ),
        ),
        metrics=whole,
        series=series,
        rows=tally.rows,
        files=tuple(str(file) for file in log_files([str(path) for path in paths])),
        train_column=column,
        provenance=provenance,
        config=config,
        remarks=tuple(remarks),
        interrupted=tally.interrupted,
        unreadable=read.unreadable,
        hypotheses=hypotheses,
        profile=tally.profile,
        null=used,
        what_if=tally.presets.rows(),
    )


def _remark(finding: Finding, diffusion: bool) -> str:
    """A finding of the log's validation in a line; of denoising steps without what it says of tokens."""
    if not diffusion:
        return str(finding)
    rows = finding.rows or 0
    return f"{finding.title}" + (f", in {rows:,} picture{'s' * (rows != 1)}" if rows else "")


def _with_settings(sentence: str, hypotheses: Sequence[Finding], tally: Tally) -> str:
    """A sentence on the weights, which says that the settings agree if nothing speaks against it."""
    agrees = sentence.startswith(NOT_JUDGED) and all(finding.severity == "note" for finding in hypotheses)
    agrees = agrees and not tally.profile.ids.repeats  # then settings do not show
    return f"settings agree; {sentence}" if agrees else sentence


def _in_excess(weights: WeightJudgment) -> bool:
    """Whether the comparison with a null found more than noise."""
    return any(finding.severity != "note" for finding in weights.findings)


def _judge_weights(
    tally: Tally, null: MismatchNull | None, null_steps: tuple[int, int] | None, provenance: Provenance
) -> tuple[MismatchNull | None, WeightJudgment]:
    """What the null says about the rows that are judged, and the null that was used."""
    if null is not None:
        try:
            remarks = null.check_origin(tally.origin, largest_id=tally.profile.ids.largest)
        except NullMismatchError:
            # Settings that contradict themselves are the answer, and no null could be measured with them.
            if not tally.claims:
                raise
            unused = f"{null.name} was not used: it is of other settings, and those that this log records are a fault"
            judged = judge_weights(tally.profile, None)
            return None, replace(judged, not_judged=(f"{NOT_JUDGED}: {unused}",) * bool(judged.not_judged))
        judged = judge_weights(tally.profile, null, sample=tally.sample)
        if _in_excess(judged):
            judged = judge_other_rows(null, tally.sample, provenance) or judged
        return null, replace(judged, remarks=(*remarks, *judged.remarks))

    # The steps of the null are not judged by themselves.
    first = first_steps_null(tally, null_steps)
    if first is None:
        return None, judge_weights(tally.profile, None)
    leave_out, start_is_right = null_steps or (min(tally.first), max(tally.first)), null_steps is not None
    judged = judge_weights(
        tally.profile.without(first.profile),
        first,
        sample=tally.sample,
        leave_out=leave_out,
        start_is_right=start_is_right,
    )
    if _in_excess(judged):
        others = judge_other_rows(first, tally.sample, provenance, leave_out=leave_out, start_is_right=start_is_right)
        judged = others or judged
    return first, judged


def _log_findings(tally: Tally, provenance: Provenance, *, diffusion: bool, kept: bool) -> list[Finding]:
    """What the log's validation, its recorded settings and the log-probs themselves add to the verdict."""
    found = [_judged(finding) for finding in tally.findings if finding.code in _ABOUT_THE_POLICIES]

    # Densities may exceed 1 or be 0, and follow no rule of token probabilities.
    if diffusion:
        reason = "a sampler wrote −9999 in place of a log-prob; it is read as missing"
        fix = "store missing log-probs as NaN (null in JSONL); find out why the sampler returned none"
        return [
            replace(finding, reason=reason, fix=fix, limit="0 pictures", tokens=None)
            for finding in found
            if finding.code == "sentinel"
        ]
    found += tally.claims.values()
    return found + [_implied(finding, kept=kept) for finding in provenance.warnings if finding.code in NOT_COMPARABLE]


def _partial(read: LogTally) -> tuple[str, ...]:
    """The sentence that a verdict on part of a log needs."""
    if not read.unreadable:
        return ()
    some = "1 file" if len(read.unreadable) == 1 else f"{len(read.unreadable)} files"
    return (f"this is the verdict on part of the log: {some} could not be read to the end",)


def _mixed(origin: Origin) -> list[Finding]:
    """Several settings, engines or models in one log: what holds for all rows together may not hold for each."""
    mixed = {}
    settings = [json.loads(text) for text in origin.sampling]
    for name in dict.fromkeys(name for one in settings for name in one):
        values = dict.fromkeys(str(one.get(name, "not recorded")) for one in settings)
        if len(values) > 1:
            mixed[name.replace("_", " ")] = tuple(values)
    for name in ("engine", "engine_version", "model"):
        if len(getattr(origin, name)) > 1:
            mixed[name.replace("_", " ")] = getattr(origin, name)
    if not mixed:
        return []
    return [
        Finding(
            code="mixed_settings",
            metric="log/sampling",
            title="the rows were not all sampled alike",
            reason="; ".join(f"{name}: {', '.join(values)}" for name, values in mixed.items()),
            fix="check the rows of each setting by themselves; a fault of some of them is diluted here",
            severity="note",
        )
    ]


def _metrics(part: Part) -> dict[str, float]:
    """The metrics of a part: the registry's, the reward, and what was counted in the raw log-probs."""
    metrics = finalize(part.statistics.read())
    tokens = bare_metrics(metrics).get("token_count", 0.0)
    if part.rewards:
        metrics["reward/mean"] = part.reward / part.rewards
    metrics["log/zero_fraction"] = part.zeros / tokens if tokens else 0.0
    metrics["log/contradicted_zero_count"] = float(part.contradicted)
    share = part.ids.share()
    if share.tokens >= FEW_TOKENS and not part.ids.repeats:
        metrics["log/token_id_share"] = share.share
    return metrics


def _ages(tally: Tally) -> dict[int, dict[str, float]]:
    """Step → the mean age of the weights behind its tokens, where steps and versions are counted alike."""
    ages = {step: {AGE: age} for step, _, age in tally.versions.by_step()}
    return ages if all(age[AGE] >= 0 for age in ages.values()) else {}


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
