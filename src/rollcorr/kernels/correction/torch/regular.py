"""Regular blocks of tokens: nearly all there are, and cheaper, but only where values can be read without a wait.

A block is regular if every token that counts has finite log-probs, a log-ratio within ±20 and an ordinary log μ. Then
no token is missing, none is capped and none has probability zero: more than half of the passes over the block fall
away. The tokens that count are brought together first, so what is left needs no masks. Any other block is read as on a
device. Whether a block is regular follows from its range; a sum and a square give its spread, unless digits would
cancel.

Arithmetic stays float64, so that results differ from those of the long way by rounding alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.divergence import CAP
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE
from rollcorr.kernels.correction.torch.counted_tokens import CountedTokens, counted_tokens
from rollcorr.kernels.correction.torch.table import Block
from rollcorr.kernels.correction.torch.tokens import TokenPass

ORDINARY = 40.0
"""Nats: log μ of a regular block lies within ± this, so that μ and μ |e^d − 1| are far from the ends of float64."""

CANCELS = 1e-6
"""A sum of squares around the mean below this share of the one around a fixed center is computed anew."""

HAIR = 1e-9
"""Nats: a log-ratio that is farther than this from a bound on weights is on the same side of it as its exponential."""


class _Buffers(NamedTuple):
    """float64 memory for the tokens that count, (n,) each, where the long way has its own.

    Four buffers are enough, and few enough to stay in a core's cache: log π and log μ are written over as soon as their
    sums are known, and e^d − 1 becomes the weight in its place.
    """

    train: Tensor
    rollout: Tensor
    log_ratio: Tensor
    expm1: Tensor

    @classmethod
    def of(cls, columns: Tensor, n: int) -> _Buffers:
        """The first columns of a block, (C, rows, T) or (C, tokens), cut to n tokens."""
        return cls(*columns.view(len(columns), -1)[:4, :n].unbind())


class _Found(NamedTuple):
    """What a regular block says about its sequences, (S,) each.

    Attributes:
        tokens: which they are.
        sums: Σ of columns.
        bounded: Σ of the weights, where a bound acts on one of them.
        smallest: log-ratio.
        largest: log-ratio.
    """

    tokens: CountedTokens
    sums: dict[str, Tensor]
    bounded: Tensor | None
    smallest: Tensor
    largest: Tensor


SUMMED = frozenset(
    ("valid", "compared", "measured", "capped", "train", "rollout", "log_ratio", "k2", "expm1", "raw", "weight")
)
"""Columns of a sequence that regular blocks give. With another one, every block is read in full."""


class HostTokenPass(TokenPass):
    """As `TokenPass`, for tensors whose values can be read."""

    def __init__(self, config: RolloutCorrectionConfig, sequences: int, device: torch.device) -> None:
        super().__init__(config, sequences, device)
        judged = self._judging or config.rollout_token_veto_threshold is not None
        known = SUMMED.issuperset(self._columns)
        self._may_be_regular = known and not judged and (config.rollout_is != "token" or config.is_mode != "icepop")
        self._reach = min(CAP, config.safety_bound)
        self._untouched = _untouched(config)

        # What regular blocks give is put together at the end: an operation on a few numbers takes as long as one on a
        # thousand.
        self._found: list[_Found] = []
        self._sums = dict.fromkeys(self._counted_rows(), 0.0)
        self._moments: dict[str, list[tuple[float, float, float]]] = {row: [] for row, _, _ in self._samples}
        self._most_difference = 0.0

    def read(
        self, block: Block, train: Tensor, rollout: Tensor, mask: Tensor, weights: Tensor | None, loss_mask: Tensor
    ) -> None:
        """Read a block; `weights` and `loss_mask` are its outputs."""
        tokens = counted_tokens(mask, block) if self._may_be_regular and mask.numel() else None
        if tokens is not None:
            self._scratch.fit(mask.shape)
            buffers = _Buffers.of(self._scratch.columns, tokens.number)
            tokens.take(train, buffers.train, buffers.expm1)
            tokens.take(rollout, buffers.rollout, buffers.expm1)
            torch.sub(buffers.train, buffers.rollout, out=buffers.log_ratio)
            smallest, largest = tokens.extremes(buffers.log_ratio)
            low, high = self._range(buffers, smallest.tolist(), largest.tolist())
            if low <= high:
                sums, squares = self._read_regular(tokens, buffers, low, high)
                tokens.mark(loss_mask)
                bounded = None
                if weights is not None and self._config.rollout_is == "token":
                    offset = sums["expm1"].sum().item() / tokens.number
                    bounded = self._weigh_regular(tokens, buffers, (low, high), weights, offset, squares)
                elif weights is not None:
                    weights.copy_(loss_mask)  # the sequence's weight is multiplied in at the end
                self._found.append(_Found(tokens, sums, bounded, smallest, largest))
                return
        super().read(block, train, rollout, mask, weights, loss_mask)

    def finish(self) -> None:
        """Put together what the regular blocks gave."""
        if not self._found:
            return
        device = self._nothing.device
        sequences = [i for found in self._found for i in range(found.tokens.at.start, found.tokens.at.stop)]
        at = torch.tensor(sequences, device=device)
        counts = [n for found in self._found for n in found.tokens.counts]
        counted = torch.tensor(counts, dtype=STATISTICS_DTYPE, device=device)
        sums = {name: torch.cat([found.sums[name] for found in self._found]) for name in self._found[0].sums}
        if "weight" in self._columns:
            sums |= self._sums_of_weights(counted, sums["expm1"])
        self.table.add_counted(at, counted, sums)
        ends = (torch.cat([getattr(found, side) for found in self._found]) for side in ("smallest", "largest"))
        self.table.widen("log_ratio", at, *ends)

        merged = [number for parts in self._moments.values() for number in _merged(parts)]
        listed = [*self._sums.values(), *merged, self._most_difference]
        numbers = iter(torch.tensor(listed, dtype=STATISTICS_DTYPE, device=device).unbind())
        for name in self._sums:
            self.rows.add(name, next(numbers))
        for name in self._moments:
            self.rows.moments(name, next(numbers), next(numbers), next(numbers))
        self.rows.extremes("prob_diff_abs", self._nothing, next(numbers))

    def _sums_of_weights(self, counted: Tensor, expm1: Tensor) -> dict[str, Tensor]:
        """Σ of the weights over each sequence, before and after truncation: w = (e^d − 1) + 1, where no bound acts."""
        raw, start = expm1 + counted, 0
        weight = raw.clone()
        for found in self._found:
            end = start + len(found.tokens.counts)
            if found.bounded is not None:
                weight[start:end] = found.bounded
            start = end
        return {"raw": raw, "weight": weight}

    def _counted_rows(self) -> list[str]:
        """The sums that blocks leave in the rows. What is capped or saturated is in no regular block."""
        rows = ["prob_diff_abs", "expm1_squares", "abs_log_ratio", "capped_high", "capped_low"]
        rows += ["ratio_above_10pct", "ratio_below_10pct"]
        if self._config.rollout_is == "token":
            rows += ["is_high", "is_low"]
            rows += [] if self._config.safety_bound == CAP else ["saturated_high", "saturated_low"]
        return rows

    def _range(self, buffers: _Buffers, smallest: list[float], largest: list[float]) -> tuple[float, float]:
        """The ends of the log-ratios of a regular block, given those of its sequences; (inf, −inf) of another."""
        least, most = (x.item() for x in torch.aminmax(buffers.rollout))

        # A NaN is within no bounds. A sequence without tokens has infinite ends, the wrong way round.
        reach = self._reach
        near = all(-reach <= low <= high <= reach or low > high for low, high in zip(smallest, largest, strict=True))
        if not (near and -ORDINARY <= least <= most <= ORDINARY):
            return math.inf, -math.inf
        return min(smallest), max(largest)

    def _read_regular(
        self, tokens: CountedTokens, buffers: _Buffers, low: float, high: float
    ) -> tuple[dict[str, Tensor], float]:
        """What is known of tokens before they are weighed; returns Σ of columns over sequences, and Σ (e^d − 1)²."""
        pi, mu, d, _ = buffers
        sums, total = {"train": tokens.sums(pi), "rollout": tokens.sums(mu), "log_ratio": tokens.sums(d)}, self._sums
        total["abs_log_ratio"] += torch.abs(d, out=pi).sum().item()
        if self._kinds:
            sums["k2"] = tokens.sums(torch.square(d, out=pi).mul_(0.5))
        self._count_beyond("ratio_above_10pct", "ratio_below_10pct", self._ten_percent, (low, high), d, pi)
        mean = sums["log_ratio"].sum().item() / tokens.number
        self._describe_sample("log_ratio", d, mean, torch.dot(d, d).item(), mean, pi)

        expm1 = torch.expm1(d, out=buffers.expm1)
        sums["expm1"], squares = tokens.sums(expm1), torch.dot(expm1, expm1).item()
        total["expm1_squares"] += squares

        # |π − μ| = μ |e^d − 1| loses no digits where the two are near. It is taken in float64: ranks of a group cut the
        # tokens into other blocks, and must agree to the last digits.
        difference = mu.exp_().mul_(expm1).abs_()
        total["prob_diff_abs"] += difference.sum().item()
        self._most_difference = max(self._most_difference, difference.amax().item())
        return sums, squares

    def _weigh_regular(
        self,
        tokens: CountedTokens,
        buffers: _Buffers,
        ends: tuple[float, float],
        out: Tensor,
        offset: float,
        squares: float,
    ) -> Tensor | None:
        """Token-level weights, in place of e^d − 1; returns Σ over each sequence where a bound acts on one of them.

        Args:
            tokens: which they are.
            buffers: d and e^d − 1 of them.
            ends: the smallest and the largest log-ratio.
            out: the block of weights.
            offset: mean of e^d − 1.
            squares: Σ (e^d − 1)².
        """
        config, work, n = self._config, buffers.train, tokens.number
        self._count_beyond("is_high", "is_low", self._band, ends, buffers.log_ratio, work)

        # Spreads are taken around 1. The mean of weights near 0 has no digits there.
        weight = buffers.expm1.add_(1.0)
        mean = 1.0 + offset if offset > -0.5 else weight.sum().item() / n
        untouched = config.is_mode == "none" or self._untouched[0] <= ends[0] <= ends[1] <= self._untouched[1]
        for row in ("weight_raw", "weight") if untouched else ("weight_raw",):
            self._describe_sample(row, weight, mean, squares, offset, work)
        if untouched:
            tokens.put(weight, out, work)
            return None

        weight.clamp_(min=config.rollout_is_floor, max=config.is_upper)
        tokens.put(weight, out, work)
        sums = tokens.sums(weight)
        mean = sums.sum().item() / n
        self._describe_sample("weight", weight, mean, torch.dot(weight, weight).item(), mean, work)
        return sums

    def _describe_sample(
        self, row: str, values: Tensor, mean: float, squares: float, offset: float, work: Tensor
    ) -> None:
        """Note n, mean and M2, given the squares around a center that lies `offset` below the mean."""
        n = values.shape[0]
        m2 = squares - n * offset * offset
        if m2 < CANCELS * squares:
            deviation = torch.sub(values, mean, out=work)
            m2 = torch.dot(deviation, deviation).item()
        if row in self._moments:  # without truncation there is one sample of weights
            self._moments[row].append((float(n), mean, m2))

    def _count_beyond(
        self, above: str, below: str, band: tuple[float, float], ends: tuple[float, float], d: Tensor, work: Tensor
    ) -> None:
        """Add how many log-ratios are above and below a band to two rows; their ends tell where none is."""
        if ends[1] > band[1]:
            self._sums[above] += torch.gt(d, band[1], out=work).sum().item()
        if ends[0] < band[0]:
            self._sums[below] += torch.lt(d, band[0], out=work).sum().item()


def _merged(parts: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """n, mean and M2 of several samples together, as `core.mergeable_statistics.merge_moments` has them."""
    total = sum(n for n, _, _ in parts)
    center = sum(n * mean for n, mean, _ in parts) / total
    return total, center, sum(m2 + n * (mean - center) ** 2 for n, mean, m2 in parts)


def _untouched(config: RolloutCorrectionConfig) -> tuple[float, float]:
    """The log-ratios whose weights no floor and no ceiling changes, nats."""
    floor, ceiling = config.rollout_is_floor, config.is_upper
    low = -math.inf if floor is None else math.log(floor) + HAIR
    return low, math.inf if ceiling is None else math.log(ceiling) - HAIR
