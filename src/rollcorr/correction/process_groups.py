"""Collectives over process groups, with bitwise equal results on every rank.

There are two kinds of group. The ranks of a *data-parallel* group have different sequences. They merge statistics once,
after the correction. The ranks of a *context* group have different tokens of the same sequences. They merge
per-sequence sums once, before any decision. docs/guides/distributed.md lists the data of each exchange.

Values are all-gathered and then added in rank order, so that no sum depends on the order of arrival. Each vector of
statistics begins with a mark, a number that identifies its content, and fills blocks of a fixed size. So ranks in
different calls meet in the same collective, and raise an error if the numbers are in host memory.
`rollcorr.correction.denominators` counts the denominators of a loss over these groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from rollcorr.config.checks import warn_once
from rollcorr.core.layout import sequence_ids
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.kernels.correction.torch.table import Reduction, SequenceTable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


HEADER = 1
"""Length of the header of a vector: its mark."""

BLOCK = 256
"""Marked vectors are padded to a multiple of this length, 2 kB. The latency of a collective exceeds its transfer."""


def gather_statistics(statistics: Statistics, group: ProcessGroup | None) -> Statistics:
    """Merge statistics over the ranks of a group: one all-gather of a small float64 vector.

    Args:
        statistics: this rank's rows; every rank must have the same ones.
        group: the process group; optional. Without a group, the statistics are returned unchanged.

    Raises:
        RuntimeError: a rank is in a different call, which is detected only in host memory; or the exchange failed.
    """
    if group is None:
        return statistics
    vector = statistics.pack()
    mark = -number_of(tuple(statistics.names.items()))
    parts = gather_marked(vector, mark, group, room=filled_blocks(vector.numel()))

    # On a device the marks are not read here, because that would synchronize. `Monitor.step` reads them.
    if parts.device.type == "cpu":
        for rank, other in enumerate(parts[:, 0].tolist()):
            if other != mark:
                raise RuntimeError(out_of_step(rank, "statistics", "Monitor.step" if other > 0 else "other statistics"))
    return merge_statistics(statistics.unpack(part[HEADER : HEADER + vector.numel()]) for part in parts)


def gather_marked(vector: Tensor, mark: int, group: ProcessGroup, *, room: int) -> Tensor:
    """Gather the mark and the vector of each rank, (P, room), in rank order.

    Args:
        vector: (n,) float64. If it does not fit into `room`, only the mark is sent.
        mark: `number_of` the vector's layout: negative for statistics, positive for a step of a Monitor.
        group: the process group.
        room: length of the vector that each rank sends, equal on all ranks: `filled_blocks` of the numbers.
    """
    sent = torch.zeros(room, dtype=vector.dtype, device=vector.device)
    sent[0] = mark
    if vector.numel() <= room - HEADER:
        sent[HEADER : HEADER + vector.numel()] = vector
    return gather(sent, group)


def gather(vector: Tensor, group: ProcessGroup) -> Tensor:
    """Gather the vectors of all ranks, (P, n), in rank order, on a device that the group's backend reads."""
    devices = _device_types(group)
    if vector.device.type not in devices:
        vector = vector.to(torch.device(devices[0]))
    parts = [torch.empty_like(vector) for _ in range(group.size())]
    with explained_failure(group):
        torch.distributed.all_gather(parts, vector.contiguous(), group=group)
    return torch.stack(parts)


def filled_blocks(numbers: int) -> int:
    """Return the length of a mark and `numbers` values, padded to a multiple of `BLOCK`."""
    return -(-(HEADER + numbers) // BLOCK) * BLOCK


@lru_cache(maxsize=1024)
def number_of(layout: object) -> int:
    """Compute a hash of a layout: an integer of at least 1 that is exact in float64."""
    digest = hashlib.blake2b(repr(layout).encode(), digest_size=8).digest()
    return 1 + (int.from_bytes(digest, "big") >> 12)


def out_of_step(rank: int, here: str, there: str) -> str:
    """Return the error for ranks that met in one collective from different calls."""
    why = "one of the two has made fewer calls of `correct` in this step"
    if there == "other statistics":
        why = "its rows are those of another configuration or another detail"
    return (
        f"the ranks are not in the same exchange: this rank is in that of {here}, and rank {rank} of the group in that "
        f"of {there}; {why}. Every rank must make the same calls in the same order: one call of `correct` for each "
        "step, on all rows of the rank, and none of them left out for an empty batch. With a Monitor, correct(..., "
        "over_ranks=False) exchanges nothing"
    )


@contextmanager
def explained_failure(group: ProcessGroup) -> Iterator[None]:
    """Return a context manager that adds the likely cause to an error of torch.distributed.

    Raises:
        RuntimeError: the exchange failed.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"an exchange over {group.size()} ranks failed. Either a rank has ended, and the first error of all ranks "
            "says why; or the ranks did not make the same calls. Each of them must call `correct`, with the same "
            "configuration, `mini_batch` and `Monitor.step` equally often and in the same order: one with fewer calls "
            "makes the others wait, until the timeout of the group ends it. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch "
            f"names the calls that do not match, at once. torch.distributed said: {error}"
        ) from error


def context_reduction(group: ProcessGroup) -> Reduction:
    """Return the exchange of a context group's slices: one all-gather merges their tables and rows.

    Each rank sends a float64 for each column and sequence (8 to 25 columns), and the rows of the batch.

    Args:
        group: ranks with slices of the same B sequences, in the same order.
    """

    def merge(table: SequenceTable, statistics: Statistics) -> Statistics:
        columns = table.pack()

        # Send both in one vector, because the latency of a collective exceeds its transfer.
        parts = gather(torch.cat([columns.flatten(), statistics.pack()]), group)
        table.merge(parts[:, : columns.numel()].unflatten(1, columns.shape))
        return merge_statistics(statistics.unpack(part[columns.numel() :]) for part in parts)

    def collect(values: Tensor) -> tuple[Tensor, int]:
        parts = gather(values.flatten(), group).unflatten(1, values.shape)
        return parts.to(values.device), torch.distributed.get_rank(group)

    return Reduction(merge, collect)


def check_groups(group: ProcessGroup | None, context_group: ProcessGroup | None) -> None:
    """Check that no rank is counted twice: the two groups may share only this rank.

    Raises:
        ValueError: a different rank is in both groups; the message names it.
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


def members(group: ProcessGroup | Literal["local"] | None) -> ProcessGroup | None:
    """Return the process group of the collectives, or `None` for "local" and `None`.

    Raises:
        TypeError: the text is not "local".
    """
    if isinstance(group, str) and group != "local":
        raise TypeError(f'group must be a process group, None or "local", for this process; got {group!r}')
    return None if isinstance(group, str) else group


def warn_without_group(*groups: object) -> None:
    """Warn, once per process, if there are several ranks and no group was given."""
    missing = all(group is None for group in groups) and torch.distributed.is_available()
    if missing and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        warn_once(
            f"there are {torch.distributed.get_world_size()} ranks, and the loss is divided by the counts of this one: "
            "the mean of such gradients is not the gradient of one process. Pass group=torch.distributed.group.WORLD "
            'to correct and TrainingStep, or group="local" if each rank trains by itself'
        )


class Slices(NamedTuple):
    """Packed sequences, joined from the slices of a context group.

    Attributes:
        tensors: (N,) each.
        cu_seqlens: (B + 1,) int64.
        own: this rank's tokens among the N, in the shape of its slice.
    """

    tensors: tuple[Tensor, ...]
    cu_seqlens: Tensor
    own: Tensor


def gather_slices(*tensors: Tensor, cu_seqlens: Tensor | None, group: ProcessGroup) -> Slices:
    """Join the slices of a context group into packed sequences. Synchronizes: for the reference and for tests.

    Args:
        tensors: slices of one shape, (B, T_r), or (N_r,) when packed; T_r and N_r may differ between ranks.
        cu_seqlens: (B + 1,) token offsets of the slice, only when packed.
        group: the ranks with the other slices.
    """
    shape, device = tensors[0].shape, tensors[0].device
    if cu_seqlens is None:
        sequences, ids = shape[0], torch.arange(shape[0], device=device).unsqueeze(-1).expand(shape)
    else:
        sequences, ids = cu_seqlens.numel() - 1, sequence_ids(tensors[0], cu_seqlens=cu_seqlens)

    # Ranks may have different numbers of tokens, and an all-gather needs equal shapes: pad, gather, and trim.
    sizes = [int(n) for n in gather(torch.tensor([ids.numel()], device=device), group).flatten().tolist()]
    rows = torch.stack([x.flatten().double() for x in (*tensors, ids)])
    padded = torch.nn.functional.pad(rows, (0, max(sizes) - ids.numel()))
    parts = gather(padded.flatten(), group).unflatten(1, padded.shape)
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
    """Compute Σ over the ranks of a group, bitwise equal on each. Without a group, return the values unchanged."""
    return values if group is None else gather(values, group).sum(0)


def sum_gradients(parameters: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Sum `.grad` over the ranks of a group, in place: an all-reduce for each dtype and about 64 MiB.

    With the denominators of the optimizer step the ranks' losses add up, so their gradients are added, not averaged. A
    missing gradient counts as 0. A gradient that is missing on every rank stays missing, because an optimizer treats it
    differently from 0. One all-reduce finds these first, and synchronizes with the device.

    Args:
        parameters: the same parameters on every rank, of any shape.
        group: the process group; optional. Without a group, the gradients do not change.
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
        for bucket in _split_into_buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            torch.distributed.all_reduce(flat, group=group)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))


def local_part(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a DTensor's shard on this rank. The result shares its memory."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _split_into_buckets(tensors: list[Tensor], limit: int = 2**26) -> Iterator[list[Tensor]]:
    """Return the tensors in order, in buckets of about `limit` bytes."""
    ends = accumulate(tensor.nbytes for tensor in tensors)
    for _, numbered in groupby(zip(ends, tensors, strict=True), key=lambda pair: (pair[0] - 1) // limit):
        yield [tensor for _, tensor in numbered]


def reads_host_memory(group: ProcessGroup) -> bool:
    """Return whether the group's backend can send host memory: gloo can, and NCCL cannot."""
    return "cpu" in _device_types(group)


def _device_types(group: ProcessGroup) -> list[str]:
    """Return the device types that the group has a backend for, as in "cpu:gloo,cuda:nccl"."""
    return [pair.partition(":")[0] for pair in torch.distributed.get_backend_config(group).split(",")]
