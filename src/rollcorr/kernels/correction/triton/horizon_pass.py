"""Weights with a horizon: ℓ of each token, in one launch with two passes over each sequence.

A chunk's own tokens are summed with a matrix of powers of λ, by their ranks among the valid tokens. What earlier tokens
pass on is added in a first pass, from the start, and what later tokens pass on in a second one, from the end. Sums are
float64. Two tokens are of one turn if their ranks are as far apart as their places. `torch_correction` makes weights,
decisions and rows of ℓ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollcorr.core.horizon import LARGEST
from rollcorr.core.layout import sequence_count
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.gpu_launch import Launch

CHUNK = 64
"""Tokens in a chunk: few enough that the matrix is cheap."""

_LARGEST = tl.constexpr(LARGEST)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _read_chunk(train, rollout, mask, at, end):
    """Return d, limited and 0 where it is missing; the ranks of valid tokens from 1; and flags of probability zero."""
    inside = at < end
    valid = tl.load(mask + at, mask=inside, other=0) != 0
    pi = tl.load(train + at, mask=inside, other=0.0).to(tl.float64)
    mu = tl.load(rollout + at, mask=inside, other=0.0).to(tl.float64)
    usable = valid & (tl.abs(mu) < _INFINITY)
    d = tl.where(usable & (tl.abs(pi) < _INFINITY), pi - mu, 0.0)
    d = tl.minimum(tl.maximum(d, -_LARGEST), _LARGEST)
    return d, valid, tl.cumsum(valid.to(tl.int32), 0), usable & (pi == -_INFINITY)


@triton.jit
def _open_ends(ranks, count, place, PER_TURN: tl.constexpr, CHUNK: tl.constexpr):
    """Return whether nothing ends the sums between a token and the chunk's start, and its end; and of the chunk."""
    from_start, to_end, through = ranks >= 0, ranks >= 0, count >= 0
    if PER_TURN:
        from_start, to_end, through = ranks == place + 1, count - ranks == CHUNK - 1 - place, count == CHUNK
    return from_start, to_end, through


@triton.jit
def sum_sequences(
    train, rollout, mask, cu_seqlens, log_weights, powers, T,
    PACKED: tl.constexpr, PER_TURN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write ℓ of one sequence; `powers` are λ⁰ … λ^(CHUNK + 1). Each sum is carried from chunk to chunk.

    Beside ℓ, tokens of probability zero are counted: one gives weight 0 to all tokens that it reaches, at any distance.
    """
    row = tl.program_id(0).to(tl.int64)
    start, end = row * T, (row + 1) * T
    if PACKED:
        start, end = tl.load(cu_seqlens + row).to(tl.int64), tl.load(cu_seqlens + row + 1).to(tl.int64)
    place = tl.arange(0, CHUNK)
    chunks = tl.cdiv(end - start, CHUNK)
    gaps = tl.abs(place[:, None] - place[None, :])
    others = (tl.load(powers + 1) > 0.0).to(tl.int32)
    reach = tl.where(gaps == 0, 1, others)

    # Forward, over earlier tokens and the chunk's own.
    carry, zeros = tl.load(powers) * 0.0, 0
    for chunk in range(chunks):
        at = start + chunk * CHUNK + place
        d, valid, ranks, zero = _read_chunk(train, rollout, mask, at, end)
        count = tl.max(ranks)
        apart = tl.abs(ranks[:, None] - ranks[None, :])
        from_start, to_end, through = _open_ends(ranks, count, place, PER_TURN, CHUNK)
        near = apart >= 0
        if PER_TURN:
            near = apart == gaps

        sums = tl.sum(tl.where(near, tl.load(powers + apart), 0.0) * d[None, :], axis=1)
        sums += tl.where(from_start, tl.load(powers + ranks) * carry, 0.0)
        hits = tl.sum(tl.where(near & zero[None, :], reach, 0), axis=1) + tl.where(from_start, zeros, 0)
        tl.store(log_weights + at, tl.where(hits > 0, -_INFINITY, sums), mask=(at < end) & valid)
        tl.store(log_weights + at, 0.0, mask=(at < end) & ~valid)
        carry = tl.where(through, tl.load(powers + count) * carry, 0.0)
        carry += tl.sum(tl.where(to_end, tl.load(powers + (count - ranks)), 0.0) * d)
        zeros = tl.where(through, zeros, 0) + others * tl.sum((zero & to_end).to(tl.int32))

    # Backward, over later chunks: the sums of the first pass stay in memory between the two.
    carry, zeros = tl.load(powers) * 0.0, 0
    for chunk in range(chunks):
        at = start + (chunks - 1 - chunk) * CHUNK + place
        d, valid, ranks, zero = _read_chunk(train, rollout, mask, at, end)
        count = tl.max(ranks)
        from_start, to_end, through = _open_ends(ranks, count, place, PER_TURN, CHUNK)

        sums = tl.load(log_weights + at, mask=at < end, other=0.0)
        sums += tl.where(to_end, tl.load(powers + (count - ranks + 1)) * carry, 0.0)
        reached = tl.where(to_end, zeros, 0) > 0
        tl.store(log_weights + at, tl.where(reached, -_INFINITY, sums), mask=(at < end) & valid)
        carry = tl.where(through, tl.load(powers + count) * carry, 0.0)
        carry += tl.sum(tl.where(from_start, tl.load(powers + tl.maximum(ranks - 1, 0)), 0.0) * d)
        zeros = tl.where(through, zeros, 0) + others * tl.sum((zero & from_start).to(tl.int32))


def horizon_log_weights(batch: Batch, decay: float, *, per_turn: bool) -> Tensor:
    """Compute ℓ_t = Σ_s λ^|t−s| d_s, nats, as `rollcorr.core.horizon.horizon_log_weights` does.

    Args:
        batch: the batch; a token without a log-ratio adds 0 nats.
        decay: λ, in [0, 1].
        per_turn: whether holes in the mask end the sums.

    Returns:
        float64, in the batch's shape; 0 outside the mask.
    """
    train, rollout, mask = (x.contiguous() for x in batch.named.values())
    log_weights = torch.empty(mask.shape, dtype=torch.float64, device=mask.device)
    powers = decay ** torch.arange(CHUNK + 2, dtype=torch.float64, device=mask.device)
    arguments = {
        "train": train,
        "rollout": rollout,
        "mask": mask.view(torch.uint8) if mask.dtype == torch.bool else mask,
        "cu_seqlens": powers if batch.cu_seqlens is None else batch.cu_seqlens.contiguous(),
        "log_weights": log_weights,
        "powers": powers,
        "T": mask.shape[-1],
    }
    sequences = sequence_count(mask, cu_seqlens=batch.cu_seqlens)
    constants = {"PACKED": batch.cu_seqlens is not None, "PER_TURN": per_turn, "CHUNK": CHUNK}
    Launch(sum_sequences, (sequences,), arguments, constants).run()
    return log_weights
