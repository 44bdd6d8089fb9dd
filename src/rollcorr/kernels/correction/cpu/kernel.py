"""The correction on the CPU in compiled C: tokens, decisions and outputs in one pass over memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.correction_options import KERNEL_SAFETY_BOUND
from rollcorr.core.boundary import check_cu_seqlens, check_mask_values, truth, why_no_address
from rollcorr.core.detail_rows import BINS, TOP, merge_tops
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics
from rollcorr.kernels.correction.call import Batch, CorrectionOutput, Out, outputs
from rollcorr.kernels.correction.cpu.job import LOG_PROB_TYPES, MASK_TYPES, MAX_CRITERIA, OF_BATCH, thresholds_of
from rollcorr.kernels.correction.cpu.library import Library, library, status
from rollcorr.kernels.correction.rows import empty_statistics

TASK_TOKENS = 1 << 15
"""Tokens that a thread takes at a time. Fixed, so that results do not depend on the number of threads."""

NO_MEMORY, BAD_MASK = 0, 2
"""What `rollcorr_correct` returns in place of 1."""

_LARGE = 4 << 20  # bytes, from which large pages pay


def why_not(batch: Batch, config: RolloutCorrectionConfig) -> str | None:
    """Why the compiled kernel cannot take this batch, or None when it can."""
    if (hidden := why_no_address(**dict(batch.named))) is not None:
        return hidden
    named = batch.named
    for name, tensor in named:
        if not tensor.is_cpu:
            return f"{name} is on {tensor.device}"
    for name, tensor in named[:2]:
        if tensor.dtype not in LOG_PROB_TYPES:
            return f"{name} is {tensor.dtype}, and it reads float32 and bfloat16"
        if not _rows_are_contiguous(tensor):
            return f"the tokens of {name} do not lie next to each other (strides {tensor.stride()})"
    if config.safety_bound > KERNEL_SAFETY_BOUND:
        limit = f"the squares of weights up to e^{KERNEL_SAFETY_BOUND:g}"
        return f"safety_bound is {config.safety_bound:g}, and it sums {limit}"
    return status()[1] or _why_incomplete(config)


@lru_cache(maxsize=64)
def _why_incomplete(config: RolloutCorrectionConfig) -> str | None:
    """Why the library that runs here cannot compute what a configuration has, or None when it can."""
    if len(config.criteria) > MAX_CRITERIA:
        return f"rollout_rs names {len(config.criteria)} criteria, and it has room for {MAX_CRITERIA}"
    return library().abilities.why_not(config)


def cpu_correction(
    batch: Batch,
    config: RolloutCorrectionConfig,
    *,
    out: Out | None = None,
    level: str | None = None,
    checked: bool = False,
) -> CorrectionOutput:
    """As `rollcorr.kernels.correction.dispatch.correction_kernel`; the mask may hold numbers.

    Args:
        batch: what is corrected.
        config: what to compute.
        out: buffers for the outputs.
        level: names an instruction set.
        checked: whether `why_not` has just let this batch pass.

    Raises:
        ValueError: the batch is not one that it takes (`why_not`), `cu_seqlens` does not describe it, or the mask
            contains a negative or non-finite value; the buffers are then undefined.
        ImportError: the library was not built, or does not run here.
        MemoryError: there is no room for the statistics of the batch.
    """
    lib = library(level)
    reason = None if checked else why_not(batch, config)
    if reason is not None:
        raise ValueError(f"impl='cpu' cannot take this batch: {reason}; use impl='auto' or 'torch'")
    batch = _readable(batch)

    weights, loss_mask = outputs(batch.mask, config, out)
    if out is None:
        _ask_for_large_pages(lib, weights, loss_mask)
    offsets = None if batch.cu_seqlens is None else _offsets(batch.cu_seqlens, batch.mask.numel(), lib)

    # On the CPU, whatever `torch.set_default_device` says: C writes to their addresses.
    share = _shared(batch.sequences, batch.mask.numel(), torch.get_num_threads())
    kept = torch.empty(share.sequences, dtype=torch.bool, device="cpu")

    # The library has the rows of every configuration. It is told where those of this one are, and gives their numbers.
    template, places = _layout(config, lib.level)
    numbers = torch.empty(places.numel(), dtype=STATISTICS_DTYPE, device="cpu")
    policy_sums = torch.empty(4, share.sequences, dtype=STATISTICS_DTYPE, device="cpu")
    job = _job(batch, config, share, offsets, weights, loss_mask, kept, places, numbers, policy_sums)
    status = lib.functions.rollcorr_correct(job)
    if status == NO_MEMORY:
        raise MemoryError(f"no memory for the statistics of {share.tasks} tasks")
    if status == BAD_MASK:
        check_mask_values(batch.mask, "response_mask")
    return CorrectionOutput(weights, loss_mask, kept, template.unpack(numbers), policy_sums)


class Seen(NamedTuple):
    """What one read of a batch shows in detail.

    Attributes:
        log_ratio: histogram of d, (BINS,) float64.
        weight: histogram of the weights, likewise; 0 without weights.
        worst: the worst tokens: (TOP, 3) float64, rows (d, sequence, place in the sequence).
        sums: for each sequence Σ d, tokens of probability zero and tokens compared, (3, B) float64.
    """

    log_ratio: Tensor
    weight: Tensor
    worst: Tensor
    sums: Tensor


def cpu_detail(
    batch: Batch, config: RolloutCorrectionConfig, weights: Tensor | None, *, level: str | None = None
) -> Seen:
    """Histograms, the worst tokens and the sums of sequences, of a batch that `why_not` lets pass.

    Args:
        batch: what was corrected.
        config: how missing log-probs count.
        weights: applied weights before normalization, contiguous float32; None if there are none.
        level: names an instruction set.
    """
    lib, batch = library(level), _readable(batch)
    offsets = None if batch.cu_seqlens is None else _offsets(batch.cu_seqlens, batch.mask.numel(), lib)
    share = _shared(batch.sequences, batch.mask.numel(), torch.get_num_threads())
    job = _job(batch, config, share, offsets, weights)

    # A row of eight-byte numbers for each thread: both histograms, which are integers, and then the entries.
    threads = max(1, min(share.threads, share.tasks))
    seen = torch.zeros(threads, int(lib.functions.rollcorr_seen_size()) // 8, dtype=torch.int64, device="cpu")
    histograms = seen[:, : 2 * BINS].view(threads, 2, BINS)
    entries = seen[:, 2 * BINS :].view(STATISTICS_DTYPE).view(threads, TOP, 3)
    entries[..., 1:] = -1.0
    sums = torch.empty(3, share.sequences, dtype=STATISTICS_DTYPE, device="cpu")
    lib.functions.rollcorr_detail(job, seen.data_ptr(), sums.data_ptr())

    log_ratio, weight = histograms.sum(0).to(STATISTICS_DTYPE).unbind()
    return Seen(log_ratio, weight, merge_tops(entries), sums)


class _Share(NamedTuple):
    """How the sequences of a batch are shared among threads.

    Attributes:
        sequences: B.
        each: sequences of one task.
        tasks: how many there are.
        threads: that take them.
    """

    sequences: int
    each: int
    tasks: int
    threads: int


@lru_cache(maxsize=64)
def _shared(sequences: int, tokens: int, threads: int) -> _Share:
    """A task has about `TASK_TOKENS` tokens, and at least one sequence."""
    each = max(1, TASK_TOKENS * sequences // max(1, tokens))
    return _Share(sequences, each, max(1, -(-sequences // each)), threads)


def _job(
    batch: Batch,
    config: RolloutCorrectionConfig,
    share: _Share,
    offsets: Tensor | None,
    weights: Tensor | None,
    loss_mask: Tensor | None = None,
    kept: Tensor | None = None,
    places: Tensor | None = None,
    numbers: Tensor | None = None,
    policy_sums: Tensor | None = None,
) -> bytes:
    """A job as C reads it. It holds addresses: the tensors must outlive it."""
    train, rollout, mask, _ = batch

    # In the order of the fields of `Job`; what follows from the configuration comes behind.
    of_batch = OF_BATCH.pack(
        train.data_ptr(),
        rollout.data_ptr(),
        mask.data_ptr(),
        _address(offsets),
        _address(weights),
        _address(loss_mask),
        _address(kept),
        _address(places),
        _address(numbers),
        _address(policy_sums),
        share.sequences,
        mask.shape[-1],
        share.each,
        share.tasks,
        share.threads,
        0 if places is None else places.numel(),
        train.stride()[0],
        rollout.stride()[0],
        mask.stride()[0],
        LOG_PROB_TYPES[train.dtype],
        LOG_PROB_TYPES[rollout.dtype],
        MASK_TYPES[mask.dtype],
    )
    return of_batch + thresholds_of(config)


def _readable(batch: Batch) -> Batch:
    """The batch with a mask that C reads: of a dtype that it knows, the tokens of a row next to each other."""
    if batch.mask.dtype in MASK_TYPES and _rows_are_contiguous(batch.mask):
        return batch
    return batch._replace(mask=truth(batch.mask, "response_mask").contiguous())


def _rows_are_contiguous(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _ask_for_large_pages(lib: Library, *fresh: Tensor | None) -> None:
    for tensor in fresh:
        if tensor is not None and tensor.nbytes >= _LARGE:
            lib.functions.rollcorr_large_pages(tensor.data_ptr(), tensor.nbytes)


def _offsets(cu_seqlens: Tensor, tokens: int, lib: Library) -> Tensor:
    """The offsets as C reads them, after a check of their values: wrong ones would read beyond the data."""
    offsets = cu_seqlens.to("cpu", torch.int64).contiguous()
    if not lib.functions.rollcorr_offsets_fit(offsets.data_ptr(), offsets.numel() - 1, tokens):
        check_cu_seqlens(cu_seqlens, tokens)
    return offsets


@lru_cache(maxsize=64)
def _layout(config: RolloutCorrectionConfig, level: str) -> tuple[Statistics, Tensor]:
    """The rows of a configuration without values, and where each value is among the rows of the library."""
    template = empty_statistics(config, "cpu")
    lib, criteria = library(level), tuple(criterion.name for criterion in config.criteria)
    named = [(kind, name) for kind, names in template.names.items() for name in names]
    places = [place for kind, name in named for place in lib.places(kind, name, criteria)]
    return template, torch.tensor(places, dtype=torch.int64, device="cpu")
