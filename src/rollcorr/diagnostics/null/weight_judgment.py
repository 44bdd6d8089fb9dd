"""Judgment of weights from a log and a null: do the two sides have equal weights?

Settings leave patterns in pairs of log-probs; different weights leave none. Two numbers separate weights from noise:
the mismatch relative to a null, at the same probabilities, and the share of Var(d) explained by the token id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.null.excess import MIN_ROWS, NOTICEABLE, ROUNDING, Excess, cause, compare_with_null
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.token_share import TokenShare, TokenSums
from rollcorr.diagnostics.null.weight_causes import name_causes
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pair_sample import FEW_IDS, PairSample

SHARE, WIDE_SHARE = 0.2, 0.3
"""Share of Var(d) explained by the id, above which weights differ at any size of k3: with a vocabulary of up to `WIDE`
ids, and with a larger one. Rounding explains 0.06 in bf16 and 0.13 in int8 of the first, 0.13 and 0.22 of the second:
each row of a large head has its own rounding error."""
WIDE = 1 << 15
LARGE_K3 = 0.01
"""k3 per token, nats, above which a null is doubtful unless a quantized engine is declared: 16 bits round less."""
DOUBTFUL = 0.7
"""Fraction of `share_limit` from which a null is doubtful: 16-bit rounding stays below a third of that limit."""
MORE = 0.05
"""Share beyond the null's share from which the id explains more."""
FACTOR = 3.0
"""Ratio of k3 to the null's from which a log is never reported as healthy."""
Z = 4.0
"""Standard errors from which a difference is significant."""

NOT_JUDGED = "weights not judged"
"""Beginning of the sentence on a log without a null."""
DECLARE = "measure it with equal weights, or declare a quantized engine (rollcorr null --engine-precision int8)"
"""Fix for a doubtful null."""
OF_ALL_TOKENS = ("weights_differ", "noise_without_pattern", "stochastic_trainer", "unknown")
"""Causes of a small excess that an outdated null would show as well."""
AGAIN = "measure the null again: rollcorr null --engine NAME --model DIR --prompts LOG -o NULL"
"""Fix for a null that may not match the policy any more."""
_START = "the start was not judged; give --null FILE, or --null-steps if these steps are known to be right"


@dataclass(frozen=True, kw_only=True)
class WeightJudgment:
    """Judgment of the weights; each field defaults to empty.

    Attributes:
        findings: causes, most likely first, then notes.
        not_judged: questions that could not be judged, with the reason.
        judged_against: label of the null; empty without one.
        remarks: remarks on the comparison for the reader.
        excess: numbers of the comparison; None without a null.
    """

    findings: tuple[Finding, ...] = ()
    not_judged: tuple[str, ...] = ()
    judged_against: str = ""
    remarks: tuple[str, ...] = ()
    excess: Excess | None = None


def judge_weights(
    profile: MismatchProfile,
    null: MismatchNull | None,
    *,
    sample: PairSample | None = None,
    leave_out: tuple[int, int] | None = None,
    start_is_right: bool = True,
    course: Evidence | None = None,
) -> WeightJudgment:
    """Judge whether the two sides have equal weights.

    Args:
        profile: mismatch of the log, or of its rows outside of the null.
        null: null to compare with; None without one.
        sample: complete rows of the log, which separate the causes; defaults to no rows.
        leave_out: first and last step whose rows in the sample form the null; defaults to no steps.
        start_is_right: the null is known to be correct; default True. False: it is the unjudged start of the same run.
        course: metrics over the steps, which refute causes; defaults to no metrics.

    Returns:
        Findings, or the reasons why the weights were not judged.
    """
    if null is None:
        return _without_null(profile, sample)

    excess = compare_with_null(profile, null)
    if _token_id_explains_excess(excess, share_limit(profile)):
        excess = replace(excess, share=share_of(profile, sample, leave_out=leave_out))
    findings, not_judged = _with_null(profile, null, excess, sample or PairSample(), leave_out, course)
    if not start_is_right:
        unchanged = not findings and not not_judged
        not_judged = [f"unchanged since {null.name}; {_START}"] if unchanged else [*not_judged, _START]
    elif not findings and not not_judged and null.doubted:
        findings = [_measure_again(excess, f"{null.name} is doubtful: {null.doubted}", DECLARE)]
        not_judged = [f"{NOT_JUDGED}: {findings[0].reason}; {DECLARE}"]
    elif not findings and not not_judged:
        reason = f"k3 is {format_number(excess.ratio)} times what {null.name} predicts at these probabilities"
        limit = f"below {NOTICEABLE:g} times {format_number(excess.expected)}, the null's"
        row = fault("ordinary_noise").finding
        numbers = _numbers(excess) | {"declared": float(bool(null.engine_precision))}
        findings = [replace(row, metric="k3_kl", value=excess.k3, limit=limit, reason=reason, evidence=numbers)]

    # Report no null if the judgment could not use it, for example because it is small.
    against = "" if any(sentence.startswith(NOT_JUDGED) for sentence in not_judged) else null.label
    return WeightJudgment(findings=tuple(findings), not_judged=tuple(not_judged), judged_against=against, excess=excess)


def _without_null(profile: MismatchProfile, sample: PairSample | None) -> WeightJudgment:
    """Judge the weights by the share of the token id only."""
    share, limit = share_of(profile, sample), share_limit(profile)
    explains = share.share >= max(limit, 2 * share.error) and not profile.ids.repeats
    if profile.share.tokens >= FEW_TOKENS and explains and profile.k3 > ROUNDING:
        reason = (
            f"the token id explains {share.share:.0%} of the variance of the log-ratio; rounding explains less than "
            f"{limit:.0%} at this size of the vocabulary"
        )
        evidence = {"k3": profile.k3, "token_id_share": share.share, "token_id_share_error": share.error}
        finding = cause("weights_differ", reason, evidence, confidence=0.9)
        finding = replace(finding, metric="log/token_id_share", value=share.share, limit=f"below {limit:g}")
        return WeightJudgment(findings=(finding,))

    sentence = (
        f"{NOT_JUDGED}: there is no null, and there are no earlier steps to compare with; "
        "give `rollcorr check` --null FILE (`rollcorr null` writes one), or --null-steps"
    )
    if not profile.share.tokens:
        sentence += ". Without token ids in the log, less can be told"
    elif profile.ids.repeats:
        sentence += f". The responses repeat {profile.ids.effective:.2g} tokens, so less can be told"
    return WeightJudgment(not_judged=(sentence,))


def doubt_of(profile: MismatchProfile, share: TokenShare) -> str:
    """Return the reason why a null is doubtful; empty if it shows no more than a 16-bit engine does."""
    limit = DOUBTFUL * share_limit(profile)
    if profile.k3 > LARGE_K3:
        return f"its k3 of {format_number(profile.k3)} nats is above {LARGE_K3:g}, more than rounding to 16 bits makes"
    enough = profile.share.tokens >= FEW_TOKENS and not profile.ids.repeats
    if enough and share.share - 2 * share.error >= limit:
        return f"the token id explains {share.share:.0%} of its variance, above {limit:.0%}"
    return ""


def unvetted_by_ids(profile: MismatchProfile, share: TokenShare) -> str:
    """Return why token ids cannot separate different weights from noise in a null; empty if they can."""
    effective, distinct = profile.ids.effective, share.tokens < profile.share.tokens
    if not math.isfinite(effective):
        return "without token ids, other weights cannot be told from noise"
    if profile.ids.repeats:
        return f"its responses repeat {effective:.2g} tokens, {FEW_IDS} are needed to tell other weights from noise"
    if distinct and not 2 * share.error < share_limit(profile):
        return "its responses have too few different contexts to tell other weights from noise"
    return ""


def share_of(
    profile: MismatchProfile, sample: PairSample | None, *, leave_out: tuple[int, int] | None = None
) -> TokenShare:
    """Compute the share explained by the id, or that of mean d by context if it is smaller or unknown.

    Rounding noise is a function of the context. In greedy or short responses a few contexts recur in every row, and
    their noise looks like a property of their ids. Contexts are compared only if the share of all tokens could accuse.

    Args:
        profile: mismatch of the log.
        sample: its complete rows; None if there are none.
        leave_out: first and last step whose rows are skipped; defaults to no steps.
    """
    share = profile.share
    if sample is None or share.share + 2 * share.error < DOUBTFUL * share_limit(profile):
        return share
    tokens = [
        (row.response_ids.numpy()[row.known], row.log_ratio, row.contexts[row.known])
        for row in sample.rows.values()
        if row.response_ids is not None and (leave_out is None or not row.within(leave_out))
    ]
    if not tokens:
        return share
    ids, log_ratio, contexts = map(np.concatenate, zip(*tokens, strict=True))
    _, first, context, count = np.unique(contexts, return_index=True, return_inverse=True, return_counts=True)
    mean = np.bincount(context.reshape(-1), log_ratio) / count
    of_contexts = TokenSums.of(ids[first], mean, limit=profile.ids.limit).share()
    return share if share.share <= of_contexts.share else of_contexts


def _with_null(
    profile: MismatchProfile,
    null: MismatchNull,
    excess: Excess,
    sample: PairSample,
    leave_out: tuple[int, int] | None,
    course: Evidence | None,
) -> tuple[list[Finding], list[str]]:
    """Return the causes from the comparison, and the reasons why it could not judge."""
    if null.profile.tokens < FEW_TOKENS or null.profile.row_count < MIN_ROWS:
        few = f"{null.profile.row_count} rows, {null.profile.tokens:,} tokens"
        return [], [f"{NOT_JUDGED}: {null.name} has {few}; {MIN_ROWS} and {FEW_TOKENS:,} are needed"]
    if not profile.tokens:
        return [], []

    larger = excess.ratio >= NOTICEABLE and excess.z >= Z
    by_id = _token_id_explains_excess(excess, share_limit(profile))
    if not larger and not by_id:
        if excess.z <= -Z and excess.expected > ROUNDING:
            return [], [
                f"not judged: k3 is well below the null's ({format_number(excess.ratio)} times what {null.name} "
                "predicts): these are not the log-probs that the null was made of"
            ]
        if excess.ratio >= FACTOR:
            return [], [
                f"cannot tell whether the weights agree: k3 is {format_number(excess.ratio)} times that of "
                f"{null.name}, but from {profile.row_count:,} rows this may be chance; check a longer log"
            ]
        return [], []

    confidence = max(excess.z**2 / (1 + excess.z**2) if larger else 0.0, 0.9 if by_id else 0.0)
    found = name_causes(null, excess, sample, leave_out=leave_out, course=course)

    # A sharper policy, or other prompts, make as large an excess: only the ids could separate weights from these.
    code, reason = found[0].code, f"k3 is {format_number(excess.ratio)} times that of {null.name}: "
    if excess.ratio < FACTOR and not by_id and code in OF_ALL_TOKENS:
        reason += "other weights, or a sharper policy"
    elif excess.covered < min(FACTOR, 0.9 * excess.ratio) and not by_id:  # the null covers a clearly smaller excess
        reason += f"but {format_number(excess.covered)} times at probabilities of which the null has tokens"
    else:
        return [replace(finding, confidence=confidence * (finding.confidence or 1.0)) for finding in found], []
    again = replace(_measure_again(excess, reason, AGAIN), where=found[0].where)
    return [again], [f"{NOT_JUDGED}: {reason}; {AGAIN}"]


def share_limit(profile: MismatchProfile) -> float:
    """Return the share of Var(d) that only different weights reach, given the largest id."""
    return SHARE if profile.ids.largest < WIDE else WIDE_SHARE


def _token_id_explains_excess(excess: Excess, limit: float = SHARE) -> bool:
    """Return whether the token id explains more than in the null, beyond chance.

    A mismatch of about the null's size must reach the limit, or exceed the null by more than half of it: a quantized
    engine errs by token as well, by a share that moves with the weights (0.03 to 0.13 within one run at int8).
    """
    share, null = excess.share, excess.null_share
    if min(share.tokens, null.tokens) < FEW_TOKENS or excess.k3 <= ROUNDING or excess.repeats:
        return False
    error = math.hypot(share.error, null.error)
    beyond = share.share - null.share
    supported = share.share >= limit or excess.ratio >= NOTICEABLE or beyond - 2 * error >= limit / 2
    return supported and beyond >= max(MORE, (Z + 1) * error)


def _measure_again(excess: Excess, reason: str, fix: str) -> Finding:
    """Return the finding that the null must be measured again, with the reason and the fix."""
    row = fault("measure_null_again").finding
    numbers = _numbers(excess)
    return replace(row, severity="note", metric="k3_kl", value=excess.k3, reason=reason, fix=fix, evidence=numbers)


def _numbers(excess: Excess) -> dict[str, float]:
    return {"k3": excess.k3, "expected_k3": excess.expected, "ratio": excess.ratio, "z": excess.z}
