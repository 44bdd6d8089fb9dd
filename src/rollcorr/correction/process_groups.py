"""Process groups: what the ranks hold together, exchanged so that every rank ends up with the same bits.

There are two kinds of group. The ranks of a *data-parallel* group hold different sequences. They share statistics,
once, after the correction. The ranks of a *context* group hold different tokens of the same sequences. They share
per-sequence sums, once, before anything is decided. docs/guides/distributed.md says who sends what.

Everything is gathered and then added in rank order, so that no sum depends on the order of arrival.
`rollcorr.correction.denominators` counts what a loss is divided by, over these groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.core.layout import sequence_ids
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.kernels.correction import Reduction
from rollcorr.kernels.correction.torch.table import BlockRows, SequenceTable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def gather_statistics(statistics: Statistics, group: ProcessGroup | None) -> Statistics:
    """Merge statistics over the ranks of a group: one all-gather of a small float64 vector.

    Args:
        statistics: this rank's rows; every rank must have the same ones.
        group: the process group; None returns the statistics as they are.
    """
    if group is None:
        return statistics
    return merge_statistics(statistics.unpack(part) for part in _gather(statistics.pack(), group))


def context_reduction(group: ProcessGroup | None) -> Reduction | None:
    """A function that makes a slice's table and rows those of whole sequences, by one all-gather.

    Each rank sends a float64 for each column and sequence (8 to 25 columns), and the rows of the batch.

    Args:
        group: ranks that hold slices of the same B sequences, in the same order. None: there is nothing to do.
    """
    if group is None:
        return None

    def reduce(table: SequenceTable, rows: BlockRows) -> None:
        columns = table.pack()
        statistics = rows.statistics(columns.device)

        # Both travel in one vector: an exchange costs more than its bytes.
        parts = _gather(torch.cat([columns.flatten(), statistics.pack()]), group)
        table.merge(parts[:, : columns.numel()].unflatten(1, columns.shape))
        rows.replace(merge_statistics(statistics.unpack(part[columns.numel() :]) for part in parts))

    return reduce


def check_groups(group: ProcessGroup | None, context_group: ProcessGroup | None) -> None:
    """Check that no rank would count twice: the two groups may share no rank but this one.

    Raises:
        ValueError: names the ranks that are in both.
    """
    if group is None or context_group is None:
        return
    ranks = (set(torch.distributed.get_process_group_ranks(g)) for g in (group, context_group))
    shared = sorted(set.intersection(*ranks) - {torch.distributed.get_rank()})
    if shared:
        raise ValueError(
            f"ranks {shared} are in the data-parallel and in the context group, so their tokens would count twice: "
            "give as group the ranks that hold the same slice of other sequences"
        )


class Slices(NamedTuple):
    """Whole sequences, packed, put together from the slices of a context group.

    Attributes:
        tensors: (N,) each.
        cu_seqlens: (B + 1,) int64.
        own: this rank's tokens among the N, in the shape of its slice.
    """

    tensors: tuple[Tensor, ...]
    cu_seqlens: Tensor
    own: Tensor


def gather_slices(*tensors: Tensor, cu_seqlens: Tensor | None, group: ProcessGroup) -> Slices:
    """Put slices of sequences together, as packed sequences. Waits for the device: for the reference and for tests.

    Args:
        tensors: slices of one shape, (B, T_r), or (N_r,) when packed; T_r and N_r may differ between ranks.
        cu_seqlens: (B + 1,) token offsets of the slice, only when packed.
        group: the ranks that hold the other slices.
    """
    shape, device = tensors[0].shape, tensors[0].device
    if cu_seqlens is None:
        sequences, ids = shape[0], torch.arange(shape[0], device=device).unsqueeze(-1).expand(shape)
    else:
        sequences, ids = cu_seqlens.numel() - 1, sequence_ids(tensors[0], cu_seqlens=cu_seqlens)

    # Ranks may hold different numbers of tokens, and an all-gather needs equal ones: pad, gather, and cut again.
    sizes = [int(n) for n in _gather(torch.tensor([ids.numel()], device=device), group).flatten().tolist()]
    rows = torch.stack([x.flatten().double() for x in (*tensors, ids)])
    padded = torch.nn.functional.pad(rows, (0, max(sizes) - ids.numel()))
    parts = _gather(padded.flatten(), group).unflatten(1, padded.shape)
    whole = torch.cat([part[:, :n] for part, n in zip(parts, sizes, strict=True)], dim=1)

    # A stable sort by sequence puts the slices of each sequence together, in rank order.
    order = whole[-1].argsort(stable=True)
    counts = torch.bincount(whole[-1].long(), minlength=sequences)

    first = sum(sizes[: torch.distributed.get_rank(group)])
    return Slices(
        tensors=tuple(row.to(x.dtype) for row, x in zip(whole[:, order], tensors, strict=False)),
        cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        own=order.argsort()[first : first + ids.numel()].view(shape),
    )


def sum_over(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Σ over the ranks of a group, with the same bits on each. None returns the values as they are."""
    return values if group is None else _gather(values, group).sum(0)


def sum_gradients(parameters: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Sum `.grad` over the ranks of a group, in place: an all-reduce for each dtype and 64 MiB.

    With the denominators of the whole step the ranks' losses add up, so their gradients are added, not averaged. A
    missing gradient counts as 0. One that is missing on every rank stays missing, because an optimizer treats it
    differently. One all-reduce finds these first, and waits for the device.

    Args:
        parameters: the same ones on every rank, of any shape.
        group: the process group. None leaves everything as it is.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if group is None or not parameters:
        return

    # Every rank must take part in the same all-reduces, so ranks agree first on which gradients there are.
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32, device="cpu")
    present = present.to(parameters[0].device)
    torch.distributed.all_reduce(present, group=group)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, ranks in zip(parameters, present.tolist(), strict=True):
        if ranks:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            by_dtype.setdefault(parameter.dtype, []).append(local_part(parameter.grad))

    for gradients in by_dtype.values():
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            torch.distributed.all_reduce(flat, group=group)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))


def local_part(tensor: Tensor) -> Tensor:
    """The tensor itself, or a DTensor's part on this rank. The result shares its memory."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _buckets(tensors: list[Tensor], limit: int = 2**26) -> Iterator[list[Tensor]]:
    """The tensors in order, in lists of at most `limit` bytes each, or of one larger tensor."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _gather(vector: Tensor, group: ProcessGroup) -> Tensor:
    """The vectors of all ranks, (P, n), in rank order."""
    parts = [torch.empty_like(vector) for _ in range(group.size())]
    torch.distributed.all_gather(parts, vector.contiguous(), group=group)
    return torch.stack(parts)
