"""Layouts: one set of per-sequence operations for padded and packed batches.

Padded tensors are (B, T). Packed tensors are (N,) with `cu_seqlens` (B + 1,), as in varlen attention. Only this file
distinguishes the two: every other function takes `cu_seqlens=None` and passes it on. No function here reads a value on
a device, so none waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollcorr.core.boundary import (
    bounded_offsets,
    check_cu_seqlens,
    check_integers,
    check_tensors,
    in_host_memory,
    in_transform,
    truth,
)


def check_layout(*, cu_seqlens: Tensor | None = None, **tensors: Tensor) -> None:
    """Check that the named arguments are tensors of one shape on one device, and that they fit the layout.

    In host memory the values of `cu_seqlens` are also checked, without a sync. On a device they are not checked:
    invalid offsets produce invalid sums there, but never a read or write out of bounds (`sequence_ids`,
    `bounded_offsets`).

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: two shapes or devices differ, the rank does not match the layout, an argument is unusable
            (`check_tensors`), or `cu_seqlens` does not describe the tokens.
    """
    check_tensors(**tensors, cu_seqlens=cu_seqlens)
    check_shapes(cu_seqlens=cu_seqlens, **tensors)
    if cu_seqlens is not None and in_host_memory(cu_seqlens):
        check_cu_seqlens(cu_seqlens, next(iter(tensors.values())).numel())


def check_shapes(*, cu_seqlens: Tensor | None = None, **tensors: Tensor) -> None:
    """Check the shapes as `check_layout` does, for arguments that passed `check_tensors`."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{first_name} {tuple(first.shape)} and {name} {tuple(tensor.shape)} differ; all must have one shape"
            )

    if cu_seqlens is None:
        if first.dim() != 2:
            raise ValueError(f"expected (B, T), or (N,) with cu_seqlens; got {first_name} {tuple(first.shape)}")
        return

    if first.dim() != 1:
        raise ValueError(f"with cu_seqlens, expected packed (N,) tensors; got {first_name} {tuple(first.shape)}")
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel():
        raise ValueError(f"cu_seqlens must be (B + 1,) with at least one entry, got {tuple(cu_seqlens.shape)}")
    check_integers(cu_seqlens=cu_seqlens)
    if cu_seqlens.numel() == 1 and first.numel():
        raise ValueError(
            f"cu_seqlens has one entry, which is no sequence, but {first_name} has {first.numel()} tokens; give the "
            "first token of each sequence, then the number of tokens"
        )


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the start of each of consecutive parts, then the end of the last, as `cu_seqlens`: (B,) → (B + 1,)."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def sequence_count(tokens: Tensor, *, cu_seqlens: Tensor | None = None) -> int:
    """Return B, the number of sequences."""
    return tokens.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def sequence_ids(tokens: Tensor, *, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence index of each packed token: (N,) int64.

    On a device the values of `cu_seqlens` are unchecked. There each token is looked up between the inner offsets,
    which returns a valid sequence index for any values.

    Raises:
        ValueError: as `check_cu_seqlens`, where the offsets are in host memory.
    """
    if in_host_memory(cu_seqlens):
        check_cu_seqlens(cu_seqlens, tokens.numel())
        return torch.repeat_interleave(cu_seqlens.to(torch.int64).diff(), output_size=tokens.numel())
    position = torch.arange(tokens.numel(), device=cu_seqlens.device)
    return torch.bucketize(position, cu_seqlens.to(torch.int64)[1:-1], right=True)


def sequence_sum(values: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Sum each sequence's values where mask is true: (B,). Masked values are never read. 0 for an empty sequence."""
    valid = values.masked_fill(~mask, 0)
    if cu_seqlens is None:
        return valid.sum(dim=-1)
    return ragged_sum(valid, bounded_offsets(cu_seqlens, valid.numel()))


def ragged_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum each segment of values, in a deterministic order: (n,) and n + 1 offsets → (segments,).

    On a GPU, `index_add` uses atomics, whose order is not deterministic; so segments are reduced there.
    """
    if _adds_by_atomics(values):
        return torch.segment_reduce(values, "sum", lengths=offsets.diff(), unsafe=True)
    return values.new_zeros(offsets.numel() - 1).index_add(0, sequence_ids(values, cu_seqlens=offsets), values)


def add_at(total: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Return a copy of total with values added at an index along the first dimension, in a deterministic order."""
    if _adds_by_atomics(values):
        return total.index_put((index,), values, accumulate=True)  # sorts by index, where index_add uses atomics
    return total.index_add(0, index, values)


def sequence_mean(values: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Compute the mean of each sequence's values where mask is true: (B,); 0 for an empty sequence."""
    count = token_count(mask, cu_seqlens=cu_seqlens).to(values.dtype)
    return sequence_sum(values, mask, cu_seqlens=cu_seqlens) / count.clamp(min=1)


def sequence_max(values: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the largest value of each sequence where mask is true: (B,); −inf for an empty sequence."""
    valid = values.masked_fill(~mask, -torch.inf)
    if cu_seqlens is None:
        return valid.amax(dim=-1) if valid.shape[-1] else valid.new_full((valid.shape[0],), -torch.inf)
    out = valid.new_full((cu_seqlens.numel() - 1,), -torch.inf)
    return out.scatter_reduce(0, sequence_ids(values, cu_seqlens=cu_seqlens), valid, "amax")


def token_count(mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return c_i, the number of true entries of each sequence: (B,) int64."""
    if cu_seqlens is None:
        return mask.sum(dim=-1)
    out = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.int64, device=mask.device)
    return out.index_add(0, sequence_ids(mask, cu_seqlens=cu_seqlens), mask.to(torch.int64))


def expand(per_sequence: Tensor, like: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Expand per-sequence values to tokens: (B,) → the shape of `like`. Padded: a view."""
    if cu_seqlens is None:
        return per_sequence.unsqueeze(-1).expand(like.shape)
    return per_sequence[sequence_ids(like, cu_seqlens=cu_seqlens)]


def pack(padded: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pack (B, T) → ((N,), cu_seqlens): keep the true entries, row by row. Syncs, because N depends on the data.

    Args:
        padded: (B, T), any dtype.
        mask: (B, T) of any dtype; entries that are not 0 are kept.

    Returns:
        The kept entries, (N,), and their offsets, (B + 1,) int64.

    Raises:
        ValueError: the mask contains a negative or non-finite value, in host memory.
    """
    kept = truth(mask)
    return padded[kept], offsets_of(kept.sum(dim=-1))


def _adds_by_atomics(values: Tensor) -> bool:
    """Return whether to avoid `index_add`: its atomics are not deterministic. torch.func has no alternative to it."""
    return values.device.type == "cuda" and values.is_floating_point() and not in_transform()
