"""The correction in one pass over cache-sized blocks, in eager torch: the fast twin of `reference` on every device.

Three steps. Each block of tokens is read once and leaves per-sequence sums and block-wide rows (`tokens`). The
per-sequence table then decides weights and rejections (`decide`). Last, those decisions are spread over the outputs.
No step reads a value, so none waits for a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from threading import Barrier, Lock

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.kernels.correction.call import Batch, CorrectionOutput, Out, outputs
from rollcorr.kernels.correction.rows import Computed
from rollcorr.kernels.correction.torch.decide import decide
from rollcorr.kernels.correction.torch.table import Block, Reduction, SequenceTable
from rollcorr.kernels.correction.torch.tokens import TokenPass

CPU_BLOCK = 1 << 16
"""Tokens in a block on the CPU: enough that operations cost more than asking for them, few enough for the cache."""

DEVICE_BLOCK = 1 << 20
"""Tokens in a block elsewhere: enough to fill the device, few enough that the buffers stay near 100 MB."""


Read = tuple[SequenceTable, Statistics]
"""What was read of some tokens: sums over each sequence, and the rows that tokens alone decide."""


def torch_correction(
    batch: Batch,
    config: RolloutCorrectionConfig,
    *,
    reduce: Reduction | None = None,
    out: Out | None = None,
    block_tokens: int | None = None,
) -> CorrectionOutput:
    """As `rollcorr.kernels.correction.dispatch.correction_kernel`; `block_tokens` sets a block's size."""
    weights, loss_mask = outputs(batch.mask, config, out)

    def read(block: Block) -> Read:
        at = block.at
        tokens = TokenPass(block, batch.train[at], batch.rollout[at], batch.mask[at], config)
        loss_mask[at].copy_(tokens.kept)
        if weights is not None:
            weights[at].copy_(tokens.weights)
        return tokens.table, Statistics.of(**tokens.rows._asdict())

    table, rows = read_blocks(read, batch.mask, batch.cu_seqlens, block_tokens)
    if reduce is not None:
        rows = reduce(table, rows)
    kept, weight, statistics = decide(table, Computed.of(rows), config)

    # What was decided for sequences is multiplied into what the blocks wrote. Packed: the ids of one block at a time.
    packed = batch.cu_seqlens is not None
    for block in token_blocks(batch.mask, batch.cu_seqlens, block_tokens) if packed else [Block(slice(None), None)]:
        _spread(kept, loss_mask, block)
        if weights is not None and weight is not None:
            _spread(weight.float(), weights, block)

    # Group baselines leave out a sequence that rejection emptied, but not one that came empty.
    sequence_kept = (kept & (table["kept"] > 0)) | (table["valid"] == 0)
    policy_sums = torch.stack([table[column] for column in ("valid", "measured", "train", "rollout")])
    return CorrectionOutput(weights, loss_mask, sequence_kept, statistics, policy_sums)


def read_blocks(
    read: Callable[[Block], Read],
    mask: Tensor,
    cu_seqlens: Tensor | None,
    size: int | None = None,
) -> Read:
    """Read the blocks of a batch in threads, and merge what `read` returns for each."""
    packed = cu_seqlens is not None

    def read_share(blocks: list[Block]) -> Read:
        return _merged(map(read, blocks), packed=packed)

    shares = in_threads(read_share, list(token_blocks(mask, cu_seqlens, size)), threads_for(mask))
    return _merged(iter(shares), packed=packed)


def _merged(parts: Iterator[Read], *, packed: bool) -> Read:
    """Merge what was read of blocks, one after the other: packed sequences have a column entry in each."""
    table, first = next(parts)
    statistics = [first]
    for other, rows in parts:
        table.join(other, packed=packed)
        statistics.append(rows)

    # One block has nothing to merge, and each operation is a launch on a device.
    return table, merge_statistics(statistics) if len(statistics) > 1 else first


def in_threads(read: Callable[[list[Block]], Read], blocks: list[Block], threads: int) -> list[Read]:
    """Read the blocks in contiguous shares, one for each thread; what each gave, in order.

    Whole blocks go to threads, rather than slices of every operation: a hundred small operations would meet at a
    hundred barriers, and each waits for the slowest core of a busy machine.
    """
    threads = max(1, min(threads, len(blocks)))
    if threads == 1:
        return [read(blocks)]
    bounds = [len(blocks) * i // threads for i in range(threads + 1)]
    with _starting:
        pool = _readers(threads)
    results = [pool.submit(read, blocks[start:end]) for start, end in pairwise(bounds)]
    try:
        return [result.result() for result in results]
    finally:
        wait(results)  # after an error too, for they write to the caller's buffers


_starting = Lock()


@cache
def _readers(threads: int) -> ThreadPoolExecutor:
    """Threads that read blocks, and in which torch starts none of its own.

    torch would cut exp and dot of even a small block among more threads, and readers would wait for those of each
    other. They stay between calls, because torch's number of threads is a thread's own, but also what every new thread
    begins with: it is 1 while readers start.
    """
    pool, begun = ThreadPoolExecutor(threads, "rollcorr"), Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # which a thread takes over from the process once, when it first asks
        torch.set_num_threads(1)
        begun.wait()

    own = torch.get_num_threads()
    try:
        for _ in range(threads):
            pool.submit(begin)
        begun.wait()
    except BaseException:
        begun.abort()
        pool.shutdown()
        raise
    finally:
        torch.set_num_threads(own)
    return pool


def forget_readers() -> None:
    """Start new readers at the next call. A fork leaves the old ones behind, with their lock."""
    global _starting
    _starting = Lock()
    _readers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_readers)


def threads_for(tokens: Tensor) -> int:
    """How many threads read blocks of these tokens: torch's own on the CPU; elsewhere the device has many itself.

    While torch.compile traces there is one, and the code that it makes has threads of its own.
    """
    if torch.compiler.is_compiling() or tokens.device.type != "cpu":
        return 1
    return torch.get_num_threads()


def token_blocks(mask: Tensor, cu_seqlens: Tensor | None, size: int | None = None) -> Iterator[Block]:
    """Blocks of whole rows (padded) or of tokens (packed); one empty block for no data.

    While torch.compile traces, everything is one block: it makes passes of its own, and a graph of many blocks would
    take it minutes.
    """
    if torch.compiler.is_compiling():
        size = max(1, mask.numel())
    size = size or (CPU_BLOCK if mask.device.type == "cpu" else DEVICE_BLOCK)
    step = size if cu_seqlens is not None else max(1, size // max(1, mask.shape[1]))
    offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
    total = mask.shape[0]
    for start in range(0, max(1, total), step):
        end = min(start + step, total)
        own = offsets
        if own is not None and end - start < total:
            own = (own - start).clamp(0, end - start)
        yield Block(slice(start, end), None if own is None else own.diff())


def _spread(per_sequence: Tensor, out: Tensor, block: Block) -> None:
    """Multiply every token of a block by its sequence's value, in place."""
    ids = block.ids()
    out[block.at].mul_(per_sequence[block.at].unsqueeze(-1) if ids is None else per_sequence[ids])
