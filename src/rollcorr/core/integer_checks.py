"""Integer checks: token ids, rows, offsets and masks, checked in host memory and bounded on a device.

These values become addresses, or decide which tokens count. In host memory every call checks them, which waits for
nothing, and an error names the position, the value, the limit and the fix. On a device no value is read. Ids and
offsets are clamped there: bad ones lead to bad numbers, but never touch memory beyond the data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollcorr.core.boundary import check_integers, in_host_memory, plain

NO_LIMIT = 1 << 31
"""The end of a range of ids or lengths where none is known: no int32 is beyond it."""

_NEVER_NEGATIVE = frozenset(getattr(torch, name) for name in ("bool", "uint8", "uint16", "uint32", "uint64"))


def usable_ids(name: str, ids: Tensor, *ranges: tuple[int, int], mask: Tensor | None = None) -> Tensor:
    """Return ids as int64, each of them in one of the ranges.

    Args:
        name: of the argument, for errors.
        ids: integers of any shape.
        ranges: first id and the one after the last: (0, V), or one range for each slice of a vocabulary.
        mask: same shape, bool; where it is false an id may be anything, for instance −100. Defaults to all true.

    Returns:
        The shape of `ids`. Ids outside the mask are clamped; on a device, all ids.

    Raises:
        ValueError: the ids are no integers, or one in host memory is in no range.
    """
    ids = plain(ids)
    check_integers(**{name: ids})
    least, most = min(first for first, _ in ranges), max(stop for _, stop in ranges) - 1
    if in_host_memory(ids):
        # As numpy arrays: on a small batch one torch operation is slower than all of these.
        values = ids.numpy()
        outside: Any = True
        for first, stop in ranges:
            outside &= (values < first) | (values >= stop)
        if mask is not None and outside.any():
            outside &= truth(mask).numpy()
        if outside.any():
            where, value = _first(outside, values)
            slices = "" if len(ranges) == 1 else f", and in a rank's slice: {', '.join(map(str, sorted(ranges)))}"
            raise ValueError(
                f"{name} contains {value} at {where}, and must be from {least} to {most}{slices}; correct it, or leave "
                "the token out, by mask= where there is one"
            )
        if mask is None:
            return ids.to(torch.int64)
    return ids.to(torch.int64).clamp(least, most)


def truth(mask: Tensor, name: str = "mask") -> Tensor:
    """Return a mask as bool: true where it is not 0, with bytes 0 and 1 (torch keeps other bytes of a bool).

    Raises:
        ValueError: as `check_mask_values`.
    """
    check_mask_values(mask, name)
    return mask != 0


def check_mask_values(mask: Tensor, name: str = "mask") -> None:
    """Check that a mask in host memory contains no negative and no non-finite value: those are labels or log-probs.

    Raises:
        ValueError: names the first.
    """
    if mask.dtype in _NEVER_NEGATIVE or not mask.numel() or not in_host_memory(mask):
        return
    least, most = mask.detach().aminmax()
    if least >= 0 and most < torch.inf:
        return
    values = mask.double().numpy(force=True)
    where, value = _first(~((values >= 0) & (values < torch.inf)), values)
    raise ValueError(
        f"{name} contains {value:g} at {where}, and must be 0 or a positive finite number, read as != 0: it may be "
        "labels (give labels != -100) or log-probs. The order is correct(train_log_prob, rollout_log_prob, "
        "response_mask)"
    )


def check_count(values: Tensor, mask: Tensor, name: str) -> None:
    """Check that there is one value for each true entry of a bool mask, where both are in host memory.

    Raises:
        ValueError: names both numbers.
    """
    if in_host_memory(values, mask) and (count := int(mask.sum())) != len(values):
        raise ValueError(f"{name} has {count} true entries for {len(values)} values; give one value for each of them")


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int, name: str = "cu_seqlens", of: str = "tokens") -> None:
    """Check the values of `cu_seqlens`: starts at 0, never falls, ends at the token count.

    Reads values: free on the CPU, a wait on a device, where it is for loaders and on request.

    Args:
        cu_seqlens: (B + 1,) token offsets: the first token of each sequence, then the number of tokens.
        tokens: N, the number of packed tokens.
        name: of the argument, for errors.
        of: noun for what the offsets count, for errors.

    Raises:
        ValueError: names the first offending entry.
    """
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel():
        raise ValueError(f"{name} must be (B + 1,) with at least one entry, got {tuple(cu_seqlens.shape)}")
    offsets = cu_seqlens.numpy(force=True)
    falls = offsets[1:] < offsets[:-1]
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {offsets[0]}")
    if falls.any():
        i = int(falls.argmax())
        raise ValueError(f"{name} must not fall, but entry {i + 1} is {offsets[i + 1]} after {offsets[i]}")
    if offsets[-1] != tokens:
        raise ValueError(f"{name} must end at the number of {of}, {tokens}, got {offsets[-1]}")


def bounded_offsets(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return offsets with which a kernel never leaves the data, even for bad values: (B + 1,) int64.

    In host memory only the dtype changes: `check_cu_seqlens` checks the values there. On a device they are clamped to
    the data and made to rise from 0 to N. That does not change correct offsets.
    """
    if in_host_memory(cu_seqlens):
        return cu_seqlens.to(torch.int64)
    bounded = cu_seqlens.to(torch.int64).clamp(0, tokens).cummax(0).values
    bounded[-1:].fill_(tokens)
    bounded[:1].zero_()  # last, because a single entry is the first
    return bounded


def _first(bad: Any, values: Any) -> tuple[str, float]:  # noqa: ANN401 (numpy arrays, which core does not import)
    """Return where the first true entry is, and the value there."""
    if not bad.ndim:
        return "its only entry", values.item()
    place = tuple(int(axis[0]) for axis in bad.nonzero())
    where = f"index {place[0] if len(place) == 1 else place}"
    return f"row {place[0]}, column {place[1]}" if len(place) == 2 else where, values[place]
