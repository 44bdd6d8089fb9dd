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
from rollcorr.diagnostics.null.weight_judgment import Z
from rollcorr.diagnostics.numbers import format_number

FEW_ROUTED = 200
"""Fewest tokens with different routing for a judgment."""
TIMES = 3.0
"""Ratio of their k3 to k3 of equal routing at the same probability, from which routing matters."""
CARRIES = 0.5
"""Share of all k3 beyond equal routing from which routing is the cause."""


@dataclass(frozen=True, eq=False)
class RoutingSums:
    """Token counts and Σ k3 by probability, for tokens with equal and with different routing; the default is empty.

    Attributes:
        cells: (equal or different routing, tokens or Σ k3, surprise bin), (2, 2, 16).
        by_row: sums over rows, from tokens with different routing: Σ (row's tokens)², Σ (row's k3)², Σ tokens · k3.
        differing: Σ over all tokens of the share of layers that differ.
    """

    cells: Floats = field(default_factory=lambda: np.zeros((2, 2, SURPRISE_BINS)))
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


def routing_excess(sums: RoutingSums) -> dict[str, float]:
    """Compute the excess of tokens with different routing.

    Returns:
        Empty with few tokens of either routing. Else "tokens" with different routing, their "token_share" of the tokens
        with known routing, and mean "k3" in nats; "routing_ratio" of k3 to k3 of equal routing at the same probability,
        with "z", its logarithm in standard errors (rows count as independent, and `SYSTEMATIC` is included);
        "k3_share" of all k3 beyond equal routing; "layer_share", the mean share of the layers that differ.
    """
    (same_count, same_k3), (count, k3) = sums.cells
    tokens, total = float(count.sum()), float(k3.sum())
    if tokens < FEW_ROUTED or same_count.sum() < FEW_TOKENS or total <= 0:
        return {}
    expected = float((count * pooled_mean(same_count, same_k3)).sum())
    if expected <= 0:
        return {}

    # Standard error of a ratio of sums over rows.
    mean = total / tokens
    tokens_square, k3_square, product = sums.by_row.tolist()
    residual = max(k3_square - 2 * mean * product + mean**2 * tokens_square, 0.0)
    error = math.sqrt(residual / total**2 + SYSTEMATIC**2)
    everything = tokens + float(same_count.sum())
    return {
        "tokens": tokens,
        "k3": total / tokens,
        "routing_ratio": total / expected,
        "z": math.log(total / expected) / error,
        "k3_share": (total - expected) / (total + float(same_k3.sum())),
        "token_share": tokens / everything,
        "layer_share": sums.differing / everything,
    }


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
    if not found or found["routing_ratio"] < TIMES or found["z"] < Z:
        return ()
    tokens, k3 = int(found.pop("tokens")), found.pop("k3")
    ratio, z, share = found["routing_ratio"], found["z"], found["k3_share"]
    reason = (
        f"{found['token_share']:.1%} of the tokens were routed to other experts by the trainer. Their k3 is "
        f"{format_number(ratio)} times that of the other tokens at the same probability, and {share:.0%} of all k3 is "
        "due to that"
    )
    is_cause = share >= CARRIES and (null is None or in_excess)
    if null is not None:
        count, total = sums.cells[0]
        expected = float((count * k3_by_surprise(null.profile)).sum())
        same = float(total.sum()) / expected if expected > 0 else math.inf
        is_cause &= same < NOTICEABLE
        reason += f". Where the routing is the same, k3 is {format_number(same)} times what {null.name} predicts"
    finding = replace(
        fault("moe_routing_differs").finding,
        metric="k3_kl",
        value=k3,
        limit=f"below {TIMES:g} times {format_number(k3 / ratio)}, that of the other tokens",
        reason=reason,
        confidence=z**2 / (1 + z**2) * (0.95 if null is not None else 0.8),
        tokens=tokens,
        evidence=found,
    )
    note = replace(finding, title="tokens that are routed to other experts differ more", fix="", severity="note")
    return (finding if is_cause else note,)
