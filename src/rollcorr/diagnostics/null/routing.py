"""Mismatch of tokens that the two sides of a mixture-of-experts model route to different experts.

The router's choice is a step function. If two experts score about equally, rounding decides, and the two sides compute
different functions of the same context. A log that records the share of layers whose experts differ
(`routing_difference`) identifies these tokens. The tokens with equal routing are an internal null: their k3, at the
same probabilities, is the noise of the same experts.

    beyond = Σ_{routing differs} (k3 − k3 of equal routing at the same probability),    share = beyond / Σ k3
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.null.excess import NOTICEABLE, SYSTEMATIC, k3_by_surprise, pooled_mean
from rollcorr.diagnostics.null.mismatch_profile import SURPRISE_BINS, surprise_bins
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull
from rollcorr.diagnostics.null.token_ratios import Floats, TokenRatios, slice_sums
from rollcorr.diagnostics.numbers import format_number

FEW_ROUTED = 200
"""Fewest tokens with different routing for a judgment."""
TIMES = 3.0
"""Ratio of their k3 to k3 of equal routing at the same probability, from which routing matters."""
CARRIES = 0.5
"""Share of all k3 beyond equal routing from which routing is the cause."""
Z = 4.0
"""Standard errors from which a difference is significant."""


def _empty_cells() -> Floats:
    return np.zeros((2, 2, SURPRISE_BINS))


@dataclass(frozen=True, eq=False)
class RoutingSums:
    """Token counts and Σ k3 by probability, for tokens with equal and with different routing; the default is empty.

    Attributes:
        cells: (equal or different routing, tokens or Σ k3, surprise bin), (2, 2, 16).
        by_row: sums over rows, from tokens with different routing: Σ (row's tokens)², Σ (row's k3)², Σ tokens · k3.
        differing: Σ over all tokens of the share of layers that differ.
    """

    cells: Floats = field(default_factory=_empty_cells)
    by_row: Floats = field(default_factory=lambda: np.zeros(3))
    differing: float = 0.0

    @classmethod
    def of(cls, ratios: TokenRatios, difference: NDArray[np.float32]) -> RoutingSums:
        """Compute the sums of a packed batch.

        Args:
            ratios: log-ratios of the batch.
            difference: share of layers whose experts differ, (N,); NaN where unknown.
        """
        known = ratios.valid & (difference >= 0)
        other = known & (difference > 0)
        bins = surprise_bins(ratios.surprise)
        cells = [
            [np.bincount(bins[tokens], weight, SURPRISE_BINS) for weight in (None, ratios.k3[tokens])]
            for tokens in (known & ~other, other)
        ]
        count = slice_sums(other, ratios.lengths)
        k3 = slice_sums(np.where(other, ratios.k3, 0.0), ratios.lengths)
        by_row = np.array([(count * count).sum(), (k3 * k3).sum(), (count * k3).sum()])
        return cls(np.array(cells, dtype=np.float64), by_row, float(difference[known].sum(dtype=np.float64)))

    def merge(self, later: RoutingSums) -> RoutingSums:
        """Return the sums of both parts; `later` comes second."""
        return RoutingSums(self.cells + later.cells, self.by_row + later.by_row, self.differing + later.differing)


@dataclass(frozen=True, kw_only=True)
class RoutingExcess:
    """Excess of the tokens with different routing.

    Attributes:
        tokens: number of tokens with different routing.
        token_share: their share of all tokens with known routing.
        layers: mean share of the layers that differ, over all tokens.
        k3: their mean k3, nats per token.
        ratio: their k3 over k3 of equal routing at the same probability.
        z: log(ratio) in standard errors; rows count as independent, and `SYSTEMATIC` is included.
        share: share of all k3 beyond equal routing.
    """

    tokens: int
    token_share: float
    layers: float
    k3: float
    ratio: float
    z: float
    share: float


def routing_excess(sums: RoutingSums) -> RoutingExcess | None:
    """Compute the excess of tokens with different routing; None with few tokens of either routing."""
    (same_count, same_k3), (count, k3) = sums.cells
    tokens, total = float(count.sum()), float(k3.sum())
    if tokens < FEW_ROUTED or same_count.sum() < FEW_TOKENS or total <= 0:
        return None
    expected = float((count * pooled_mean(same_count, same_k3)).sum())
    if expected <= 0:
        return None

    # Standard error of a ratio of sums over rows.
    mean = total / tokens
    tokens_square, k3_square, product = sums.by_row.tolist()
    residual = max(k3_square - 2 * mean * product + mean**2 * tokens_square, 0.0)
    error = math.sqrt(residual / total**2 + SYSTEMATIC**2)
    everything = tokens + float(same_count.sum())
    return RoutingExcess(
        tokens=int(tokens),
        token_share=tokens / everything,
        layers=sums.differing / everything,
        k3=total / tokens,
        ratio=total / expected,
        z=math.log(total / expected) / error,
        share=(total - expected) / (total + float(same_k3.sum())),
    )


def judge_routing(sums: RoutingSums, null: MismatchNull | None, *, in_excess: bool) -> tuple[Finding, ...]:
    """Judge whether different routing explains the mismatch.

    Args:
        sums: sums of the log.
        null: null that the log was compared with; None without one.
        in_excess: the comparison found more than noise. With a null and no excess, routing is part of its noise.

    Returns:
        A warning if tokens with different routing carry the excess and all other tokens are ordinary; a note if they
        differ more without explaining it; otherwise empty.
    """
    found = routing_excess(sums)
    if found is None or found.ratio < TIMES or found.z < Z:
        return ()
    reason = (
        f"{found.token_share:.1%} of the tokens were routed to other experts by the trainer. Their k3 is "
        f"{format_number(found.ratio)} times that of the other tokens at the same probability, and {found.share:.0%} "
        "of all k3 is due to that"
    )
    carries, ordinary = found.share >= CARRIES, True
    if null is not None:
        same = _ratio_to_null(sums.cells[0], null)
        ordinary = same < NOTICEABLE
        reason += f". Where the routing is the same, k3 is {format_number(same)} times what {null.name} predicts"
    is_cause = carries and ordinary and (null is None or in_excess)
    sure = found.z**2 / (1 + found.z**2)
    finding = replace(
        fault("moe_routing_differs").finding,
        metric="k3_kl",
        value=found.k3,
        limit=f"below {TIMES:g} times {format_number(found.k3 / found.ratio)}, that of the other tokens",
        reason=reason,
        confidence=sure * (0.95 if null is not None else 0.8),
        tokens=found.tokens,
        evidence={
            "routing_ratio": found.ratio,
            "z": found.z,
            "k3_share": found.share,
            "token_share": found.token_share,
            "layer_share": found.layers,
        },
    )
    if is_cause:
        return (finding,)
    return (replace(finding, title="tokens that are routed to other experts differ more", fix="", severity="note"),)


def _ratio_to_null(cells: Floats, null: MismatchNull) -> float:
    """Return k3 of some tokens over the null's k3 at the same probabilities; cells (2, 16)."""
    count, k3 = cells
    expected = float((count * k3_by_surprise(null.profile)).sum())
    return float(k3.sum()) / expected if expected > 0 else math.inf
