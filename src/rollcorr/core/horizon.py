"""Weights with a horizon: the log-ratios of near tokens count in full, those of distant tokens exponentially less.

ℓ_t = Σ_s λ^|t−s| d_s over the response tokens of a sequence. λ = 0 gives token weights, λ = 1 sequence weights, and
1 / (1 − λ) is the horizon in tokens. |t − s| counts response tokens: a hole in the mask, such as a tool's answer, adds
no distance. A response token without a log-ratio adds distance, and 0 nats.

Two exponential sums, over earlier and over later tokens, are computed in chunks: a product with λ^|i−j| inside a chunk,
then the sums that chunks pass on. The cost is O(tokens), and every power of λ is at most 1, so nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rollcorr.core.layout import expand, offsets_of, sequence_count, sequence_sum, token_count

CHUNK = 64
"""Tokens in a chunk: few enough that the product is cheap, many enough that sums over chunks cost little."""

NEGLIGIBLE = 1e-40
"""A power of λ that ends the sums: log-ratios of 1e30 nats change nothing beyond it."""

LARGEST = 1e300
"""Nats: limit of |d|, so that no sum overflows. The safety bound of the weights lies far below."""

EFFECTIVE_SEQUENCES = 256
"""Effective sample size, in sequences, that a chosen λ keeps: smaller batches get token weights."""

Gather = Callable[[Tensor], tuple[Tensor, int]]
"""Collects a tensor of every slice, in the order of the tokens: returns (slices, ...) and the index of the own slice.
"""


def horizon_log_weights(
    log_ratio: Tensor, mask: Tensor, *, decay: float, cu_seqlens: Tensor | None = None, gather: Gather | None = None
) -> Tensor:
    """Compute ℓ_t = Σ_s λ^|t−s| d_s over the response tokens of each sequence, nats.

    Args:
        log_ratio: d, nats; 0 on response tokens without a log-ratio, −inf at probability zero. (B, T), or (N,).
        mask: bool, true on response tokens. Same shape.
        decay: λ, in [0, 1].
        cu_seqlens: (B + 1,) token offsets, only when packed.
        gather: optional, if this call has a slice of each sequence. Slices contain consecutive tokens.

    Returns:
        ℓ in float64, without gradient, in the inputs' shape; 0 outside the mask. −inf on a token of probability zero,
        and for λ > 0 on all tokens of its sequence.

    Source: this library.
    """
    zero = mask & (log_ratio == -torch.inf)
    d = log_ratio.detach().double().masked_fill(zero | ~mask, 0.0).clamp(-LARGEST, LARGEST)
    if not mask.numel() and gather is None:
        return d
    sequences = sequence_count(mask, cu_seqlens=cu_seqlens)
    counts, zeros = (token_count(flags, cu_seqlens=cu_seqlens) for flags in (mask, zero))

    # Every sequence starts a chunk, so no sum mixes two sequences. The number of chunks must not depend on values.
    size = min(CHUNK, max(1, mask.numel() // max(1, sequences)))
    chunks = mask.numel() // size + sequences
    offsets = offsets_of((counts + (size - 1)) // size)
    rank = mask.flatten().cumsum(0).view(mask.shape) - 1
    rank = rank - expand(offsets_of(counts)[:-1], mask, cu_seqlens=cu_seqlens)
    place = rank + size * expand(offsets[:-1], mask, cu_seqlens=cu_seqlens)
    place = place.masked_fill(~mask, chunks * size)
    tokens = d.new_zeros(chunks * size + 1).scatter(0, place.flatten(), d.flatten())[:-1].view(chunks, size)

    owner = torch.bucketize(torch.arange(chunks, device=d.device), offsets[1:], right=True)
    within = _chunk_sums(tokens, owner, decay).flatten()
    log_weight = torch.cat([within, within.new_zeros(1)])[place]

    # Add the sums over the tokens of earlier and of later slices; they decay with the distance from this slice's ends.
    if gather is not None:
        last = mask & (rank == expand(counts - 1, mask, cu_seqlens=cu_seqlens))
        ends = [sequence_sum(log_weight, at, cu_seqlens=cu_seqlens) for at in (mask & (rank == 0), last)]
        parts, own = gather(torch.stack([counts.double(), zeros.double(), *ends]))
        before, after, zeros = _sums_of_other_slices(parts, own, decay)
        rest = expand(counts, mask, cu_seqlens=cu_seqlens) - rank
        for steps, passed in ((rank + 1, before), (rest, after)):
            log_weight = log_weight + decay ** steps.double() * expand(passed, mask, cu_seqlens=cu_seqlens)

    # λ^k (−inf) is −inf at any distance, also where the power is too small for a float.
    impossible = zero if decay == 0 else mask & expand(zeros > 0, mask, cu_seqlens=cu_seqlens)
    return log_weight.masked_fill(~mask, 0.0).masked_fill(impossible, -torch.inf)


def chosen_decay(variance: float, sequences: float) -> float:
    """Choose λ = sqrt((V − σ²) / (V + σ²)), with V = log(B / 256); 0 if V ≤ σ².

    ℓ of independent tokens has the variance σ² Σ_k λ^(2|k|) = σ² (1 + λ²) / (1 − λ²). Weights whose ℓ is normal with
    variance V have an effective sample size of B exp(−V). So this is the longest horizon at which it is at least 256.

    Args:
        variance: σ² of d, nats².
        sequences: B.

    Returns:
        λ, rounded to two digits, so that few different values occur.

    Source: this library.
    """
    affordable = math.log(max(sequences, 1.0) / EFFECTIVE_SEQUENCES)
    if affordable <= variance:
        return 0.0
    return round(math.sqrt((affordable - variance) / (affordable + variance)), 2)


def _chunk_sums(tokens: Tensor, owner: Tensor, decay: float) -> Tensor:
    """Return ℓ of every token, (chunks, size), from d, (chunks, size), and the sequence of each chunk, (chunks,).

    Only the last chunk of a sequence may have places without a token, at its end. Their d is 0.
    """
    size = tokens.shape[1]
    place = torch.arange(size, dtype=tokens.dtype, device=tokens.device)
    to_end, to_start = decay ** place.flip(0), decay**place
    log_weight = tokens @ decay ** (place.unsqueeze(-1) - place).abs()

    # `before` is the sum over all earlier chunks, at the last place of the previous chunk; `after` is the sum over all
    # later chunks, at the first place of the next chunk.
    before = _previous_sums(tokens @ to_end, owner, decay**size)
    after = _previous_sums((tokens @ to_start).flip(0), owner.flip(0), decay**size).flip(0)
    return log_weight + decay * torch.outer(before, to_start) + decay * torch.outer(after, to_end)


def _previous_sums(sums: Tensor, owner: Tensor, decay: float) -> Tensor:
    """Return E_{k−1}, with E_k = sum_k + decay E_{k−1} within a sequence: 0 for its first chunk. All are (chunks,)."""
    # Double the number of chunks that a sum covers, until it covers all of them or the rest is negligible.
    reach = 1
    while reach < len(sums) and decay > NEGLIGIBLE:
        same = owner[reach:] == owner[:-reach]
        sums = torch.cat([sums[:reach], sums[reach:] + (decay * sums[:-reach]).where(same, 0.0)])
        reach, decay = 2 * reach, decay * decay
    return torch.cat([sums.new_zeros(1), sums[:-1].where(owner[1:] == owner[:-1], 0.0)])


def _sums_of_other_slices(parts: Tensor, own: int, decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums before and after the own slice, and the number of tokens of probability zero; (B,) each.

    Args:
        parts: (slices, 4, B), in the order of the slices: number of response tokens, number of tokens of probability
            zero, and ℓ of the first and of the last token, computed from the slice only.
        own: index of the own slice.
        decay: λ.
    """
    counts, zeros, firsts, lasts = parts.unbind(1)
    before = after = torch.zeros_like(zeros[0])
    for k in range(own):
        before = decay ** counts[k] * before + lasts[k]
    for k in range(len(parts) - 1, own, -1):
        after = decay ** counts[k] * after + firsts[k]
    return before, after, zeros.sum(0)
