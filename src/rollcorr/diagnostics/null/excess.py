"""A log's mismatch against that of a null: how much larger it is, and whether the token id explains more of it.

The null predicts the log's k3 at the log's own probabilities, for noise depends on them more than on anything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile
from rollcorr.diagnostics.null.null_file import MismatchNull
from rollcorr.diagnostics.null.token_share import TokenShare
from rollcorr.diagnostics.numbers import format_number

SYSTEMATIC = 0.1
"""Relative difference of k3 that two nulls of one engine may have beyond chance: other prompts, other batches."""
ROUNDING = 1e-9
"""k3 in nats below which a mismatch is float32 rounding of the log-probs themselves, and no cause is looked for."""
NOTICEABLE = 1.5
"""k3 over that of the null, below which nothing is said about its size."""
MIN_ROWS = 8
"""Fewer rows have no standard error to speak of."""
BIN_TOKENS = 50
"""Tokens of the null that a group of neighboring bins of probabilities needs to predict the log's."""


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
        repeats: the responses repeat few tokens, so that neither the id nor the position tells anything.
        covered: share of the log's tokens that are as probable as `BIN_TOKENS` tokens of the null.
    """

    k3: float
    expected: float
    ratio: float
    z: float
    share: TokenShare
    null_share: TokenShare
    repeats: bool = False
    covered: float = 1.0


def compare_with_null(profile: MismatchProfile, null: MismatchNull) -> Excess:
    """The numbers behind a judgment."""
    expected = expected_k3(profile, null.profile)
    k3 = profile.k3
    ratio = k3 / max(expected, ROUNDING)
    error = math.sqrt(_relative_variance(profile) + _relative_variance(null.profile) + SYSTEMATIC**2)
    share, null_share = profile.share, null.share
    own, of_null = profile.by("surprise")[0], null.profile.by("surprise")[0]
    return Excess(
        k3=k3,
        expected=expected,
        ratio=ratio,
        z=math.log(ratio) / error if ratio > 0 else 0.0,
        share=share,
        null_share=null_share,
        repeats=profile.ids.repeats,
        covered=float(own[of_null >= BIN_TOKENS].sum() / max(own.sum(), 1.0)),
    )


def expected_k3(profile: MismatchProfile, null: MismatchProfile) -> float:
    """k3 per token that the null predicts for tokens as probable as the log's, nats."""
    own = profile.by("surprise")[0]
    return float((own * k3_by_surprise(null)).sum() / own.sum()) if own.sum() else null.k3


def k3_by_surprise(null: MismatchProfile) -> NDArray[np.float64]:
    """k3 per token in each bin of probabilities, nats.

    Improbable tokens are few and hold most of k3, so bins that the null hardly visited are pooled and never left out:
    over the null's own tokens the mean is the null's k3.
    """
    count, _, _, k3 = null.by("surprise")
    return np.full(len(count), null.k3) if count.sum() < BIN_TOKENS else pooled_mean(count, k3)


def pooled_mean(count: NDArray[np.float64], k3: NDArray[np.float64]) -> NDArray[np.float64]:
    """k3 per token in each bin, from its tokens and its Σ k3, with neighbors pooled; `BIN_TOKENS` tokens at least."""
    group = pooled_bins(count)
    mean: NDArray[np.float64] = (np.bincount(group, k3) / np.bincount(group, count))[group]
    return mean


def pooled_bins(count: NDArray[np.float64]) -> NDArray[np.int64]:
    """The number of the group of each bin: neighbors, as many as hold `BIN_TOKENS`, from the improbable end on.

    What is left at the probable end, where k3 is small, joins the last group.
    """
    group = np.zeros(len(count), dtype=np.int64)
    current, held = 0, 0.0
    for place in reversed(range(len(count))):
        if held >= BIN_TOKENS:
            current, held = current + 1, 0.0
        group[place] = current
        held += float(count[place])
    if held < BIN_TOKENS and current:
        group[group == current] = current - 1
    return group


def _relative_variance(profile: MismatchProfile) -> float:
    """Squared relative standard error of the mean k3, rows being independent."""
    table = profile.rows
    rows, total = len(table), float(table.column("sum_k3").sum())
    if rows < MIN_ROWS or total <= 0:
        return 1.0
    tokens = table.column("tokens")
    residual = table.column("sum_k3") - total / tokens.sum() * tokens

    # The table is a sample of the rows; the mean is that of all of them.
    return float((residual**2).sum() / total**2) * rows / max(profile.row_count, rows) * rows / (rows - 1)


def cause(code: str, reason: str, evidence: dict[str, float], *, confidence: float) -> Finding:
    """Return a finding of an excess over a null."""
    limit = f"about {format_number(evidence['expected_k3'])}, the null's" if "expected_k3" in evidence else ""
    return replace(
        fault(code).finding,
        metric="k3_kl",
        value=evidence.get("k3"),
        limit=limit,
        reason=reason,
        confidence=confidence,
        evidence=evidence,
    )
