"""Which rows and tokens a part of a correction has."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rollcorr.core.boundary import check_integers


def index_of(rows: object, sequences: int, device: torch.device) -> slice | Tensor:
    """What selects sequences: a slice, or a 1-D tensor on the device."""
    if isinstance(rows, slice):
        return rows
    if isinstance(rows, list | tuple | range) and all(type(row) is int for row in rows):
        return torch.tensor(list(rows), dtype=torch.int64, device=device)
    if not isinstance(rows, Tensor):
        raise TypeError(
            f"a part of a correction is some of its sequences: give a slice, a list or a tensor; got {rows!r}"
        )
    if rows.dim() != 1 or (rows.dtype == torch.bool and rows.shape[0] != sequences):
        raise ValueError(
            f"rows {tuple(rows.shape)} must be 1-D, and ({sequences},) if bool: one entry for each sequence"
        )
    if rows.dtype == torch.bool:
        return rows.to(device)

    # As an index, torch would take bytes for a mask.
    check_integers(rows=rows)
    return rows.to(device, torch.int64)


def packed_tokens(index: slice | Tensor, cu_seqlens: Tensor) -> tuple[slice | Tensor, Tensor]:
    """The tokens of some packed sequences, and the offsets of those among themselves. Reads offsets and index.

    Args:
        index: a slice, or a 1-D tensor of numbers or bools.
        cu_seqlens: (B + 1,) token offsets.
    """
    spans = list(pairwise(cu_seqlens.tolist()))
    numbers = list(range(len(spans)))
    if isinstance(index, slice):
        numbers = numbers[index]
    elif index.dtype == torch.bool:
        numbers = [i for i, taken in enumerate(index.tolist()) if taken]
    else:
        numbers = [numbers[i] for i in index.tolist()]  # negative numbers count from the end, as everywhere

    chosen = [spans[i] for i in numbers]
    offsets = [0]
    for start, end in chosen:
        offsets.append(offsets[-1] + end - start)

    # Sequences that are chosen twice may have more tokens together than the dtype of the given offsets can count.
    part = torch.tensor(offsets, dtype=torch.int64, device=cu_seqlens.device)

    # Neighbors share the memory of the whole; others are gathered.
    if all(end == start for (_, end), (start, _) in pairwise(chosen)):
        return (slice(chosen[0][0], chosen[-1][1]) if chosen else slice(0, 0)), part
    tokens = [torch.arange(start, end, device=cu_seqlens.device) for start, end in chosen]
    return torch.cat(tokens), part
