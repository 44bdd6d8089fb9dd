"""Weights with a horizon: the log-ratios of near tokens count in full, those of distant tokens exponentially less.

ℓ_t = Σ_s λ^|t−s| d_s over the response tokens of a sequence, or of a turn. λ = 0 is token weights, λ = 1 sequence
weights, and 1 / (1 − λ) is the horizon in tokens. |t − s| counts response tokens: a hole in the mask, such as a tool's
answer, adds no distance. A response token without a log-ratio adds distance, and 0 nats.

Two recurrences E_t = d_t + a_t E_{t−1} compute it, over earlier and over later tokens. The factor a_t is λ on a
response token. On a hole it is 1, so that sums pass it, or 0, so that they end with the turn. All chunks of a few
tokens run at once, then the sums that chunks pass on. The cost is O(tokens), and no factor exceeds 1, so nothing
overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollcorr.core.layout import expand, sequence_count, sequence_sum, token_count

CHUNK = 16
"""Tokens in a chunk: its steps run one after another, and passing sums on costs a sixteenth of the work."""

LARGEST = 1e300
"""Nats: limit of |d|, so that no sum overflows. The safety bound of the weights lies far below."""

EFFECTIVE_SEQUENCES = 256
"""Effective sample size, in sequences, that a chosen λ keeps: smaller batches get token weights."""

Gather = Callable[[Tensor], tuple[Tensor, int]]
"""Collects a tensor of every slice, in the order of the tokens: returns (slices, ...) and the index of the own slice.
"""


def horizon_log_weights(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    decay: float,
    per_turn: bool = False,
    cu_seqlens: Tensor | None = None,
    gather: Gather | None = None,
) -> Tensor:
    """Compute ℓ_t = Σ_s λ^|t−s| d_s over the response tokens of each sequence or turn, nats.

    Args:
        log_ratio: d, nats; 0 on response tokens without a log-ratio, −inf at probability zero. (B, T), or (N,).
        mask: bool, true on response tokens. Same shape.
        decay: λ, in [0, 1].
        per_turn: whether the sum ends with the turn: a run of response tokens, which every hole in the mask ends.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        gather: optional, if this call has a slice of each sequence. Slices contain consecutive tokens.

    Returns:
        ℓ in float64, without gradient, in the inputs' shape; 0 outside the mask. −inf on a token of probability zero,
        and for λ > 0 on all tokens of its sequence or turn.

    Source: this library.
    """
    zero = mask & (log_ratio == -torch.inf)
    d = log_ratio.detach().double().masked_fill(zero | ~mask, 0.0).clamp(-LARGEST, LARGEST)
    if not mask.numel() and gather is None:
        return d

    # A second recurrence counts the tokens of probability zero within reach: λ^k (−inf) is −inf at any distance, also
    # where the power is too small for a float.
    values = torch.stack([d, zero.double()]).flatten(1)
    decays = values.new_tensor([decay, float(decay > 0)]).unsqueeze(-1)
    factors = torch.where(mask.flatten(), decays, 1.0 - per_turn)

    # Sequences follow each other, and the first token of each gets nothing from the one before.
    def per_token(per_sequence: Tensor) -> Tensor:
        return expand(per_sequence, mask, cu_seqlens=cu_seqlens).flatten()

    ids = per_token(torch.arange(sequence_count(mask, cu_seqlens=cu_seqlens), device=mask.device))
    first, last = (pad(ids[1:] != ids[:-1], side, value=True)[: len(ids)] for side in ((1, 0), (0, 1)))

    def sum_both_ways(forward: Tensor, backward: Tensor) -> list[Tensor]:
        sides = ((forward, first, False), (backward, last, True))
        return [_recur(own, factors.masked_fill(end, 0.0), reverse=reverse) for own, end, reverse in sides]

    earlier, later = sum_both_ways(values, values)
    if gather is not None:
        # Sums over other slices enter at the ends of this one, and follow the same recurrences.
        counts, holes = (token_count(flags, cu_seqlens=cu_seqlens) for flags in (mask, ~mask))
        through = (decays**counts).masked_fill((holes > 0) & per_turn, 0.0)
        parts = [through]
        for sums, end in ((earlier, last), (later, first)):
            at = end.view(mask.shape)
            parts.append(torch.stack([sequence_sum(x.view(mask.shape), at, cu_seqlens=cu_seqlens) for x in sums]))
        entering = [
            factors * torch.stack([per_token(x) for x in sums]).where(end, 0.0)
            for sums, end in zip(_sums_of_other_slices(*gather(torch.stack(parts))), (first, last), strict=True)
        ]
        earlier, later = (own + other for own, other in zip((earlier, later), sum_both_ways(*entering), strict=True))

    log_weight, zeros = (earlier + later - values).view(2, *mask.shape)
    return log_weight.masked_fill(zeros > 0, -torch.inf).masked_fill(~mask, 0.0)


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


def _recur(values: Tensor, factors: Tensor, *, reverse: bool) -> Tensor:
    """Return E_t = values_t + factors_t E_{t−1}, or E_{t+1} in reverse, along the last dimension of (2, N) tensors."""
    # Chunks become columns, so a step is one operation on a row. First each chunk is summed as if it were alone, in
    # place: fresh memory costs more than a step. `reach` becomes the factor that an earlier sum has at each token.
    length = values.shape[-1]
    if rest := -length % CHUNK:
        values, factors = pad(values, (0, rest)), pad(factors, (0, rest))
    sums, reach = (x.reshape(-1, CHUNK).t().clone(memory_format=torch.contiguous_format) for x in (values, factors))
    order = range(CHUNK)[::-1] if reverse else range(CHUNK)
    for k, following in pairwise(order):
        sums[following].addcmul_(reach[following], sums[k])
        reach[following].mul_(reach[k])

    if length > CHUNK:
        ends = _recur(sums[order[-1]].view(2, -1), reach[order[-1]].view(2, -1), reverse=reverse)
        sums.addcmul_(reach, (pad(ends[:, 1:], (0, 1)) if reverse else pad(ends[:, :-1], (1, 0))).flatten())
    return sums.t().reshape(2, -1)[:, :length]


def _sums_of_other_slices(parts: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Return the sums that enter the own slice from earlier and from later ones, (2, B) each.

    Args:
        parts: (slices, 3, 2, B), in the order of the slices: the factor of sums that pass through a slice, and the sums
            over its own tokens at its last and at its first token.
        own: index of the own slice.
    """
    through, lasts, firsts = parts.unbind(1)
    before = after = torch.zeros_like(through[0])
    for k in range(own):
        before = through[k] * before + lasts[k]
    for k in range(len(parts) - 1, own, -1):
        after = through[k] * after + firsts[k]
    return before, after
