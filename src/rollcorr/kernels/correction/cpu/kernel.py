"""The correction on the CPU in compiled C: tokens, decisions and outputs in one pass over memory."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.correction_options import KERNEL_SAFETY_BOUND
from rollcorr.core.boundary import check_cu_seqlens, check_mask_values, truth, why_no_address
from rollcorr.core.detail_rows import BINS, TOP, merge_tops
from rollcorr.core.layout import sequence_count
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics
from rollcorr.kernels.correction.call import Batch, CorrectionOutput, Out, outputs
from rollcorr.kernels.correction.cpu.job import LOG_PROB_TYPES, MASK_TYPES, MAX_CRITERIA, OF_BATCH, thresholds_of
from rollcorr.kernels.correction.cpu.library import Library, library, places_of, status
from rollcorr.kernels.correction.rows import empty_statistics

TASK_TOKENS = 1 << 15
"""Tokens that a thread takes at a time. Fixed, so that results do not depend on the number of threads."""

NO_MEMORY, BAD_MASK = 0, 2
"""What `rollcorr_correct` returns in place of 1."""

_NUMBERS = torch.empty(0, dtype=STATISTICS_DTYPE, device="cpu")
_LARGE_BATCH_BYTES = 4 << 20  # bytes; large pages are faster from this size on


def why_not(batch: Batch, config: RolloutCorrectionConfig) -> str | None:
    """Return why the compiled kernel does not support this batch; `None` if it does."""
    named = batch.named
    if (hidden := why_no_address(**named)) is not None:
        return hidden
    for name, tensor in named.items():
        if not tensor.is_cpu:
            return f"{name} is on {tensor.device}"
        if name == "response_mask":
            continue
        if tensor.dtype not in LOG_PROB_TYPES:
            return f"{name} is {tensor.dtype}, and it reads float32 and bfloat16"
        if not _rows_are_contiguous(tensor):
            return f"the tokens of {name} do not lie next to each other (strides {tensor.stride()})"
    if config.rollout_is == "horizon":
        return "rollout_is is 'horizon', and it weighs tokens and sequences"
    if config.safety_bound > KERNEL_SAFETY_BOUND:
        limit = f"the squares of weights up to e^{KERNEL_SAFETY_BOUND:g}"
        return f"safety_bound is {config.safety_bound:g}, and it sums {limit}"
    return status()[1] or _missing_rows_reason(config)


@lru_cache(maxsize=64)
def _missing_rows_reason(config: RolloutCorrectionConfig) -> str | None:
    """Return why the library in use cannot compute a configuration; `None` if it can."""
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
    """Implement `rollcorr.kernels.correction.dispatch.correction_kernel` in C; the mask may contain numbers.

    Args:
        batch: the batch to correct.
        config: configuration of the correction.
        out: optional buffers for the outputs.
        level: optional; an instruction set. The default is the fastest one of this machine.
        checked: whether `why_not` has already accepted this batch.

    Raises:
        ValueError: `why_not` rejects the batch, `cu_seqlens` does not describe it, or the mask
            contains a negative or non-finite value; the buffers are then undefined.
        ImportError: the library was not built, or cannot run on this machine.
        MemoryError: there is no room for the statistics of the batch.
    """
    lib = library(level)
    reason = None if checked else why_not(batch, config)
    if reason is not None:
        raise ValueError(f"impl='cpu' cannot take this batch: {reason}; use impl='auto' or 'torch'")
    batch = _make_readable(batch, lib)
    weights, loss_mask = outputs(batch.mask, config, out)
    for fresh in (weights, loss_mask) if out is None else ():
        if fresh is not None and fresh.nbytes >= _LARGE_BATCH_BYTES:
            lib.functions.rollcorr_large_pages(fresh.data_ptr(), fresh.nbytes)

    # The library computes the rows of every configuration. `places` selects this one's rows; it returns their numbers.
    template, places, thresholds = _plan_of(config, lib.level)
    sequences = sequence_count(batch.mask, cu_seqlens=batch.cu_seqlens)

    # C writes to these addresses. They are on the CPU with any default device, because `new_empty` takes no default.
    kept = loss_mask.new_empty(sequences)
    numbers = _NUMBERS.new_empty(places.numel())
    policy_sums = _NUMBERS.new_empty(4, sequences)
    job = _pack_job(batch, thresholds, sequences, weights, loss_mask, kept, places, numbers, policy_sums)
    status = lib.functions.rollcorr_correct(job)
    if status == NO_MEMORY:
        raise MemoryError(f"no memory for the statistics of {sequences} sequences")
    if status == BAD_MASK:
        check_mask_values(batch.mask, "response_mask")
    return CorrectionOutput(weights, loss_mask, kept, template.unpack(numbers), policy_sums)


def cpu_detail(
    batch: Batch, config: RolloutCorrectionConfig, weights: Tensor | None, *, level: str | None = None
) -> tuple[Tensor, Statistics]:
    """Read a batch that `why_not` accepts once more: for histograms, the worst tokens and the sums of sequences.

    Args:
        batch: the corrected batch.
        config: decides how missing log-probs count.
        weights: optional; applied weights before normalization, contiguous float32.
        level: optional; an instruction set. The default is the fastest one of this machine.

    Returns:
        For each sequence Σ d, tokens of probability zero and compared tokens, (3, B) float64; the histograms of d and
        of the weights; and the worst tokens, identified by their position in their sequence.
    """
    lib = library(level)
    batch = _make_readable(batch, lib)
    sequences = sequence_count(batch.mask, cu_seqlens=batch.cu_seqlens)
    job = _pack_job(batch, thresholds_of(config), sequences, weights)

    # A row of eight-byte numbers for each thread: both histograms, which are integers, and then the entries.
    threads = torch.get_num_threads()
    seen = torch.zeros(threads, int(lib.functions.rollcorr_seen_size()) // 8, dtype=torch.int64, device="cpu")
    histograms = seen[:, : 2 * BINS].view(threads, 2, BINS)
    entries = seen[:, 2 * BINS :].view(STATISTICS_DTYPE).view(threads, TOP, 3)
    entries[..., 1:] = -1.0
    sums = torch.empty(3, sequences, dtype=STATISTICS_DTYPE, device="cpu")
    lib.functions.rollcorr_detail(job, seen.data_ptr(), sums.data_ptr())

    found = dict(zip(("log_ratio", "weight"), histograms.sum(0), strict=True))
    if weights is None:
        del found["weight"]
    return sums, Statistics.of(histograms=found, tops={"tokens": merge_tops(entries)})


def _pack_job(
    batch: Batch,
    thresholds: bytes,
    sequences: int,
    weights: Tensor | None,
    loss_mask: Tensor | None = None,
    kept: Tensor | None = None,
    places: Tensor | None = None,
    numbers: Tensor | None = None,
    policy_sums: Tensor | None = None,
) -> bytes:
    """Return a job for C. It contains addresses: the tensors must outlive it."""
    train, rollout, mask, offsets = batch

    # A task has about `TASK_TOKENS` tokens, and at least one sequence.
    each = max(1, TASK_TOKENS * sequences // max(1, mask.numel()))

    # In the order of the fields of `Job`; the fields that follow from the configuration come last.
    addressed = (train, rollout, mask, offsets, weights, loss_mask, kept, places, numbers, policy_sums)
    of_batch = OF_BATCH.pack(
        *[0 if tensor is None else tensor.data_ptr() for tensor in addressed],
        sequences,
        mask.shape[-1],
        each,
        max(1, -(-sequences // each)),
        torch.get_num_threads(),
        0 if places is None else places.numel(),
        train.stride()[0],
        rollout.stride()[0],
        mask.stride()[0],
        LOG_PROB_TYPES[train.dtype],
        LOG_PROB_TYPES[rollout.dtype],
        MASK_TYPES[mask.dtype],
    )
    return of_batch + thresholds


def _make_readable(batch: Batch, lib: Library) -> Batch:
    """Return a batch that C can read: a mask of a supported dtype, and offsets with checked values."""
    train, rollout, mask, cu_seqlens = batch
    if mask.dtype not in MASK_TYPES or not _rows_are_contiguous(mask):
        mask = truth(mask, "response_mask").contiguous()
    if cu_seqlens is not None:
        given, cu_seqlens = cu_seqlens, cu_seqlens.to("cpu", torch.int64).contiguous()
        if not lib.functions.rollcorr_offsets_fit(cu_seqlens.data_ptr(), cu_seqlens.numel() - 1, mask.numel()):
            check_cu_seqlens(given, mask.numel())
    return Batch(train, rollout, mask, cu_seqlens)


def _rows_are_contiguous(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


@lru_cache(maxsize=64)
def _plan_of(config: RolloutCorrectionConfig, level: str) -> tuple[Statistics, Tensor, bytes]:
    """Return what depends only on the configuration, under one cache, because hashing the configuration takes time.

    Returns:
        Its rows without values, the index of each value in the library's rows, and its fields of a job.
    """
    template = empty_statistics(config, "cpu")
    places = places_of(library(level).names, [criterion.name for criterion in config.criteria])
    found = [place for kind, names in template.names.items() for name in names for place in places[kind, name]]
    return template, torch.tensor(found, dtype=torch.int64, device="cpu"), thresholds_of(config)
