"""Judgment of the remaining rows, where some rows contain values that are not the log-probs of their tokens.

A shift or a placeholder in a tenth of the rows makes most of k3. It is no evidence about the weights, and would hide
the evidence of the other rows. These rows of the log's sample are therefore compared with the null separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.null.excess import MIN_ROWS, ROUNDING, k3_by_surprise
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile, surprise_bins
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.token_ratios import k3_of
from rollcorr.diagnostics.null.token_share import FIRST_IDS
from rollcorr.diagnostics.null.weight_judgment import WeightJudgment, judge_weights
from rollcorr.diagnostics.provenance.pair_sample import PairSample, SampleRow
from rollcorr.diagnostics.provenance.provenance_findings import SURE, Provenance

MOSTLY = 0.5
"""Covered share of a row's tokens from which the row is excluded: one token of a shifted row keeps its value."""
HIT = 20.0
"""Ratio of a row's k3 to the null's above which the row counts as hit by the same fault, though not certain there."""
FEW = 0.25
"""Largest number of such rows relative to the certain ones; more of them are a separate fault."""
NOT_OF_THEIR_TOKENS = "values that are not the log-probs of their tokens"
OF_OTHER_SETTINGS = "log-probs of other sampling settings"
WINDOW = 9
"""Rows of the moving window, centered on a row, whose median replaces a null."""


@dataclass(frozen=True, kw_only=True)
class OtherRows:
    """Rows of a sample without the tokens that a certain finding on the log-probs covers.

    Attributes:
        cause: the certain finding; of several, the one with the most tokens.
        rows: row of the log → the row, with a mask of its uncovered tokens.
        left_out: number of excluded rows.
        in_part: number of rows with some excluded tokens.
        every: True if the sample contains all rows of the log.
    """

    cause: Finding
    rows: Mapping[int, SampleRow]
    left_out: int
    in_part: int
    every: bool

    @property
    def held(self) -> str:
        """Return in words which values the excluded rows contain."""
        return OF_OTHER_SETTINGS if fault(self.cause.code).kind == "settings" else NOT_OF_THEIR_TOKENS

    @property
    def profile(self) -> MismatchProfile:
        """Compute the mismatch profile of these rows."""
        return profile_of(self.rows)

    def outside(self, steps: tuple[int, int] | None) -> OtherRows:
        """Return these rows without the rows of some steps, given as (first, last)."""
        if steps is None:
            return self
        return replace(self, rows={index: row for index, row in self.rows.items() if not row.within(steps)})

    def alike(self) -> OtherRows:
        """Return these rows without the few that the same fault probably hit, although it is not certain there.

        They stand out from neighboring rows of the log, which have the same weights.
        """
        k3 = np.array([_mean_k3(row) for row in self.rows.values()])
        if len(k3) < WINDOW:
            return self
        around = np.lib.stride_tricks.sliding_window_view(np.pad(k3, WINDOW // 2, mode="symmetric"), WINDOW)
        usual = np.maximum(np.median(around, axis=1), ROUNDING)
        return self._without([index for index, hit in zip(self.rows, k3 > HIT * usual, strict=True) if hit])

    def _without(self, hit: Sequence[int]) -> OtherRows:
        """Return these rows without the rows `hit`; unchanged if there are enough of them for a separate fault."""
        if len(hit) > FEW * self.left_out:
            return self
        return replace(
            self,
            rows={index: row for index, row in self.rows.items() if index not in hit},
            left_out=self.left_out + len(hit),
        )


def other_rows(sample: PairSample, provenance: Provenance, *, settings: bool = False) -> OtherRows | None:
    """Return the remaining rows of a sample; None if no finding on some rows is certain.

    Args:
        sample: complete rows of the log.
        provenance: estimate of that sample.
        settings: also exclude rows with their own sampling settings; returns None without such rows. Default False.
            Different weights can look like settings in some rows, so settings explain a log only if its other rows are
            ordinary.
    """
    sure = [
        finding for finding in provenance.findings if finding.severity != "note" and (finding.confidence or 0.0) >= SURE
    ]
    of_settings = [
        finding
        for finding in sure
        if (fault(finding.code).kind, fault(finding.code).part) == ("settings", "log") and finding.first_row is not None
    ]
    certain = [finding for finding in sure if fault(finding.code).kind == "data"]
    left_out = provenance.misreported
    if settings:
        if not of_settings or left_out is None or provenance.of_settings is None:
            return None
        certain += of_settings
        left_out = left_out | provenance.of_settings
    if not certain or left_out is None:
        return None
    rows = {index: sample.rows[index] for index in sorted(sample.rows)}
    parts = left_out.split([len(row.train) for row in rows.values()])
    others: dict[int, SampleRow] = {}
    in_part = 0
    for (index, row), covered in zip(rows.items(), parts, strict=True):
        mask, hit = row.mask.bool(), int((covered & row.mask.bool()).sum())
        if hit < MOSTLY * int(mask.sum()):
            others[index] = row._replace(mask=mask & ~covered)
            in_part += hit > 0
    return OtherRows(
        cause=max(certain, key=lambda finding: finding.tokens or 0),
        rows=others,
        left_out=len(rows) - len(others),
        in_part=in_part,
        every=sample.stride == 1,
    )


def judge_other_rows(
    null: MismatchNull,
    others: OtherRows,
    *,
    leave_out: tuple[int, int] | None = None,
    start_is_right: bool = True,
    course: Evidence | None = None,
) -> WeightJudgment | None:
    """Judge the weights with `judge_weights` from the rows that no certain finding on the log-probs covers.

    Args:
        null: null to compare with.
        others: the rows to judge.
        leave_out: first and last step whose rows form the null; defaults to no steps.
        start_is_right: as in `judge_weights`; default True.
        course: metrics of these rows over the steps; defaults to no metrics.

    Returns:
        The judgment; None below 8 rows or with fewer tokens than a null needs.
    """
    # A single row with an uncertain fault can make an excess.
    certain = others.left_out
    others = others.outside(leave_out)
    others = others._without([index for index, row in others.rows.items() if _ratio_to_null(row, null) > HIT])
    profile = others.profile

    # A null of first steps has folded ids, and exact ids would explain more.
    if null.kind == "first steps":
        profile = profile.folded(FIRST_IDS)
    if not enough(profile):
        return None

    rest = PairSample(1, others.rows, sum(len(row.train) for row in others.rows.values()))
    judged = judge_weights(
        profile, null, sample=rest, leave_out=leave_out, start_is_right=start_is_right, course=course
    )
    findings = [
        replace(finding, title=f"in the other rows {finding.title}") if finding.code == "ordinary_noise" else finding
        for finding in judged.findings
    ]
    not_judged = [
        f"the other rows are {sentence}" if sentence.startswith("unchanged") else sentence
        for sentence in judged.not_judged
    ]
    remark = _remark(others, profile, certain, against=null.name, outside=leave_out)
    return replace(judged, findings=tuple(findings), not_judged=tuple(not_judged), remarks=(*judged.remarks, remark))


def _remark(
    others: OtherRows, profile: MismatchProfile, certain: int, *, against: str, outside: tuple[int, int] | None
) -> str:
    """Return a remark on which rows were compared and which were excluded."""
    of_sample = "" if others.every else " of the sample"
    parts = []
    if certain:
        parts.append(f"{_rows(certain)}{of_sample} hold{'s' * (certain == 1)} {others.held}")
    if others.in_part:
        parts.append(f"single values are left out of {_rows(others.in_part)}{'' if certain else of_sample}")
    compared = f"{'the other' if certain else 'the'} {_rows(profile.row_count)}"
    if outside is None:
        compared += f" were compared with {against}"
    else:
        after = all(row.step is None or row.step > outside[1] for row in others.rows.values())
        compared += f" {'after' if after else 'outside of'} steps {outside[0]} to {outside[1]} were compared with these"
    hit = others.left_out - certain
    if hit:
        compared += f", without {hit} more with over {HIT:g} times their k3"
    return "; ".join([*parts, compared])


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def enough(profile: MismatchProfile) -> bool:
    """Return whether a profile has the rows and tokens that a judgment of weights needs."""
    return profile.row_count >= MIN_ROWS and profile.tokens >= FEW_TOKENS


def _mean_k3(row: SampleRow) -> float:
    """Return mean k3 per token of a row, nats; 0 without tokens."""
    log_ratio = row.log_ratio
    return float(k3_of(log_ratio).mean()) if len(log_ratio) else 0.0


def _ratio_to_null(row: SampleRow, null: MismatchNull) -> float:
    """Return k3 of a row over the null's prediction at its probabilities."""
    known = row.known
    if not len(known):
        return 0.0
    expected = float(k3_by_surprise(null.profile)[surprise_bins(-row.rollout.float().numpy()[known])].mean())
    return _mean_k3(row) / max(expected, ROUNDING)


def profile_of(rows: Mapping[int, SampleRow]) -> MismatchProfile:
    """Compute the mismatch profile of some rows of a log."""
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
