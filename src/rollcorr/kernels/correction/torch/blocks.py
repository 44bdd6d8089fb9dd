"""The correction in one pass over cache-sized blocks, in eager torch: the fast implementation for every device.

Three steps. First, each block of tokens is read once, which returns per-sequence sums and block-wide rows (`tokens`).
Then the per-sequence table decides weights and rejections (`decide`). Last, those decisions are applied to the outputs.
No step reads a value on the host, so no step waits for a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.horizon import Gather, horizon_log_weights
from rollcorr.core.mergeable_statistics import Statistics, merge_statistics
from rollcorr.core.ratios import classify_tokens, token_log_ratio
from rollcorr.kernels.correction.call import Batch, CorrectionOutput, Out, outputs
from rollcorr.kernels.correction.rows import Computed
from rollcorr.kernels.correction.torch.decide import decide
from rollcorr.kernels.correction.torch.table import Block, Reduction, SequenceTable
from rollcorr.kernels.correction.torch.tokens import TokenPass

CPU_BLOCK = 1 << 16
"""Tokens in a block on the CPU: operations cost more than asking for them, and what they use stays in cache."""

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
    log_weights: Tensor | None = None,
) -> CorrectionOutput:
    """Implement `rollcorr.kernels.correction.dispatch.correction_kernel`; `block_tokens` sets a block's size.

    `log_weights` are ℓ of level "horizon" if another kernel has computed them.
    """
    weights, loss_mask = outputs(batch.mask, config, out)
    if config.rollout_is == "horizon" and log_weights is None:
        log_weights = _horizon_log_weights(batch, config, None if reduce is None else reduce.gather)

    def read(block: Block) -> Read:
        at = block.at
        own = None if log_weights is None else log_weights[at]
        tokens = TokenPass(block, batch.train[at], batch.rollout[at], batch.mask[at], config, own)
        loss_mask[at].copy_(tokens.kept)
        if weights is not None:
            weights[at].copy_(tokens.weights)
        return tokens.table, Statistics.of(**tokens.rows._asdict())

    table, rows = read_blocks(read, batch.mask, batch.cu_seqlens, block_tokens)
    if reduce is not None:
        rows = reduce.merge(table, rows)
    kept, weight, statistics = decide(table, Computed.of(rows), config)

    # Multiply the decisions for sequences into the outputs of the blocks. Packed: the ids of one block at a time.
    packed = batch.cu_seqlens is not None
    for block in token_blocks(batch.mask, batch.cu_seqlens, block_tokens) if packed else [Block(slice(None), None)]:
        _multiply_by_sequence_weight(kept, loss_mask, block)
        if weights is not None and weight is not None:
            _multiply_by_sequence_weight(weight.float(), weights, block)

    # Group baselines leave out a sequence that rejection emptied, but not one that was empty before.
    sequence_kept = (kept & (table["kept"] > 0)) | (table["valid"] == 0)
    policy_sums = torch.stack([table[column] for column in ("valid", "measured", "train", "rollout")])
    return CorrectionOutput(weights, loss_mask, sequence_kept, statistics, policy_sums)


def _horizon_log_weights(batch: Batch, config: RolloutCorrectionConfig, gather: Gather | None) -> Tensor:
    """Return ℓ of level "horizon", for the whole batch: a block may end inside of a sequence."""
    train, rollout, mask, cu_seqlens = batch
    classes = classify_tokens(train, rollout, mask)
    d = token_log_ratio(train.double(), rollout.double(), classes.measured)
    d = d.masked_fill(classes.zero_probability, -torch.inf)
    return horizon_log_weights(
        d,
        mask,
        decay=config.horizon_decay,
        per_turn=config.rollout_is_horizon_per_turn,
        cu_seqlens=cu_seqlens,
        gather=gather,
    )


def read_blocks(
    read: Callable[[Block], Read], mask: Tensor, cu_seqlens: Tensor | None, size: int | None = None
) -> Read:
    """Read the blocks of a batch in a thread pool, and merge the results of `read`, in order.

    Each thread reads complete blocks. Slicing every operation instead would need a hundred barriers for a hundred small
    operations, and each barrier waits for the slowest core of a busy machine. While torch.compile traces there is one
    block. A device has one thread, because it parallelizes each operation itself.
    """
    blocks = list(token_blocks(mask, cu_seqlens, size))
    packed, threads = cu_seqlens is not None, 1
    if len(blocks) > 1 and mask.is_cpu:
        threads = min(torch.get_num_threads(), len(blocks))
    if threads == 1:
        return _merge_blocks(map(read, blocks), packed=packed)
    own = torch.get_num_threads()
    results: list[Future[Read]] = []
    try:
        results.extend(_thread_pool(threads).submit(read, block) for block in blocks)
        return _merge_blocks((result.result() for result in results), packed=packed)
    finally:
        wait(results)  # also after an error: threads write to the caller's buffers
        torch.set_num_threads(own)  # the default of new threads


@cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return a persistent thread pool: new threads have fresh memory, which costs more than reading a block."""
    return ThreadPoolExecutor(threads, "rollcorr", _disable_torch_threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread_pool.cache_clear)


def _disable_torch_threads() -> None:
    """Keep torch from splitting operations among more threads in this one."""
    torch.get_num_threads()  # a thread copies the process's value once, on its first call
    torch.set_num_threads(1)


def _merge_blocks(parts: Iterator[Read], *, packed: bool) -> Read:
    """Merge the results of blocks; the table of a packed block has a number for every sequence."""
    table, rows = next(parts)
    of_blocks = [rows]
    for other, rows in parts:
        table.join(other, packed=packed)
        of_blocks.append(rows)

    # A single block needs no merge, and each operation is a launch on a device.
    return table, merge_statistics(of_blocks) if len(of_blocks) > 1 else rows


def token_blocks(mask: Tensor, cu_seqlens: Tensor | None, size: int | None = None) -> Iterator[Block]:
    """Yield blocks of complete rows (padded) or of tokens (packed); one empty block for an empty batch.

    While torch.compile traces, the batch is one block: the compiler makes its own passes, and a long graph of blocks
    would take minutes to compile.
    """
    if torch.compiler.is_compiling():
        size = max(1, mask.numel())
    size = size or (CPU_BLOCK if mask.is_cpu else DEVICE_BLOCK)
    step = size if cu_seqlens is not None else max(1, size // max(1, mask.shape[1]))
    offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
    total = mask.shape[0]
    for start in range(0, max(1, total), step):
        end = min(start + step, total)
        own = offsets
        if own is not None and end - start < total:
            own = (own - start).clamp(0, end - start)
        yield Block(slice(start, end), None if own is None else own.diff())


def _multiply_by_sequence_weight(per_sequence: Tensor, out: Tensor, block: Block) -> None:
    """Multiply every token of a block by its sequence's value, in place."""
    ids = block.ids()
    out[block.at].mul_(per_sequence[block.at].unsqueeze(-1) if ids is None else per_sequence[ids])
