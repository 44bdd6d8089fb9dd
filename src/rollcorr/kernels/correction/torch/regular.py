"""Regular blocks of tokens: nearly all there are, and cheaper, but only where values can be read without a wait.

A block is regular if every token that counts has finite log-probs, a log-ratio within ±20 and an ordinary log μ. Then
no token is missing, none is capped and none has probability zero: half of the passes over the block fall away, and the
others need no masks if all of its tokens count. Any other block is read as on a device. Whether a block is regular
follows from its range, which is two passes; a mean and a square give its spread, unless digits would cancel.

Arithmetic stays float64, so that results differ from those of the long way by rounding alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.divergence import CAP
from rollcorr.kernels.correction.torch.table import Block
from rollcorr.kernels.correction.torch.tokens import FAR, TokenPass

ORDINARY = 40.0
"""Nats: log μ of a regular block lies within ± this, so that μ and μ |e^d − 1| are far from the ends of float64."""

CANCELS = 1e-6
"""A sum of squares around the mean below this share of the one around a fixed center is computed anew."""


class Range(NamedTuple):
    """What is known of a block before it is read.

    Attributes:
        tokens: how many of its tokens count.
        whole: whether all do.
        low: the smallest log-ratio, or 0 of a token that does not count.
        high: the largest, likewise.
        ends: the smallest and the largest of each row; None where a 0 that does not count may be one, and when packed.
    """

    tokens: float
    whole: bool
    low: float
    high: float
    ends: tuple[Tensor, Tensor] | None


class HostTokenPass(TokenPass):
    """As `TokenPass`, for tensors whose values can be read."""

    def __init__(self, config: RolloutCorrectionConfig, sequences: int, device: torch.device) -> None:
        super().__init__(config, sequences, device)
        judged = self._judging or config.rollout_token_veto_threshold is not None
        self._may_be_regular = not judged and (config.rollout_is != "token" or config.is_mode != "icepop")
        self._reach = min(CAP, config.safety_bound)
        self._first = 0 if judged else self._columns.index("expm1")  # the columns before it follow from others

    def read(
        self, block: Block, train: Tensor, rollout: Tensor, mask: Tensor, weights: Tensor | None, loss_mask: Tensor
    ) -> None:
        """Read a block; `weights` and `loss_mask` are its outputs."""
        found = self._range(train, rollout, mask) if self._may_be_regular and mask.numel() else None
        if found is None:
            super().read(block, train, rollout, mask, weights, loss_mask)
            return
        scratch = self._scratch
        torch.expm1(scratch("log_ratio"), out=scratch("expm1"))
        squares = self._compare_regular(block, found)
        if weights is not None:
            self._weigh_regular(weights, found)
        loss_mask.copy_(scratch.shaped("valid"))
        for kind in self._kinds:
            self._estimate(kind)
        totals = self.table.add_regular(
            None if found.whole else scratch.shaped("valid"), scratch.columns[self._first :], block
        )
        self._describe_regular(dict(zip(self._columns[self._first :], totals.tolist(), strict=True)), squares, found)

    def _range(self, train: Tensor, rollout: Tensor, mask: Tensor) -> Range | None:
        """Widen the tokens and take their log-ratios, 0 at tokens that do not count; None if one is not regular."""
        scratch = self._scratch
        scratch.fit(mask.shape)
        torch.ne(mask.view(torch.uint8), 0, out=scratch.shaped("valid"))  # a bool's true may be any byte but 0
        scratch.shaped("train").copy_(train)
        scratch.shaped("rollout").copy_(rollout)
        valid, pi, mu = scratch("valid"), scratch("train"), scratch("rollout")

        count = float(valid.sum())
        whole = count == valid.numel()
        if not whole:
            # What stands outside the mask must not decide which way the block is read: the last digits tell.
            spare = scratch("spare").view(torch.bool)[: valid.numel()]
            scratch.log_probs.masked_fill_(torch.eq(valid, 0.0, out=spare), 0.0)

        torch.sub(pi, mu, out=scratch("log_ratio"))
        d = scratch.shaped("log_ratio")
        smallest, largest = d.amin(-1), d.amax(-1)
        of_rows = [smallest, largest] if d.dim() == 2 else [smallest.view(1), largest.view(1)]
        lows, highs = (x.tolist() for x in of_rows)
        regular = all(-self._reach <= low <= high <= self._reach for low, high in zip(lows, highs, strict=True))
        if not regular:
            return None
        least, most = (float(x) for x in torch.aminmax(mu))
        if not -ORDINARY <= least <= most <= ORDINARY:
            return None

        # A 0 that does not count is no end of a row that reaches to both sides of it.
        known = d.dim() == 2 and (whole or (max(lows) < 0 < min(highs)))
        return Range(count, whole, min(lows), max(highs), (smallest, largest) if known else None)

    def _compare_regular(self, block: Block, found: Range) -> float:
        """How far apart the policies are; returns Σ (e^d − 1)²."""
        scratch, rows = self._scratch, self.rows
        d, expm1, work = scratch("log_ratio"), scratch("expm1"), scratch("work")

        # |π − μ| = μ |e^d − 1| loses no digits where the two are near. It is taken in float64: ranks of a group cut the
        # tokens into other blocks, and must agree to the last digits.
        difference = torch.exp(scratch("rollout"), out=scratch("spare")).mul_(expm1).abs_()
        rows.add("prob_diff_abs", self._nothing + difference.sum())
        rows.extremes("prob_diff_abs", self._nothing, self._nothing + difference.amax())

        squares = torch.dot(expm1, expm1)
        rows.add("expm1_squares", squares)
        rows.add("abs_log_ratio", torch.abs(d, out=work).sum())
        rows.add("capped_high", self._nothing)
        rows.add("capped_low", self._nothing)
        low, high = self._ten_percent
        rows.add("ratio_above_10pct", self._count_above(high, found))
        rows.add("ratio_below_10pct", self._count_below(low, found))

        if found.ends is not None:
            self.table.set_extremes("log_ratio", *found.ends, block)
            return float(squares)
        if found.whole:
            self.table.extreme("log_ratio_min", d, block)
            self.table.extreme("log_ratio_max", d, block)
            return float(squares)
        outside = torch.eq(scratch("valid"), 0.0, out=scratch("spare"))
        torch.add(d, outside, alpha=FAR, out=work)
        self.table.extreme("log_ratio_min", scratch.shaped("work"), block)
        torch.sub(d, outside, alpha=FAR, out=work)
        self.table.extreme("log_ratio_max", scratch.shaped("work"), block)
        return float(squares)

    def _weigh_regular(self, out: Tensor, found: Range) -> None:
        """Token-level weights, 0 where nothing is counted. Sequence levels only mark what counts."""
        config, scratch, rows = self._config, self._scratch, self.rows
        if config.rollout_is != "token":
            out.copy_(scratch.shaped("valid"))
            return
        low, high = self._band
        rows.add("is_high", self._count_above(high, found))
        rows.add("is_low", self._count_below(low, found))
        if config.safety_bound != CAP:
            rows.add("saturated_high", self._nothing)
            rows.add("saturated_low", self._nothing)

        weight, valid = scratch("weight"), scratch("valid")
        raw = torch.add(scratch("expm1"), valid, out=weight if config.is_mode == "none" else scratch("raw"))
        if config.is_mode == "truncate":
            torch.clamp(raw, min=config.rollout_is_floor, max=config.is_upper, out=weight)
            if config.rollout_is_floor is not None and not found.whole:
                weight.mul_(valid)
        out.copy_(scratch.shaped("weight"))

    def _describe_regular(self, total: dict[str, float], squares: float, found: Range) -> None:
        """Moments of the samples: squares around a fixed center, moved to the mean where that cancels few digits."""
        scratch, valid = self._scratch, self._scratch("valid")
        names, numbers = [], []
        at_least_one = max(found.tokens, 1.0)
        for row, values, _ in self._samples:
            mean, offset = total[values] / at_least_one, 0.0
            unclipped = values == "raw" or (values == "weight" and self._config.is_mode == "none")
            if unclipped:  # around 1, which Σ (e^d − 1)² is already
                around, offset = squares, total["expm1"] / at_least_one
            else:
                around, offset = float(torch.dot(scratch(values), scratch(values))), mean
            m2 = around - found.tokens * offset * offset
            if m2 < CANCELS * around:
                deviation = torch.addcmul(scratch(values), valid, self._nothing + mean, value=-1.0, out=scratch("work"))
                m2 = float(torch.dot(deviation, deviation))
            names.append(row)
            numbers += [found.tokens, mean, m2]
        parts = iter(torch.tensor(numbers, dtype=torch.float64, device=valid.device).unbind())
        for row in names:
            self.rows.moments(row, next(parts), next(parts), next(parts))

    def _count_above(self, bound: float, found: Range) -> Tensor:
        """How many log-ratios of tokens that count are above a bound, 0-d."""
        if found.high <= bound:
            return self._nothing
        above = torch.gt(self._scratch("log_ratio"), bound, out=self._scratch("work"))
        return above.sum() if found.whole else torch.dot(above, self._scratch("valid"))

    def _count_below(self, bound: float, found: Range) -> Tensor:
        """As `_count_above`, below it."""
        if found.low >= bound:
            return self._nothing
        below = torch.lt(self._scratch("log_ratio"), bound, out=self._scratch("work"))
        return below.sum() if found.whole else torch.dot(below, self._scratch("valid"))
