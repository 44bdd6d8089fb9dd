"""The weights behind the other rows, where some rows hold values that are not the log-probs of their tokens.

A shift or a placeholder in a tenth of the rows makes most of k3. It says nothing about the weights, and what the other
rows say would drown in it. So these are compared with the null by themselves, from the spread sample of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from rollcorr.diagnostics.null.excess import MIN_ROWS, ROUNDING, k3_by_surprise
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile, surprise_bins
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.sampled_rows import log_ratios
from rollcorr.diagnostics.null.token_share import FIRST_IDS
from rollcorr.diagnostics.null.weight_judgment import WeightJudgment, judge_weights
from rollcorr.diagnostics.provenance.pair_sample import PairSample, SampleRow
from rollcorr.diagnostics.provenance.provenance_findings import OF_ROWS, Provenance

CERTAIN = 0.99
"""Confidence of a finding of some rows from which the others are judged without them."""
MOSTLY = 0.5
"""Share of a row's tokens from which all of it is left out: of a shifted row one token keeps its value."""
HIT = 20.0
"""k3 of a row over the null's, above which it counts as one more row of the same fault, which was not certain there."""
FEW = 0.25
"""The most of such rows, as a share of those that are certain. More of them are a fault of their own."""


def judge_other_rows(
    null: MismatchNull,
    sample: PairSample,
    provenance: Provenance,
    *,
    leave_out: tuple[int, int] | None = None,
    start_is_right: bool = True,
) -> WeightJudgment | None:
    """What `judge_weights` says of the rows that no certain finding of the log-probs covers.

    Args:
        null: what to compare them with.
        sample: whole rows of the log.
        provenance: the estimate of that sample.
        leave_out: first and last step whose rows are the null's.
        start_is_right: as for `judge_weights`.

    Returns:
        The judgment; None without such a finding, or where too little is left: 8 rows and as many tokens as a null
        needs.
    """
    certain = any(finding.code in OF_ROWS and (finding.confidence or 0.0) >= CERTAIN for finding in provenance.findings)
    if not certain or provenance.misreported is None:
        return None

    rows = {index: sample.rows[index] for index in sorted(sample.rows)}
    parts = provenance.misreported.split([len(row.train) for row in rows.values()])
    others: dict[int, SampleRow] = {}
    for (index, row), covered in zip(rows.items(), parts, strict=True):
        outside = leave_out is None or row.step is None or not leave_out[0] <= row.step <= leave_out[1]
        if outside and _few_of(covered, row.mask.bool()):
            others[index] = row._replace(mask=row.mask.bool() & ~covered)

    # A row in which the fault is not certain would make an excess alone.
    hit = [index for index, row in others.items() if _times(row, null) > HIT]
    if len(hit) <= FEW * (len(rows) - len(others)):
        others = {index: row for index, row in others.items() if index not in hit}
    else:
        hit = []
    profile = _profile_of(others)

    # The first steps of a log know the share of folded ids alone, and exact ids explain more.
    if null.kind == "first steps":
        profile = profile.folded(FIRST_IDS)
    if profile.row_count < MIN_ROWS or profile.tokens < FEW_TOKENS:
        return None

    rest = PairSample(sample.stride, others, sum(len(row.train) for row in others.values()))
    judged = judge_weights(profile, null, sample=rest, leave_out=leave_out, start_is_right=start_is_right)
    remark = (
        f"values that are not the log-probs of their tokens are left out of the comparison with {null.name}, which is "
        f"that of {profile.row_count:,} other rows"
    )
    if hit:
        remark += f"; {len(hit)} more rows with over {HIT:g} times its k3 count as such"
    findings = [
        replace(finding, title=f"in the other rows {finding.title}") if finding.code == "ordinary_noise" else finding
        for finding in judged.findings
    ]
    return replace(judged, findings=tuple(findings), remarks=(*judged.remarks, remark))


def _few_of(covered: Tensor, mask: Tensor) -> bool:
    """Whether less than half of a row's tokens are covered."""
    return float((covered & mask).sum()) < MOSTLY * float(mask.sum())


def _times(row: SampleRow, null: MismatchNull) -> float:
    """k3 of a row over what the null predicts at its probabilities."""
    (log_ratio,) = log_ratios([row])
    if not len(log_ratio):
        return 0.0
    surprise = -row.rollout[row.mask].float().numpy()
    expected = float(k3_by_surprise(null.profile)[surprise_bins(surprise[np.isfinite(surprise)])].mean())
    return float((np.expm1(log_ratio) - log_ratio).mean()) / max(expected, ROUNDING)


def _profile_of(rows: dict[int, SampleRow]) -> MismatchProfile:
    if not rows:
        return MismatchProfile()

    def packed(parts: Sequence[Tensor]) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        return np.concatenate([part.numpy() for part in parts])

    ids = [row.response_ids for row in rows.values()]
    known = [row_ids for row_ids in ids if row_ids is not None]
    return MismatchProfile.of(
        packed([row.train for row in rows.values()]).astype(np.float32),
        packed([row.rollout for row in rows.values()]).astype(np.float32),
        packed([row.mask for row in rows.values()]).astype(np.bool_),
        np.array([len(row.train) for row in rows.values()]),
        ids=packed(known).astype(np.int64) if len(known) == len(rows) else None,
        index=np.array(list(rows)),
    )
