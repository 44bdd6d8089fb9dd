"""The weights of a log, judged by a null or by its own first steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.health_check import ages_in_words
from rollcorr.diagnostics.health.trend import AGE
from rollcorr.diagnostics.log_check.log_null import first_steps_null
from rollcorr.diagnostics.log_check.tally import FIRST_STEPS, Tally
from rollcorr.diagnostics.null.null_file import MismatchNull, NullMismatchError
from rollcorr.diagnostics.null.other_rows import OtherRows, judge_other_rows
from rollcorr.diagnostics.null.weight_judgment import FACTOR, NOT_JUDGED, WeightJudgment, judge_weights


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
        return _by_null(tally, null, others, courses)
    used, weights = _by_first_steps(tally, null_steps, others, courses)

    # Whoever names the steps has judged them.
    return used, weights if null_steps is not None else _of_one_age(weights, used, ages)


def ordinary(weights: WeightJudgment) -> bool:
    """Whether a null was used, and the comparison leaves nothing to be explained."""
    excess = weights.excess
    return excess is not None and excess.ratio < FACTOR and not in_excess(weights)


def in_excess(weights: WeightJudgment) -> bool:
    """Whether the comparison with a null found more than noise."""
    return any(finding.severity != "note" for finding in weights.findings)


def _by_null(
    tally: Tally, null: MismatchNull, others: OtherRows | None, courses: tuple[Evidence, Evidence]
) -> tuple[MismatchNull | None, WeightJudgment]:
    """By a null that was measured; one of other settings is an error, unless the log's own settings are one."""
    try:
        remarks = null.check_origin(tally.origin, largest_id=tally.profile.ids.largest)
    except NullMismatchError:
        # Settings that contradict themselves are the answer, and no null could be measured with them.
        if not tally.claims:
            raise
        unused = f"{null.name} was not used: it is of other settings, and those that this log records are a fault"
        judged = judge_weights(tally.profile, None)
        return None, replace(judged, not_judged=(f"{NOT_JUDGED}: {unused}",) * bool(judged.not_judged))
    of_others, of_all = courses
    judged = judge_weights(tally.profile, null, sample=tally.sample, course=of_all)
    if in_excess(judged) and others is not None:
        judged = judge_other_rows(null, others, course=of_others) or judged
    return null, replace(judged, remarks=(*remarks, *judged.remarks))


def _by_first_steps(
    tally: Tally,
    null_steps: tuple[int, int] | None,
    others: OtherRows | None,
    courses: tuple[Evidence, Evidence],
) -> tuple[MismatchNull | None, WeightJudgment]:
    """By the first steps of the log, or those that are known to be right; without any, by the token ids alone."""
    # The steps of the null are not judged by themselves.
    first = first_steps_null(tally, null_steps)
    if first is None or first.null is None:
        of_rows = tally.profile if others is None or not others.judgeable else others.alike().profile
        judged = judge_weights(of_rows, None)
        if first is None:
            return None, judged
        steps = f"steps {first.steps[0]} to {first.steps[1]} were not used"
        return None, replace(judged, not_judged=(f"{NOT_JUDGED}: {steps}: {first.remark}",))
    leave_out, start_is_right, (course_of_others, course) = first.steps, null_steps is not None, courses
    judged = judge_weights(
        tally.profile.without(first.profile),
        first.null,
        sample=tally.sample,
        leave_out=leave_out,
        start_is_right=start_is_right,
        course=course,
    )
    if in_excess(judged) and others is not None:
        of_others = judge_other_rows(
            first.null, others, leave_out=leave_out, start_is_right=start_is_right, course=course_of_others
        )
        judged = of_others or judged
    return first.null, replace(judged, remarks=(*judged.remarks, *filter(None, [first.remark])))


def _of_one_age(
    weights: WeightJudgment, used: MismatchNull | None, ages: Mapping[int, Mapping[str, float]]
) -> WeightJudgment:
    """What the first steps tell of a log that is as they are: nothing, where their weights are of several ages."""
    if used is None or used.kind != "first steps" or weights.findings:
        return weights
    first = [ages[step][AGE] for step in sorted(ages)[:FIRST_STEPS]]
    mixed = ages_in_words(first)
    if not mixed:
        return weights
    sentence = f"{NOT_JUDGED}: {used.name} {mixed}; give --null FILE"
    return replace(weights, not_judged=(sentence,), judged_against="")
