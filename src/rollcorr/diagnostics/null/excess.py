"""What a log shows beyond a null: are the weights of the two sides the same?

Settings leave patterns in pairs of log-probs; other weights leave none. Two numbers tell them from noise: the mismatch
against that of a null, at the same probabilities, and the share of Var(d) that the token id explains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.row_table import RowTable
from rollcorr.diagnostics.null.token_share import TokenShare
from rollcorr.diagnostics.numbers import format_number

SHARE = 0.2
"""Share of Var(d) that the id explains, above which the weights differ whatever the size: rounding explains 0.05."""
FACTOR = 3.0
"""k3 over that of the null, from which a log is never called healthy."""
NOTICEABLE = 1.5
"""k3 over that of the null, below which nothing is said about its size."""
SYSTEMATIC = 0.1
"""Relative difference of k3 that two nulls of one engine may have beyond chance: other prompts, other batches."""
Z = 4.0
"""Standard errors from which a difference is believed."""
ROUNDING = 1e-9
"""k3 in nats below which a mismatch is float32 rounding of the log-probs themselves, and no cause is looked for."""
MIN_ROWS = 8
"""Fewer rows have no standard error to speak of."""
BIN_TOKENS = 50
"""Tokens of the null that a bin of probabilities needs to predict the log's."""

_START = "the start was not judged; give --null FILE, or --null-steps if these steps are known to be right"
_FIX = (
    "check the weight sync: every parameter (output head, tied and renamed ones, adapters), its version at the time of "
    "sampling, and a quantization of the sampler"
)


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A log's mismatch against a null.

    Attributes:
        k3: of the log, nats per token.
        expected: what the null predicts at the log's probabilities, nats per token.
        ratio: k3 / expected.
        z: log ratio in standard errors, rows being independent, `SYSTEMATIC` included.
        share: what the token id explains in the log.
        null_share: and in the null.
        excess_share: what it explains of the variance beyond the null's; NaN where there is none.
    """

    k3: float
    expected: float
    ratio: float
    z: float
    share: TokenShare
    null_share: TokenShare
    excess_share: float


@dataclass(frozen=True, kw_only=True)
class WeightJudgment:
    """What can be said about the weights.

    Attributes:
        findings: causes, most likely first, then notes.
        not_judged: what could not be judged, and why.
        judged_against: the null; empty without one.
        remarks: what the reader should know about the comparison.
        excess: its numbers; None without a null.
    """

    findings: tuple[Finding, ...] = ()
    not_judged: tuple[str, ...] = ()
    judged_against: str = ""
    remarks: tuple[str, ...] = ()
    excess: Excess | None = None


def judge_weights(
    profile: MismatchProfile, null: MismatchNull | None, *, start_is_right: bool = True
) -> WeightJudgment:
    """Say whether the two sides have the same weights.

    Args:
        profile: the mismatch of the log, or of its rows that are not the null.
        null: what to compare it with; None where there is nothing.
        start_is_right: the null is known to be right. False: it is the start of the same run, which nobody judged.
    """
    if null is None:
        return _without_null(profile)

    excess = compare_with_null(profile, null)
    findings, not_judged = _with_null(profile, null, excess)
    if not start_is_right:
        unchanged = not findings and not not_judged
        not_judged = [f"unchanged since {null.name}; {_START}"] if unchanged else [*not_judged, _START]
    elif not findings and not not_judged:
        findings = [_ordinary_noise(excess, null)]
    return WeightJudgment(
        findings=tuple(findings), not_judged=tuple(not_judged), judged_against=null.name, excess=excess
    )


def compare_with_null(profile: MismatchProfile, null: MismatchNull) -> Excess:
    """The numbers behind a judgment."""
    expected = expected_k3(profile, null.profile)
    k3 = profile.k3
    ratio = k3 / max(expected, ROUNDING)
    error = math.sqrt(_relative_variance(profile) + _relative_variance(null.profile) + SYSTEMATIC**2)
    share, null_share = profile.share, null.share
    more = share.variance - null_share.variance
    return Excess(
        k3=k3,
        expected=expected,
        ratio=ratio,
        z=math.log(ratio) / error if ratio > 0 else 0.0,
        share=share,
        null_share=null_share,
        excess_share=(share.between - null_share.between) / more if more > 0 else math.nan,
    )


def expected_k3(profile: MismatchProfile, null: MismatchProfile) -> float:
    """k3 per token that the null predicts for tokens as probable as the log's, nats."""
    count, _, _, k3 = null.by("surprise")
    own = profile.by("surprise")[0]

    # Bins that the null hardly visited take the mean of the nearest that it did.
    filled = np.flatnonzero(count >= BIN_TOKENS)
    if not len(filled) or not own.sum():
        return null.k3
    nearest = filled[np.abs(np.arange(len(count))[:, None] - filled).argmin(1)]
    return float((own * (k3[nearest] / count[nearest])).sum() / own.sum())


def _without_null(profile: MismatchProfile) -> WeightJudgment:
    """The share alone speaks."""
    share = profile.share
    explains = share.share >= SHARE and share.share - 3 * share.error >= SHARE / 2
    if share.tokens >= FEW_TOKENS and explains and profile.k3 > ROUNDING:
        reason = (
            f"the token id explains {share.share:.0%} of the variance of the log-ratio; rounding explains 5 % at most, "
            "other weights 20 % and more"
        )
        finding = _weights_differ(reason, share, confidence=0.9, evidence={"k3": profile.k3})
        return WeightJudgment(findings=(finding,))

    why = "it has no null, and no first steps to compare with"
    if not share.tokens:
        why += ", and no token ids"
    sentence = (
        f"settings agree; weights not judged: {why}; give --null FILE (`rollcorr null` writes it) or --null-steps"
    )
    return WeightJudgment(not_judged=(sentence,))


def _with_null(profile: MismatchProfile, null: MismatchNull, excess: Excess) -> tuple[list[Finding], list[str]]:
    """The causes that the comparison names, and what it could not judge."""
    if null.profile.tokens < FEW_TOKENS or null.profile.row_count < MIN_ROWS:
        few = f"{null.profile.row_count} rows, {null.profile.tokens:,} tokens"
        return [], [f"weights not judged: {null.name} has {few}; {MIN_ROWS} and {FEW_TOKENS:,} are needed"]
    if not profile.tokens:
        return [], []

    evidence = {"k3": excess.k3, "expected_k3": excess.expected, "ratio": excess.ratio, "z": excess.z}
    larger = excess.ratio >= NOTICEABLE and excess.z >= Z
    by_id = _id_explains_more(excess)
    if not larger and not by_id:
        if excess.ratio >= FACTOR:
            return [], [
                f"cannot tell whether the weights agree: k3 is {format_number(excess.ratio)} times that of "
                f"{null.name}, but from {profile.row_count:,} rows this may be chance; check a longer log"
            ]
        return [], []

    times = f"k3 is {format_number(excess.ratio)} times what {null.name} predicts at these probabilities"
    if excess.share.tokens:
        times += (
            f", and the token id explains {excess.share.share:.0%} of the variance (null {excess.null_share.share:.0%})"
        )
    confidence = max(excess.z**2 / (1 + excess.z**2) if larger else 0.0, 0.9 if by_id else 0.0)
    return [_weights_differ(times, excess.share, confidence=confidence, evidence=evidence)], []


def _id_explains_more(excess: Excess) -> bool:
    """Whether the token id explains more than in the null, beyond chance."""
    share, null = excess.share, excess.null_share
    if min(share.tokens, null.tokens) < FEW_TOKENS or excess.k3 <= ROUNDING:
        return False
    error = math.hypot(share.error, null.error)
    return share.share >= SHARE and share.share - null.share >= max(SHARE / 2, Z * error)


def _weights_differ(reason: str, share: TokenShare, *, confidence: float, evidence: dict[str, float]) -> Finding:
    if share.tokens:
        evidence = {**evidence, "token_id_share": share.share, "token_id_share_error": share.error}
    return Finding(
        code="weights_differ",
        metric="log/token_id_share" if "ratio" not in evidence else "k3_kl",
        title="the weights of the sampler and of the trainer differ",
        value=evidence.get("ratio", evidence.get("token_id_share")),
        limit=f"below {NOTICEABLE:g} × the null" if "ratio" in evidence else f"below {SHARE:g}",
        reason=reason,
        fix=_FIX,
        confidence=confidence,
        evidence=evidence,
        confirm="score a few of these rows with the sampler's own weights: the excess vanishes",
    )


def _ordinary_noise(excess: Excess, null: MismatchNull) -> Finding:
    return Finding(
        code="ordinary_noise",
        metric="k3_kl",
        title="the mismatch is the ordinary noise of this engine",
        value=excess.ratio,
        limit=f"below {NOTICEABLE:g} × the null",
        reason=f"k3 is {format_number(excess.ratio)} times what {null.name} predicts at these probabilities",
        severity="note",
        evidence={"k3": excess.k3, "expected_k3": excess.expected, "ratio": excess.ratio, "z": excess.z},
    )


def _relative_variance(profile: MismatchProfile) -> float:
    """Squared relative standard error of the mean k3, rows being independent."""
    table: RowTable = profile.rows
    rows, total = len(table), float(table.column("sum_k3").sum())
    if rows < MIN_ROWS or total <= 0:
        return 1.0
    tokens = table.column("tokens")
    residual = table.column("sum_k3") - total / tokens.sum() * tokens

    # The table is a sample of the rows; the mean is that of all of them.
    return float((residual**2).sum() / total**2) * rows / max(profile.row_count, rows) * rows / (rows - 1)
