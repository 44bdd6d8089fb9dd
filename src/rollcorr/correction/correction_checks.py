"""Checks that a loss makes of its correction: its tokens, its groups, and whether it knows its optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollcorr.core.boundary import check_tensors, in_host_memory
from rollcorr.correction.result import Correction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def has_context(correction: Correction, mask: Tensor) -> bool:
    """Whether a correction knows what its optimizer step is divided by; False for a whole batch changed by hand.

    Raises:
        ValueError: it was changed by hand, and is a part, or one rank's: what the call counts would be too little.
    """
    if correction.knows_its_step:
        return True
    if correction.batch_shape == tuple(mask.shape) and correction.ranks == (1, 1):
        return False
    of = "a batch" if correction.batch_shape is None else f"a batch {correction.batch_shape}"
    raise ValueError(
        f"this correction {tuple(mask.shape)} was cut or changed by hand. It may be a part of {of} over "
        f"{correction.ranks[0] * correction.ranks[1]} ranks, and does not know what the optimizer step is divided by: "
        "take correction[rows], or pass denominators"
    )


def context_group_of(correction: Correction, given: ProcessGroup | None) -> ProcessGroup | None:
    """The context group that a loss exchanges over: the correction's own.

    Raises:
        ValueError: another group was given, or the correction's did not travel with it.
    """
    own, ranks = correction.context_group, correction.ranks[1]
    if given is None and (own is not None or ranks == 1):
        return own
    if given is None:
        raise ValueError(
            f"the correction is of sequences on {ranks} ranks, and their group did not travel with it: pass "
            "context_group too"
        )
    if given.size() != ranks:
        raise ValueError(
            f"context_group has {given.size()} ranks and the correction is of sequences on {ranks}: a decision about a "
            "slice is none about its sequence; pass the same context_group to correct"
        )
    return given


def check_belongs(correction: Correction, mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check that a correction is of these tokens, as far as that is known without waiting for a device.

    Shapes, devices and layouts are compared everywhere, and on the CPU masks and offsets too. A part of a correction
    that was cut out by hand may still carry the masks of the whole batch. Those are not compared.

    Args:
        correction: what the loss was given.
        mask: its response mask, bool.
        cu_seqlens: its offsets; None when padded.

    Raises:
        ValueError: a shape, a device, a mask or offsets differ.
    """
    advice = "; take the rows of the correction with those of the batch: correction[rows]"
    loss_mask = correction.loss_mask
    check_tensors(response_mask=mask, **{"correction.loss_mask": loss_mask, "correction.weights": correction.weights})
    for name, tensor in (("loss_mask", loss_mask), ("weights", correction.weights)):
        if tensor is not None and tensor.shape != mask.shape:
            shapes = f"correction.{name} {tuple(tensor.shape)} and response_mask {tuple(mask.shape)}"
            raise ValueError(f"{shapes} differ, so the correction is of other tokens{advice}")

    given = correction.response_mask
    whole = given is not None and given.shape == mask.shape and given.device == mask.device
    if whole and not _same_sequences(correction.cu_seqlens, cu_seqlens):
        raise ValueError(f"correction has other cu_seqlens than the loss, so it is of other sequences{advice}")

    # From here on values are read.
    if not in_host_memory(loss_mask, mask):
        return
    outside = int((loss_mask & ~mask).sum())
    if outside:
        raise ValueError(
            f"correction keeps {outside} tokens outside of response_mask, so it is of other tokens{advice}"
        )
    if whole and given is not None and in_host_memory(given):
        others = int(((given != 0) != mask).sum())
        if others:
            raise ValueError(f"correction was computed with a response_mask that differs at {others} tokens{advice}")


def _same_sequences(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two layouts are the same, as far as that is known without waiting for a device."""
    if one is None or other is None or one is other:
        return one is other
    if one.shape != other.shape:
        return False
    return not in_host_memory(one, other) or torch.equal(one.to(torch.int64), other.to(torch.int64))
