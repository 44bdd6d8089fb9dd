"""The weights of a log, judged by a null or by its own first steps, and what follows from a cause of some rows.

A fault of some rows makes numbers of the whole log wrong, and their course: a shift that begins at a step looks like
weights that changed there. So the rules judge the other rows of the spread sample by themselves. What they do not find
there follows from the cause of the rows; a rise that they do find there is that of the other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from rollcorr.diagnostics.null.other_rows import OtherRows, judge_other_rows, profile_of
from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.diagnostics.null.weight_judgment import FACTOR, NOT_JUDGED, WeightJudgment, judge_weights
from rollcorr.diagnostics.provenance.pair_sample import SampleRow
from rollcorr.diagnostics.provenance.provenance_findings import Provenance


def judge_log_weights(
    tally: Tally,
    null: MismatchNull | None,
    null_steps: tuple[int, int] | None,
    others: OtherRows | None,
    ages: Mapping[int, Mapping[str, float]],
    *,
    course: Evidence,
    course_of_others: Evidence | None,
) -> tuple[MismatchNull | None, WeightJudgment]:
    """What a null says about the rows that are judged, and the null that was used.

    Args:
        tally: of the log.
        null: what to compare it with; None for its own first steps.
        null_steps: of these, those that are known to be right; None for the lowest ones.
        others: the rows that are left where some certainly hold other values; None where none do.
        ages: step → mean age of the weights.
        course: the series of steps, which refutes causes.
        course_of_others: that of the rows that are left; None where they were not judged.

    Raises:
        NullMismatchError: the null is not of the kind of this log.
        BadInputError: the log has no step of those asked for, or no other.
    """
    courses = course_of_others or course, course
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
        judged = _compared(tally, tally.profile, null, others, courses)
        return null, replace(judged, remarks=(*remarks, *judged.remarks))

    # Without a null of any kind the token ids alone are asked.
    first = first_steps_null(tally, null_steps)
    if first is None or first.null is None:
        judged = judge_weights(others.alike().profile if others and others.judgeable else tally.profile, None)
        if first is None:
            return None, judged
        steps = f"steps {first.steps[0]} to {first.steps[1]} were not used"
        return None, replace(judged, not_judged=(f"{NOT_JUDGED}: {steps}: {first.remark}",))

    # The steps of the null are not judged by themselves. Whoever names the steps has judged them.
    rest, known = tally.profile.without(first.profile), null_steps is not None
    judged = _compared(tally, rest, first.null, others, courses, leave_out=first.steps, start_is_right=known)
    judged = replace(judged, remarks=(*judged.remarks, *filter(None, [first.remark])))
    return first.null, judged if known else _of_one_age(judged, first.null, ages)


def ordinary(weights: WeightJudgment) -> bool:
    """Whether a null was used, and the comparison leaves nothing to be explained."""
    excess = weights.excess
    return excess is not None and excess.ratio < FACTOR and not in_excess(weights)


def in_excess(weights: WeightJudgment) -> bool:
    """Whether the comparison with a null found more than noise."""
    return any(finding.severity != "note" for finding in weights.findings)


def _compared(
    tally: Tally,
    profile: MismatchProfile,
    null: MismatchNull,
    others: OtherRows | None,
    courses: tuple[Evidence, Evidence],
    *,
    leave_out: tuple[int, int] | None = None,
    start_is_right: bool = True,
) -> WeightJudgment:
    """By a null; in excess of it, by the other rows, where some certainly hold other values."""
    of_others, of_all = courses
    judged = judge_weights(
        profile, null, sample=tally.sample, leave_out=leave_out, start_is_right=start_is_right, course=of_all
    )
    if others is None or not in_excess(judged):
        return judged
    return (
        judge_other_rows(null, others, leave_out=leave_out, start_is_right=start_is_right, course=of_others) or judged
    )


def _of_one_age(weights: WeightJudgment, used: MismatchNull, ages: Mapping[int, Mapping[str, float]]) -> WeightJudgment:
    """What the first steps tell of a log that is as they are: nothing, where their weights are of several ages."""
    mixed = ages_in_words(ages[step][AGE] for step in sorted(ages)[:FIRST_STEPS])
    if weights.findings or not mixed:
        return weights
    sentence = f"{NOT_JUDGED}: {used.name} {mixed}; give --null FILE"
    return replace(weights, not_judged=(sentence,), judged_against="")


@dataclass(frozen=True, kw_only=True)
class RestVerdict:
    """What the rules find in the other rows.

    Attributes:
        zeros_from: the code of the finding that zeros follow from which one side contradicts; None without any.
        others: the other rows.
        evidence: their metrics over the steps; None where they are too few to be judged.
    """

    zeros_from: str | None
    others: OtherRows
    evidence: Evidence | None

    @cached_property
    def findings(self) -> tuple[Finding, ...] | None:
        """The rules' findings on the other rows; None where they are too few to be judged."""
        return None if self.evidence is None else measured_findings(self.evidence)

    @property
    def ordinary(self) -> bool:
        """Whether the rules find nothing wrong with the mismatch of the other rows."""
        return self.findings is not None and not any(
            finding.severity != "note" and measures(finding) for finding in self.findings
        )

    def attribute(self, findings: Iterable[Finding], *, with_rises: bool = False) -> tuple[Finding, ...]:
        """Findings about all rows: what the other rows do not show follows from the cause, unless it has another one.

        Args:
            findings: about all rows.
            with_rises: if there is a lasting rise, those that the other rows show come first, each in place of that of
                all rows.
        """
        found = [self._attributed(finding) for finding in findings]
        rises = self._rises if with_rises and any(map(is_rise, found)) else ()
        codes = {finding.code for finding in rises}
        return (*rises, *(finding for finding in found if finding.code not in codes))

    @cached_property
    def _rises(self) -> tuple[Finding, ...]:
        """The lasting rises that the other rows show by themselves."""
        return tuple(
            replace(finding, title=f"in the other rows {finding.title}", follows_from=None)
            for finding in self.findings or ()
            if is_rise(finding) and finding.severity != "note"
        )

    def _attributed(self, finding: Finding) -> Finding:
        if finding.code == "contradicted_zeros":
            return replace(finding, follows_from=self.zeros_from)
        measured = measures(finding) or is_rise(finding)
        if self.findings is None or not measured or self._shows(finding, self.findings):
            return finding
        return replace(finding, follows_from=self.others.cause.code)

    def _shows(self, finding: Finding, of_others: Sequence[Finding]) -> bool:
        """Whether the other rows show it too. A rise that they do show has a finding of its own."""
        if is_rise(finding):
            return finding.first_step is None or (not self._rises and self._rises_since(finding.first_step))
        return any(
            (rest.code, rest.metric) == (finding.code, finding.metric)
            and (rest.severity != "note" or finding.severity == "note")
            for rest in of_others
        )

    def _rises_since(self, onset: int) -> bool:
        """Whether k3 of the other rows has risen since a step by more than a metric may rise.

        Few rows show no course to a rule, so what lies before the step and after it is also compared.
        """
        steps = sorted({row.step for row in self.others.rows.values() if row.step is not None})
        before = [step for step in steps if step < onset] or steps[:FIRST_STEPS]
        early, late = (
            profile_of({index: row for index, row in self.others.rows.items() if (row.step in before) == early}).k3
            for early in (True, False)
        )
        return bool(late > RISE_FACTOR * early)


def _zeros_from(provenance: Provenance, cause: Finding) -> str | None:
    """Code of the finding that zeros follow from which one side contradicts, where no other ones are left.

    A row that is shifted, with a pad in place of the value that is missing, has a zero at its end; and where a token is
    certain, its zero stands at the wrong one.
    """
    if provenance.zeros_left != 0:
        return None
    of_rows = cause.code if fault(cause.code).kind == "data" else None
    filled = fault("sentinel").explained_by
    return next((code for code in filled if provenance.finding(code) is not None), of_rows)


def noise_of_log(null: MismatchNull | None, others: OtherRows | None) -> Noise | None:
    """The noise of a token by the null of a log, which is not known to be right; else that of its other rows.

    None without both: what a log shows is noise only where its values are the log-probs of their tokens.
    """
    if null is not None:
        return noise_of(null, is_null=False)
    if others is None or not others.judgeable:
        return None
    sigma = others.alike().profile.std
    return Noise(sigma=sigma, source="as observed in the other rows; the noise itself was not judged")


def judge_rest(
    others: OtherRows,
    provenance: Provenance,
    config: RolloutCorrectionConfig,
    *,
    ages: Mapping[int, Mapping[str, float]],
) -> RestVerdict:
    """Judge the rows that a cause of some rows leaves.

    Args:
        others: the other rows of the spread sample.
        provenance: the estimate of that sample.
        config: what is measured.
        ages: step → the metric of the recorded age of its weights, where that is known.
    """
    others = others.alike()
    evidence = None
    if others.judgeable:
        # A check counts what is missing and goes on.
        config = replace(config, nonfinite="reject_token") if config.nonfinite == "raise" else config
        measured = metrics_of_parts(_parts(others.rows, config), others.profile, ages)
        evidence = evidence_of(measured.whole, config, series=measured.history)
    zeros_from = _zeros_from(provenance, others.cause)
    return RestVerdict(zeros_from=zeros_from, others=others, evidence=evidence)


def _parts(rows: Mapping[int, SampleRow], config: RolloutCorrectionConfig) -> dict[int | None, Part]:
    """What some rows show, step by step."""
    of_step: dict[int | None, list[SampleRow]] = {}
    for row in rows.values():
        of_step.setdefault(row.step, []).append(row)
    return {step: _part(own, config) for step, own in of_step.items()}


def _part(rows: Sequence[SampleRow], config: RolloutCorrectionConfig) -> Part:
    """What the rows of one step show; a sentinel is missing, as in the tally of the log."""
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
