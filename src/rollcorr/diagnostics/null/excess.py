"""Excess of a log's mismatch over a null: its size, and how much more of it the token id explains.

The null predicts the log's k3 at the log's own probabilities, because noise depends on probability most.
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
"""Relative difference of k3 between two nulls of one engine beyond chance: other prompts, other batches."""
ROUNDING = 1e-9
"""k3 in nats below which a mismatch is float32 rounding of the log-probs, and no cause is tested."""
NOTICEABLE = 1.5
"""Ratio of k3 to the null's below which its size is not reported."""
MIN_ROWS = 8
"""Fewest rows for a standard error."""
BIN_TOKENS = 50
"""Fewest null tokens in a group of adjacent probability bins to predict the log's k3."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """Mismatch of a log relative to a null.

    Attributes:
        k3: mean k3 of the log, nats per token.
        expected: k3 predicted by the null at the log's probabilities, nats per token.
        ratio: k3 / expected.
        z: log(ratio) in standard errors; rows count as independent, and `SYSTEMATIC` is included.
        share: share of Var(d) explained by the token id in the log.
        null_share: the same share in the null.
        repeats: True if responses repeat few tokens, so that neither id nor position identifies a cause; default False.
        covered: k3 / expected of the log's tokens in bins where the null has `BIN_TOKENS` tokens or more; default ∞.
    """

    k3: float
    expected: float
    ratio: float
    z: float
    share: TokenShare
    null_share: TokenShare
    repeats: bool = False
    covered: float = math.inf


def compare_with_null(profile: MismatchProfile, null: MismatchNull) -> Excess:
    """Compute the excess of a log's mismatch over a null.

    Args:
        profile: mismatch of the log.
        null: mismatch of two equal policies.

    Returns:
        k3 relative to its prediction, with the standard error, and the shares explained by the token id.
    """
    expected = expected_k3(profile, null.profile)
    k3 = profile.k3
    ratio = k3 / max(expected, ROUNDING)
    error = math.sqrt(_relative_variance(profile) + _relative_variance(null.profile) + SYSTEMATIC**2)
    share, null_share = profile.share, null.share
    own, covered = profile.cells, null.profile.cells[0] >= BIN_TOKENS
    predicted = float((own[0] * k3_by_surprise(null.profile))[covered].sum())
    return Excess(
        k3=k3,
        expected=expected,
        ratio=ratio,
        z=math.log(ratio) / error if ratio > 0 else 0.0,
        share=share,
        null_share=null_share,
        repeats=profile.ids.repeats,
        covered=float(own[3][covered].sum()) / max(predicted, ROUNDING * profile.tokens),
    )


def expected_k3(profile: MismatchProfile, null: MismatchProfile) -> float:
    """Compute the null's k3 at the log's probabilities, nats per token; the null's mean k3 for an empty log."""
    own = profile.cells[0]
    return float((own * k3_by_surprise(null)).sum() / own.sum()) if own.sum() else null.k3


def k3_by_surprise(null: MismatchProfile) -> NDArray[np.float64]:
    """Compute the null's k3 per token in each probability bin, nats, (16,).

    Improbable tokens are rare and make most of k3. Sparse bins are pooled with their neighbors and never dropped, so
    the mean over the null's own tokens equals the null's k3.
    """
    count, _, _, k3 = null.cells
    return np.full(len(count), null.k3) if count.sum() < BIN_TOKENS else pooled_mean(count, k3)


def pooled_mean(count: NDArray[np.float64], k3: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return k3 per token of each bin from token counts and Σ k3, (bins,) each; neighbors pool `BIN_TOKENS` tokens."""
    group = pooled_bins(count)
    return np.asarray((np.bincount(group, k3) / np.bincount(group, count))[group])


def pooled_bins(count: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the group index of each bin, (bins,): adjacent bins with `BIN_TOKENS` tokens, from the improbable end on.

    The remainder at the probable end, where k3 is small, joins the last group.
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
    """Return the squared relative standard error of mean k3, rows being independent; 1 with little data."""
    table = profile.rows
    rows, total = len(table), float(table.column("sum_k3").sum())
    if rows < MIN_ROWS or total <= 0:
        return 1.0
    tokens = table.column("tokens")
    residual = table.column("sum_k3") - total / tokens.sum() * tokens

    # The table samples the rows, but the mean covers every row: scale the variance to all rows.
    return float((residual**2).sum() / total**2) * rows / max(profile.row_count, rows) * rows / (rows - 1)


def cause(code: str, reason: str, evidence: dict[str, float], *, confidence: float) -> Finding:
    """Return the finding of the fault `code` as the cause of an excess over a null."""
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
