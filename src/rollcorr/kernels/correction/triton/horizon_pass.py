"""Weights with a horizon: ℓ of each token, in one launch with two passes over each sequence.

A chunk's own tokens are summed with a matrix of powers of λ, by their ranks among the valid tokens. What earlier tokens
pass on is added in a first pass, from the start, and what later tokens pass on in a second one, from the end. Sums are
float64. `torch_correction` makes weights, decisions and rows of ℓ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollcorr.core.horizon import CHUNK, LARGEST
from rollcorr.core.layout import sequence_count
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.gpu_launch import Launch

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
def sum_sequences(train, rollout, mask, cu_seqlens, log_weights, powers, T, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """Write ℓ of one sequence; `powers` are λ⁰ … λ^(CHUNK + 1)."""
    row = tl.program_id(0).to(tl.int64)
    start, end = row * T, (row + 1) * T
    if PACKED:
        start, end = tl.load(cu_seqlens + row).to(tl.int64), tl.load(cu_seqlens + row + 1).to(tl.int64)
    place = tl.arange(0, CHUNK)
    chunks = tl.cdiv(end - start, CHUNK)

    carry, zeros = tl.load(powers) * 0.0, 0
    for chunk in range(chunks):
        at = start + chunk * CHUNK + place
        d, valid, ranks, zero = _read_chunk(train, rollout, mask, at, end)
        count = tl.max(ranks)
        between = tl.load(powers + tl.abs(ranks[:, None] - ranks[None, :]))
        sums = tl.sum(between * d[None, :], axis=1) + tl.load(powers + ranks) * carry
        tl.store(log_weights + at, tl.where(zero, -_INFINITY, tl.where(valid, sums, 0.0)), mask=at < end)
        carry = tl.load(powers + count) * carry + tl.sum(tl.load(powers + (count - ranks)) * d)
        zeros += tl.sum(zero.to(tl.int32))

    # One token of probability zero gives all of its sequence weight 0, at any distance.
    everywhere = (zeros > 0) & (tl.load(powers + 1) > 0.0)
    carry = tl.load(powers) * 0.0
    for chunk in range(chunks):
        at = start + (chunks - 1 - chunk) * CHUNK + place
        d, valid, ranks, _ = _read_chunk(train, rollout, mask, at, end)
        count = tl.max(ranks)
        own = tl.load(log_weights + at, mask=at < end, other=0.0)
        sums = own + tl.load(powers + (count - ranks + 1)) * carry
        tl.store(log_weights + at, tl.where(everywhere, -_INFINITY, sums), mask=(at < end) & valid)
        carry = tl.load(powers + count) * carry + tl.sum(tl.load(powers + tl.maximum(ranks - 1, 0)) * d)


def horizon_log_weights(batch: Batch, decay: float) -> Tensor:
    """Compute ℓ_t = Σ_s λ^|t−s| d_s, nats, as `rollcorr.core.horizon.horizon_log_weights` does.

    Args:
        batch: the batch; a token without a log-ratio adds 0 nats.
        decay: λ, in [0, 1].

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
    constants = {"PACKED": batch.cu_seqlens is not None, "CHUNK": CHUNK}
    Launch(sum_sequences, (sequences,), arguments, constants).run()
    return log_weights
