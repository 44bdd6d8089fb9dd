"""Judge the weights of a log by a null or by its first steps, and attribute findings to a cause of some rows.

A fault of some rows distorts metrics of the entire log and their course: a shift that begins at a step looks like
changed weights. So the rules also judge the remaining rows of the spread sample. A finding that disappears there
follows from the cause; a rise that persists there is reported for the remaining rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from rollcorr.config import Finding, RolloutCorrectionConfig
from rollcorr.diagnostics.faults import fault, is_rise, measures
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.health_check import ages_in_words, evidence_of, measured_findings
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.trend import AGE
from rollcorr.diagnostics.health.trend import FACTOR as RISE_FACTOR
from rollcorr.diagnostics.log_check.log_null import first_steps_null
from rollcorr.diagnostics.log_check.log_tally import metrics_of_parts
from rollcorr.diagnostics.log_check.tally import FIRST_STEPS, Part, Tally, part_of, without_sentinels
from rollcorr.diagnostics.null import MismatchNull, MismatchProfile, NullMismatchError, noise_of
from rollcorr.diagnostics.null.other_rows import OtherRows, enough, judge_other_rows, other_rows, profile_of
from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.diagnostics.null.weight_judgment import FACTOR, NOT_JUDGED, WeightJudgment, judge_weights
from rollcorr.diagnostics.provenance.pair_sample import PairSample, SampleRow
from rollcorr.diagnostics.provenance.provenance_findings import Provenance


def judge_log_weights(
    tally: Tally,
    null: MismatchNull | None,
    null_steps: tuple[int, int] | None,
    other_rows: OtherRows | None,
    ages: Mapping[int, Mapping[str, float]],
    *,
    course: Evidence,
    course_of_others: Evidence | None,
) -> tuple[MismatchNull | None, WeightJudgment]:
    """Compare a log with a null, and return the null that was used.

    Args:
        tally: sums of the log.
        null: null to compare with; default: the first steps of the log.
        null_steps: first and last step to use as the null instead, known to be correct; default: the lowest steps.
        other_rows: rows without a certain fault, if a fault of some rows is certain.
        ages: step → mean age of the weights in versions, by metric name.
        course: series of steps, which refutes causes.
        course_of_others: the same for `other_rows`, if they were judged.

    Returns:
        The null, or None, and the judgment of the weights.

    Raises:
        NullMismatchError: the null does not fit this log.
        BadInputError: the log contains none of the requested steps, or no step outside them.
    """
    courses = course_of_others or course, course
    if null is not None:
        try:
            remarks = null.check_origin(tally.origin, largest_id=tally.profile.ids.largest)
        except NullMismatchError:
            # Contradictory settings are a finding already; no null can be measured with them.
            if not tally.claims:
                raise
            unused = f"{null.name} was not used: it is of other settings, and those that this log records are a fault"
            judged = judge_weights(tally.profile, None, sample=tally.sample)
            return None, replace(judged, not_judged=(f"{NOT_JUDGED}: {unused}",) * bool(judged.not_judged))
        judged = _compared(tally, tally.profile, null, other_rows, courses)
        return null, replace(judged, remarks=(*remarks, *judged.remarks))

    # Without any null, only differences by token id can show different weights.
    first = first_steps_null(tally, null_steps)
    if first is None or first.null is None:
        others = other_rows.alike() if other_rows and enough(other_rows.profile) else None
        profile, rows = (others.profile, PairSample(rows=others.rows)) if others else (tally.profile, tally.sample)
        judged = judge_weights(profile, None, sample=rows)
        if first is None:
            return None, judged
        steps = f"steps {first.steps[0]} to {first.steps[1]} were not used"
        return None, replace(judged, not_judged=(f"{NOT_JUDGED}: {steps}: {first.remark}",))

    # Exclude the null's own steps. Steps that the user chose are known to be correct.
    rest, known = tally.profile.without(first.profile), null_steps is not None
    judged = _compared(tally, rest, first.null, other_rows, courses, leave_out=first.steps, start_is_right=known)
    judged = replace(judged, remarks=(*judged.remarks, *filter(None, [first.remark])))

    # Weights of several ages have no common baseline.
    mixed = "" if known else ages_in_words(ages[step][AGE] for step in sorted(ages)[:FIRST_STEPS])
    if mixed and not judged.findings:
        sentence = f"{NOT_JUDGED}: {first.null.name} {mixed}; give --null FILE"
        judged = replace(judged, not_judged=(sentence,), judged_against="")
    return first.null, judged


def in_excess(weights: WeightJudgment) -> bool:
    """Return whether the comparison with a null found more than noise."""
    return any(finding.severity != "note" for finding in weights.findings)


def _compared(
    tally: Tally,
    profile: MismatchProfile,
    null: MismatchNull,
    other_rows: OtherRows | None,
    courses: tuple[Evidence, Evidence],
    *,
    leave_out: tuple[int, int] | None = None,
    start_is_right: bool = True,
) -> WeightJudgment:
    """Compare with a null; if in excess and some rows have a certain fault, judge the remaining rows instead."""
    of_others, of_all = courses
    judged = judge_weights(
        profile, null, sample=tally.sample, leave_out=leave_out, start_is_right=start_is_right, course=of_all
    )
    if other_rows is None or not in_excess(judged):
        return judged
    return (
        judge_other_rows(null, other_rows, leave_out=leave_out, start_is_right=start_is_right, course=of_others)
        or judged
    )


@dataclass(frozen=True, kw_only=True)
class JudgedRows:
    """Result of the comparison with a null, and of the rules on the rows that a cause of some rows does not concern.

    Attributes:
        used: the null, if the log was compared with one.
        weights: judgment of the weights.
        noise: noise of a token, if known.
        other_rows: the remaining rows; None without a cause of some rows.
        evidence: their metrics over the steps; None if there are not enough rows.
        zeros_from: code of the finding that explains zeros which one side contradicts, or None.
    """

    used: MismatchNull | None = None
    weights: WeightJudgment = field(default_factory=WeightJudgment)
    noise: Noise | None = None
    other_rows: OtherRows | None = None
    evidence: Evidence | None = None
    zeros_from: str | None = None

    @cached_property
    def findings(self) -> tuple[Finding, ...] | None:
        """Return the rules' findings on the remaining rows; None if there are not enough rows."""
        return None if self.evidence is None else measured_findings(self.evidence)

    @property
    def explains(self) -> bool:
        """Return whether the remaining rows are ordinary: by the null, else by the rules."""
        if in_excess(self.weights):
            return False
        if self.used is not None:
            excess = self.weights.excess
            return excess is not None and excess.ratio < FACTOR
        of_rules = self.findings
        return of_rules is not None and not any(f.severity != "note" and measures(f) for f in of_rules)

    def attribute(self, findings: Iterable[Finding], *, with_rises: bool = False) -> tuple[Finding, ...]:
        """Attribute findings about all rows: a finding that the remaining rows do not show follows from the cause.

        Args:
            findings: findings about all rows.
            with_rises: if there is a lasting rise, put rises of the remaining rows first, each replacing the same rise
                of all rows.

        Returns:
            The findings, with the cause in `follows_from`.
        """
        if self.other_rows is None:
            return tuple(findings)
        found = [self._attributed(finding, self.other_rows) for finding in findings]
        rises = self._rises if with_rises and any(map(is_rise, found)) else ()
        codes = {finding.code for finding in rises}
        return (*rises, *(finding for finding in found if finding.code not in codes))

    @cached_property
    def _rises(self) -> tuple[Finding, ...]:
        """Return the lasting rises of the remaining rows."""
        return tuple(
            replace(finding, title=f"in the other rows {finding.title}", follows_from=None)
            for finding in self.findings or ()
            if is_rise(finding) and finding.severity != "note"
        )

    def _attributed(self, finding: Finding, other_rows: OtherRows) -> Finding:
        if finding.code == "contradicted_zeros":
            return replace(finding, follows_from=self.zeros_from)
        measured = measures(finding) or is_rise(finding)
        if self.findings is None or not measured:
            return finding

        # Rises of the remaining rows are separate findings.
        if is_rise(finding):
            onset = finding.first_step
            shows = onset is None or (not self._rises and _rises_since(onset, other_rows.rows))
        else:
            shows = any(
                (rest.code, rest.metric) == (finding.code, finding.metric)
                and (rest.severity != "note" or finding.severity == "note")
                for rest in self.findings
            )
        return finding if shows else replace(finding, follows_from=other_rows.cause.code)


def _rises_since(onset: int, rows: Mapping[int, SampleRow]) -> bool:
    """Return whether k3 of some rows has risen since a step by more than a metric may rise.

    A rule detects no course in few rows, so compare k3 before and after the step.
    """
    steps = sorted({row.step for row in rows.values() if row.step is not None})
    before = [step for step in steps if step < onset] or steps[:FIRST_STEPS]
    early, late = (
        profile_of({index: row for index, row in rows.items() if (row.step in before) == early}).k3
        for early in (True, False)
    )
    return bool(late > RISE_FACTOR * early)


def _zeros_from(provenance: Provenance, cause: Finding) -> str | None:
    """Return the code that explains zeros which one side contradicts, if no unexplained zeros remain.

    A shifted row that is padded at its end has a zero there. A certain token's zero then stands at a neighboring token.
    """
    if provenance.zeros_left != 0:
        return None
    of_rows = cause.code if fault(cause.code).kind == "data" else None
    filled = fault("sentinel").explained_by
    return next((code for code in filled if provenance.finding(code) is not None), of_rows)


def judge_rows(
    tally: Tally,
    null: MismatchNull | None,
    null_steps: tuple[int, int] | None,
    provenance: Provenance,
    evidence: Evidence,
    config: RolloutCorrectionConfig,
    *,
    ages: Mapping[int, Mapping[str, float]],
) -> JudgedRows:
    """Judge the weights, and the rows that remain after a cause of some rows.

    Rows with different sampling settings explain the log if its remaining rows are ordinary.

    Args:
        tally: sums of the log.
        null: as in `judge_log_weights`.
        null_steps: as in `judge_log_weights`.
        provenance: estimate from the spread sample of the log.
        evidence: metrics of the log over the steps.
        config: configuration that was measured.
        ages: step → mean age of its weights, by metric name, if recorded.
    """

    def judge(others: OtherRows | None) -> JudgedRows:
        course = zeros_from = noise = None
        kept = None if others is None else others.alike()
        if kept is not None:
            zeros_from = _zeros_from(provenance, kept.cause)
            if enough(kept.profile):
                measured = metrics_of_parts(_sums_by_step(kept.rows, config), kept.profile, ages)
                course = evidence_of(measured.whole, config, series=measured.history)
        used, weights = judge_log_weights(
            tally, null, null_steps, others, ages, course=evidence, course_of_others=course
        )

        # Without a null, only values that are the log-probs of their tokens show noise. The null may be wrong.
        if used is not None:
            noise = noise_of(used, is_null=False)
        elif others is not None and kept is not None and enough(others.profile):
            words = "as observed in the other rows; the noise itself was not judged"
            noise = Noise(sigma=kept.profile.std, source=words)
        return JudgedRows(
            used=used,
            weights=weights,
            noise=noise,
            other_rows=kept,
            evidence=None if course is None else replace(course, noise=noise),
            zeros_from=zeros_from,
        )

    without_own_settings = other_rows(tally.sample, provenance, settings=True)
    if without_own_settings is not None and (judged := judge(without_own_settings)).explains:
        return judged
    return judge(other_rows(tally.sample, provenance))


def _sums_by_step(rows: Mapping[int, SampleRow], config: RolloutCorrectionConfig) -> dict[int | None, Part]:
    """Compute the sums of some rows by step."""
    of_step: dict[int | None, list[SampleRow]] = {}
    for row in rows.values():
        of_step.setdefault(row.step, []).append(row)
    return {step: _part(own, config) for step, own in of_step.items()}


def _part(rows: Sequence[SampleRow], config: RolloutCorrectionConfig) -> Part:
    """Compute the sums of the rows of one step; a sentinel counts as missing, as in the log's tally."""
    mask = torch.cat([row.mask.bool() for row in rows])
    sides = (torch.cat([row.train for row in rows]), torch.cat([row.rollout for row in rows]))
    train, rollout = map(without_sentinels, sides)
    ids = [row.response_ids for row in rows]
    known = [row_ids for row_ids in ids if row_ids is not None]
    ratios = TokenRatios.of(
        train.numpy(),
        rollout.numpy(),
        mask.numpy(),
        np.array([len(row.train) for row in rows]),
        ids=torch.cat(known).numpy().astype(np.int64) if len(known) == len(rows) else None,
    )
    no_rewards = torch.full((len(rows),), torch.nan, device="cpu")
    return part_of(ratios, train, rollout, mask, no_rewards, config)
