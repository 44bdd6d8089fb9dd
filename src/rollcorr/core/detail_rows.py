"""Optional rows of statistics (`detail=`): histograms, and the worst entries.

**Histograms** have fixed bins: counts that add up exactly, and quantiles with a known error bound. A bin contains the
values with equal float32 sign, exponent and first five bits of mantissa. There are 32 bins per octave for |x| from
2⁻²⁴ to 2²⁰, one around 0 for smaller values, and one at either end for larger values. No logarithm is computed, so
every device assigns a value to the same bin, and the number of values is unlimited. A quantile has a relative error of
at most 1/65 (`RELATIVE_ERROR`), or an absolute error of 2⁻²⁴ near 0.

**The worst** entries of a sample are those farthest from 0, with their origin, merged exactly. An entry is
(value, sequence, at). The order is total: by |value|, then by sequence, then by `at`. So the worst entries of a batch
are independent of how it was split.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import torch
from torch import Tensor

_MANTISSA_BITS = 5
_EXPONENT_RANGE = (-24, 20)
_BINS_PER_OCTAVE = 1 << _MANTISSA_BITS
_BINS_PER_SIGN = (_EXPONENT_RANGE[1] - _EXPONENT_RANGE[0]) * _BINS_PER_OCTAVE + 1
# Shifted float32 bits of the bin below the smallest one; subtracted, so that bin numbers begin at 1.
_BITS_BELOW_SMALLEST = (_EXPONENT_RANGE[0] + 127) * _BINS_PER_OCTAVE - 1

BINS = 2 * _BINS_PER_SIGN + 1
"""Entries of a histogram: the negative values from the largest down, those around 0, the positive ones."""

RELATIVE_ERROR = 1 / (2 * _BINS_PER_OCTAVE + 1)
"""Largest relative error of a quantile whose absolute value lies between 2⁻²⁴ and 2²⁰."""

TOP = 10
"""How many entries are kept."""


def histogram_of(values: Tensor, mask: Tensor) -> Tensor:
    """Count the values where mask is true in fixed bins: (BINS,) float64.

    Args:
        values: any shape, never NaN where `mask` is true; infinities go to the bins at the ends. Masked values are
            never read.
        mask: bool, same shape.
    """
    seen = values.masked_fill(~mask, 0.0).float().flatten()

    # Use the upper bits of a float32, exponent and start of the mantissa, as the bin number of its magnitude.
    magnitude = (
        (seen.abs().view(torch.int32) >> (23 - _MANTISSA_BITS)).sub_(_BITS_BELOW_SMALLEST).clamp_(0, _BINS_PER_SIGN)
    )
    index = magnitude.mul_(seen.sign().to(torch.int32)).add_(_BINS_PER_SIGN)
    counts = torch.zeros(BINS, dtype=torch.float64, device=values.device)
    return counts.scatter_add_(0, index.to(torch.int64), mask.flatten().to(torch.float64))


def quantile(counts: Sequence[float], q: float, *, absolute: bool = False) -> float:
    """Return the smallest value with a share q of the sample at or below it, up to `RELATIVE_ERROR`.

    Args:
        counts: a histogram on the host, BINS long.
        q: in [0, 1].
        absolute: whether to use |x| instead of x.

    Returns:
        The harmonic mean of the bin's edges; 0 for an empty sample; ±inf where the bin has no outer edge.
    """
    # For |x|, add each negative bin to its mirror image.
    first = -_BINS_PER_SIGN
    if absolute:
        below, above = counts[:_BINS_PER_SIGN], counts[_BINS_PER_SIGN + 1 :]
        counts, first = [counts[_BINS_PER_SIGN], *map(add, reversed(below), above)], 0

    # The factor compensates for rounding, so that 0.99 · 100 selects the 99th of 100.
    reached = list(accumulate(counts))
    rank = max(1.0, math.ceil(q * reached[-1] * (1 - 1e-15)))
    bin_ = bisect_left(reached, rank)
    return _bin_value(first + bin_) if bin_ < len(reached) else 0.0


def _bin_value(bin_: int) -> float:
    if bin_ == 0:
        return 0.0
    step = abs(bin_) - 1
    if step == _BINS_PER_SIGN - 1:
        return math.copysign(math.inf, bin_)
    low, high = _lower_edge(step), _lower_edge(step + 1)
    return math.copysign(2 * low * high / (low + high), bin_)


def _lower_edge(step: int) -> float:
    octave, part = divmod(step, _BINS_PER_OCTAVE)
    return math.ldexp(1 + part / _BINS_PER_OCTAVE, _EXPONENT_RANGE[0] + octave)


def top_indices(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find up to TOP entries with the largest |value| where mask is true; ties keep the first.

    Args:
        values: (N,) with N below 2³²; compared in float32. ±inf counts, NaN must be masked.
        mask: (N,) bool.

    Returns:
        Their indices, (min(TOP, N),) int64, and whether each one exists, bool.
    """
    # The bits of a float ≥ 0 increase with its value, so one integer sorts by value first and by position second.
    bits = values.float().abs().view(torch.int32).to(torch.int64)
    key = (bits << 32) - torch.arange(values.numel(), device=values.device)
    best = key.masked_fill_(~mask, torch.iinfo(torch.int64).min).topk(min(TOP, values.numel())).indices
    return best, mask[best]


def top_entries(values: Tensor, sequence: Tensor, at: Tensor, exists: Tensor) -> Tensor:
    """Return entries as rows (value, sequence, at), (TOP, 3) float64; rows without an entry are (0, −1, −1).

    Args:
        values: (K,) with K up to TOP; stored with the precision of float32, in which they are compared.
        sequence: (K,) index of the sequence.
        at: (K,) additional number about the entry, e.g. its position.
        exists: (K,) bool.
    """
    rows = torch.stack([values.float().to(torch.float64), sequence.to(torch.float64), at.to(torch.float64)], dim=-1)
    nothing = rows.new_zeros(TOP, 3)
    nothing[:, 1:] = -1.0
    return torch.cat([rows.where(exists.unsqueeze(-1), nothing[: len(rows)]), nothing[len(rows) :]])


def merge_tops(parts: Tensor) -> Tensor:
    """Merge entries over the first dimension: (P, …, TOP, 3) → (…, TOP, 3)."""
    rows = parts.movedim(0, -3).flatten(-3, -2)
    value, sequence, at = rows.unbind(-1)

    # Apply three stable sorts, the least significant key first. Rows without an entry come last.
    rank = value.abs().masked_fill(sequence < 0, -1.0)
    order = at.argsort(dim=-1, stable=True)
    order = order.gather(-1, sequence.gather(-1, order).argsort(dim=-1, stable=True))
    order = order.gather(-1, rank.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    return rows.gather(-2, order[..., :TOP].unsqueeze(-1).expand(*order.shape[:-1], TOP, 3))


Entry = tuple[float, int, int]
"""One entry on the host: a value, the sequence's index, and one more fact, e.g. the position."""


def host_entries(rows: list[list[float]]) -> tuple[Entry, ...]:
    """Return the existing entries, worst first."""
    return tuple((value, int(sequence), int(at)) for value, sequence, at in rows if sequence >= 0)


@dataclass(frozen=True)
class WorstToken:
    """A token with a large difference between its two log-probs.

    Attributes:
        log_ratio: d = log π − log μ, nats; −inf where the trainer's probability is zero.
        sequence: the sequence's index in the batch, plus the caller's offset.
        position: its column when padded, its index in the sequence when packed, or its entry of `position_ids`.
    """

    log_ratio: float
    sequence: int
    position: int


@dataclass(frozen=True)
class WorstSequence:
    """A sequence with a large difference between its two likelihoods.

    Attributes:
        log_ratio: S_i = Σ d, nats; −inf with a token of probability zero.
        sequence: its index in the batch, plus the caller's offset.
        tokens: number of tokens in the sum.
    """

    log_ratio: float
    sequence: int
    tokens: int

    @property
    def mean_log_ratio(self) -> float:
        """Return G_i = S_i / c_i, nats per token."""
        return self.log_ratio / self.tokens


@dataclass(frozen=True)
class Worst:
    """The worst tokens and sequences of a batch or a merge, sorted by |log ratio| descending, at most TOP of each."""

    tokens: tuple[WorstToken, ...]
    sequences: tuple[WorstSequence, ...]


def worst_of(tops: Mapping[str, tuple[Entry, ...]]) -> Worst:
    """Convert the rows `tokens` and `sequences` of host statistics to objects. Rows not collected are empty."""
    tokens, sequences = tops.get("tokens", ()), tops.get("sequences", ())
    return Worst(tuple(WorstToken(*entry) for entry in tokens), tuple(WorstSequence(*entry) for entry in sequences))
