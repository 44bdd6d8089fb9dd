"""Regular blocks of tokens: nearly all there are, and cheaper, but only where values can be read without a wait.

A block is regular if every token that counts has finite log-probs, a log-ratio within ±20 and an ordinary log μ. Then
no token is missing, none is capped and none has probability zero: more than half of the passes over the block fall
away. The tokens that count are brought together first, so what is left needs no masks. Any other block is read as on a
device. Whether a block is regular follows from its range; a sum and a square give its spread, unless digits would
cancel.

Arithmetic stays float64, so that results differ from those of the long way by rounding alone. torch has the faster
exponentials, and numpy does the rest: every operation of torch, were it a view, hands the interpreter to another
thread and must wait to have it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.divergence import CAP
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE
from rollcorr.kernels.correction.torch.counted_tokens import CountedTokens, counted_tokens, row_counts
from rollcorr.kernels.correction.torch.table import Block
from rollcorr.kernels.correction.torch.tokens import TokenPass, columns_of

ORDINARY = 40.0
"""Nats: log μ of a regular block lies within ± this, so that μ and μ |e^d − 1| are far from the ends of float64."""

CANCELS = 1e-6
"""A sum of squares around the mean below this share of the one around a fixed center is computed anew."""

HAIR = 1e-9
"""Nats: a log-ratio that is farther than this from a bound on weights is on the same side of it as its exponential."""


SUMMED = frozenset(
    ("valid", "compared", "measured", "capped", "train", "rollout", "log_ratio", "k2", "expm1", "raw", "weight")
)
"""Columns of a sequence that regular blocks give. With another one, every block is read in full."""


class HostTokenPass(TokenPass):
    """As `TokenPass`, for tensors whose values can be read."""

    def __init__(self, config: RolloutCorrectionConfig, sequences: int, device: torch.device, size: int) -> None:
        """As `TokenPass`; a block has `size` tokens where it is read in full, and twice as many where it is regular."""
        super().__init__(config, sequences, device)
        self._size, self._memory = size, np.empty((4, 0))
        self._may_be_regular = may_be_regular(config)
        self._reach = min(CAP, config.safety_bound)
        self._untouched = _untouched(config)

        # What regular blocks give is put together at the end: an operation on a few numbers takes as long as one on a
        # thousand.
        self._found: list[tuple[CountedTokens, dict[str, np.ndarray]]] = []
        self._sums = dict.fromkeys(self._counted_rows(), 0.0)
        self._moments: dict[str, list[tuple[float, float, float]]] = {row: [] for row, _, _ in self._samples}
        self._most_difference = 0.0

    def read(
        self, block: Block, train: Tensor, rollout: Tensor, mask: Tensor, weights: Tensor | None, loss_mask: Tensor
    ) -> None:
        """Read a block; `weights` and `loss_mask` are its outputs."""
        tokens = counted_tokens(mask, block) if self._may_be_regular and mask.numel() else None
        if tokens is not None:
            if tokens.number > self._memory.shape[1]:
                room = max(tokens.number, 2 * self._size)
                self._memory = torch.empty(4, room, dtype=torch.float64, device="cpu").numpy()
            columns = self._memory[:, : tokens.number]
            pi, mu, d, spare = columns
            tokens.take(train, pi, spare)
            tokens.take(rollout, mu, spare)
            with np.errstate(all="ignore"):  # ∞ − ∞ is no matter for a warning: the block is read in full
                np.subtract(pi, mu, out=d)
            smallest, largest = tokens.extremes(d)

            # A NaN is within no bounds. A sequence without tokens has infinite ends, the wrong way round.
            low, high, least, most = (float(x) for x in (smallest.min(), largest.max(), mu.min(), mu.max()))
            if -self._reach <= low <= high <= self._reach and -ORDINARY <= least <= most <= ORDINARY:
                sums, squares = self._read_regular(tokens, columns, low, high)
                tokens.mark(loss_mask)
                if weights is not None and self._config.rollout_is == "token":
                    sums["weight"] = self._weigh_regular(tokens, columns, (low, high), weights, sums, squares)
                elif weights is not None:
                    weights.copy_(loss_mask)  # the sequence's weight is multiplied in at the end
                self._found.append((tokens, sums | {"smallest": smallest, "largest": largest}))
                return

        # In full, a block takes more buffers. Parts of it without the odd token are regular after all.
        step = max(1, self._size // max(1, mask.shape[-1])) if block.lengths is None else self._size
        if len(mask) <= step:
            super().read(block, train, rollout, mask, weights, loss_mask)
            return
        for at, part in block.parts(step):
            of_part = None if weights is None else weights[at]
            self.read(part, train[at], rollout[at], mask[at], of_part, loss_mask[at])

    def finish(self) -> None:
        """Put together what the regular blocks gave."""
        if not self._found:
            return
        device = self._nothing.device
        at = torch.tensor(
            [i for tokens, _ in self._found for i in range(tokens.at.start, tokens.at.stop)], device=device
        )
        counts = [n for tokens, _ in self._found for n in tokens.counts]
        counted = torch.tensor(counts, dtype=STATISTICS_DTYPE, device=device)
        found = {
            name: torch.from_numpy(np.concatenate([of_block[name] for _, of_block in self._found]))
            for name in self._found[0][1]
        }
        self.table.add_counted(at, counted, found)
        self.table.widen("log_ratio", at, found["smallest"], found["largest"])

        merged = [number for parts in self._moments.values() for number in _merged(parts)]
        listed = [*self._sums.values(), *merged, self._most_difference]
        numbers = iter(torch.tensor(listed, dtype=STATISTICS_DTYPE, device=device).unbind())
        for name in self._sums:
            self.rows.add(name, next(numbers))
        for name in self._moments:
            self.rows.moments(name, next(numbers), next(numbers), next(numbers))
        self.rows.extremes("prob_diff_abs", self._nothing, next(numbers))

    def _counted_rows(self) -> list[str]:
        """The sums that blocks leave in the rows. What is capped or saturated is in no regular block."""
        rows = ["prob_diff_abs", "expm1_squares", "abs_log_ratio", "capped_high", "capped_low"]
        rows += ["ratio_above_10pct", "ratio_below_10pct"]
        if self._config.rollout_is == "token":
            rows += ["is_high", "is_low"]
            rows += [] if self._config.safety_bound == CAP else ["saturated_high", "saturated_low"]
        return rows

    def _read_regular(
        self, tokens: CountedTokens, columns: np.ndarray, low: float, high: float
    ) -> tuple[dict[str, np.ndarray], float]:
        """What is known of tokens before they are weighed; returns Σ of columns over sequences, and Σ (e^d − 1)².

        `columns` are log π, log μ, d and room for e^d − 1, (4, n) float64. Four are enough: log π and log μ are written
        over as soon as their sums are known, and e^d − 1 becomes the weight in its place.
        """
        pi, mu, d, expm1 = columns
        sums, total = dict(zip(("train", "rollout", "log_ratio"), tokens.sums(columns[:3]), strict=True)), self._sums
        total["abs_log_ratio"] += float(np.abs(d, out=pi).sum())
        if self._kinds:
            sums["k2"] = 0.5 * tokens.sums(np.square(d, out=pi))
        self._count_beyond("ratio_above_10pct", "ratio_below_10pct", self._ten_percent, (low, high), d)
        mean = float(sums["log_ratio"].sum()) / tokens.number
        self._describe_sample("log_ratio", d, mean, _squares(d), mean, pi)

        of_torch = torch.from_numpy(columns)
        torch.expm1(of_torch[2], out=of_torch[3])
        sums["expm1"], squares = tokens.sums(expm1), _squares(expm1)
        sums["raw"] = sums["expm1"] + tokens.counts
        total["expm1_squares"] += squares

        # |π − μ| = μ |e^d − 1| loses no digits where the two are near. It is taken in float64: ranks of a group cut the
        # tokens into other blocks, and must agree to the last digits.
        of_torch[1].exp_()
        np.abs(np.multiply(mu, expm1, out=mu), out=mu)
        total["prob_diff_abs"] += float(mu.sum())
        self._most_difference = max(self._most_difference, float(mu.max()))
        return sums, squares

    def _weigh_regular(
        self,
        tokens: CountedTokens,
        columns: np.ndarray,
        ends: tuple[float, float],
        out: Tensor,
        sums: dict[str, np.ndarray],
        squares: float,
    ) -> np.ndarray:
        """Token-level weights, in place of e^d − 1; returns their Σ over each sequence.

        Args:
            tokens: which they are.
            columns: as `_read_regular` leaves them.
            ends: the smallest and the largest log-ratio.
            out: the block of weights.
            sums: Σ of e^d − 1 and of e^d over each sequence.
            squares: Σ (e^d − 1)².
        """
        config, n, (work, _, d, weight) = self._config, tokens.number, columns
        self._count_beyond("is_high", "is_low", self._band, ends, d)

        # Spreads are taken around 1. The mean of weights near 0 has no digits there.
        weight += 1.0
        offset = float(sums["expm1"].sum()) / n
        mean = 1.0 + offset if offset > -0.5 else float(weight.sum()) / n
        untouched = config.is_mode == "none" or self._untouched[0] <= ends[0] <= ends[1] <= self._untouched[1]
        for row in ("weight_raw", "weight") if untouched else ("weight_raw",):
            self._describe_sample(row, weight, mean, squares, offset, work)
        if untouched:
            tokens.put(weight, out, work)
            return sums["raw"]

        np.clip(weight, config.rollout_is_floor, config.is_upper, out=weight)
        tokens.put(weight, out, work)
        bounded = tokens.sums(weight)
        mean = float(bounded.sum()) / n
        self._describe_sample("weight", weight, mean, _squares(weight), mean, work)
        return bounded

    def _describe_sample(
        self, row: str, values: np.ndarray, mean: float, squares: float, offset: float, work: np.ndarray
    ) -> None:
        """Note n, mean and M2, given the squares around a center that lies `offset` below the mean."""
        n = values.shape[0]
        m2 = squares - n * offset * offset
        if m2 < CANCELS * squares:
            m2 = _squares(np.subtract(values, mean, out=work))
        if row in self._moments:  # without truncation there is one sample of weights
            self._moments[row].append((float(n), mean, m2))

    def _count_beyond(
        self, above: str, below: str, band: tuple[float, float], ends: tuple[float, float], d: np.ndarray
    ) -> None:
        """Add how many log-ratios are above and below a band to two rows; their ends tell where none is."""
        if ends[1] > band[1]:
            self._sums[above] += np.count_nonzero(d > band[1])
        if ends[0] < band[0]:
            self._sums[below] += np.count_nonzero(d < band[0])


def may_be_regular(config: RolloutCorrectionConfig) -> bool:
    """Whether a configuration lets blocks be regular: it judges no token by itself."""
    judges = any(criterion.scope == "token" for criterion in config.criteria)
    judges |= config.rollout_token_veto_threshold is not None
    judges |= config.rollout_is == "token" and config.is_mode == "icepop"
    return not judges and SUMMED.issuperset(columns_of(config))


def filled_blocks(mask: Tensor, size: int) -> Iterator[Block]:
    """Blocks of whole rows, (B, T), with up to `size` tokens that count, or one row: padding fills no block."""
    counts = row_counts(mask)
    start = number = 0
    for row, count in enumerate(counts):
        if row > start and number + count > size:
            yield Block(slice(start, row), None, counts[start:row])
            start, number = row, 0
        number += count
    yield Block(slice(start, len(counts)), None, counts[start:])


def clear_dropped(kept: Tensor, loss_mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """Clear the tokens of sequences that are not kept, in place; the rest of the loss mask is not read again."""
    dropped, written = np.flatnonzero(~kept.numpy()), loss_mask.detach().numpy()
    if cu_seqlens is None:
        written[dropped] = False
        return
    offsets = cu_seqlens.tolist()
    for i in dropped.tolist():
        written[offsets[i] : offsets[i + 1]] = False


def _squares(values: np.ndarray) -> float:
    """Σ x². In torch, whose dot keeps to the threads that it is given; numpy's does not."""
    values_of_torch = torch.from_numpy(values)
    return float(torch.dot(values_of_torch, values_of_torch))


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
