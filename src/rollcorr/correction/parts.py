"""Parts of a correction that need more than rows: packed tokens, counts of a mini-batch, another device."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.core.aggregation import Denominators
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.correction.denominators import loss_denominators
from rollcorr.correction.process_groups import members
from rollcorr.correction.result import StepCounts, with_context

if TYPE_CHECKING:
    from rollcorr.correction.result import Correction


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


def counts_of(part: Correction) -> StepCounts:
    """What the loss of these sequences alone is divided by, over the groups of the correction.

    Raises:
        ValueError: the response mask is unknown, or a group was left behind.
    """
    if part.response_mask is None:
        raise ValueError("a mini-batch counts the response mask, and this correction has none: correct the batch again")
    lost = part.group is None and part.ranks[0] > 1, part.context_group is None and part.ranks[1] > 1
    if any(lost):
        raise ValueError(
            f"this correction is of {part.ranks[0]} x {part.ranks[1]} ranks, and their groups did not travel with it: "
            "call mini_batch where correct was called"
        )
    count = partial(
        loss_denominators,
        loss_mask=part.loss_mask,
        response_mask=part.response_mask,
        weights=part.loss_weights,
        cu_seqlens=part.cu_seqlens,
        group=members(part.group),
        context_group=part.context_group,
    )
    return StepCounts(kept=count("kept"), original=count("original"), weights=count("weights"))


def moved(correction: Correction, device: torch.device | str) -> Correction:
    """The same correction on another device, its statistics in one transfer."""

    def there(value: Any) -> Any:  # noqa: ANN401 - a tensor, or a number or None, which stays
        return value.to(device) if isinstance(value, Tensor) else value

    statistics = correction.statistics
    if statistics is not None:
        rows = {kind: values.to(device) for kind, values in statistics.rows.items()}
        statistics = Statistics(statistics.names, rows)
    copy = dataclasses.replace(
        correction,
        weights=there(correction.weights),
        loss_mask=correction.loss_mask.to(device),
        sequence_kept=correction.sequence_kept.to(device),
        statistics=statistics,
        response_mask=there(correction.response_mask),
        cu_seqlens=there(correction.cu_seqlens),
    )
    counts = correction.counts and StepCounts(
        *(own and Denominators(there(own.tokens), there(own.sequences)) for own in correction.counts)
    )
    fingerprint = correction.fingerprint and correction.fingerprint._replace(sums=there(correction.fingerprint.sums))
    return with_context(copy, counts, fingerprint)
