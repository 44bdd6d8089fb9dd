"""The correction in one pass over cache-sized blocks, in eager torch: the fast twin of `reference` on every device.

Three steps. Each block of tokens is read once and leaves per-sequence sums and block-wide moments. The per-sequence
table then decides weights and rejections (`decide`). Last, those decisions are spread over the outputs. No value is
read on the way, so nothing waits for the device.

Arithmetic inside a block is float64, where it costs no memory traffic: log-ratios of 1e-7 keep their digits, and k3
needs no series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.core.bounds import exceeds, ratio_above, ratio_below
from rollcorr.core.divergence import CAP
from rollcorr.core.layout import sequence_count, sequence_ids
from rollcorr.kernels.correction.band import exceedance_band
from rollcorr.kernels.correction.decide import decide
from rollcorr.kernels.correction.output import CorrectionOutput, Out, outputs
from rollcorr.kernels.correction.table import BlockRows, Reduction, SequenceTable

if TYPE_CHECKING:
    from rollcorr.config import Criterion, RolloutCorrectionConfig

CPU_BLOCK = 1 << 15
"""Tokens in a block on the CPU: a block stays in cache, and torch runs each operation on it without its own threads."""

DEVICE_BLOCK = 1 << 20
"""Tokens in a block elsewhere: enough to fill the device, few enough that the buffers stay below 100 MB."""

Block = tuple[slice, "Tensor | None"]


def blocked_correction(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    *,
    cu_seqlens: Tensor | None = None,
    reduce: Reduction | None = None,
    out: Out | None = None,
    block_tokens: int | None = None,
) -> CorrectionOutput:
    """As `rollcorr.kernels.correction.correction_kernel`; `block_tokens` sets a block's size."""
    on_cpu = mask.device.type == "cpu"
    blocks = list(token_blocks(mask, cu_seqlens, block_tokens))
    weights, loss_mask = outputs(mask, config, out)

    def read(share: list[Block]) -> tuple[SequenceTable, BlockRows]:
        table, rows = SequenceTable(sequence_count(mask, cu_seqlens=cu_seqlens), mask.device), BlockRows()
        buffers: dict[str, Tensor] = {}
        for at, ids in share:
            scratch = _Scratch(buffers, mask[at])
            sink = _Sink(at, ids, table, rows, scratch, loss_mask[at], None if weights is None else weights[at])
            tokens, log_probs = _read(train_log_prob[at], rollout_log_prob[at], mask[at], config, scratch)
            _collect_mismatch(tokens, log_probs, sink)
            token_weights = _weigh(tokens, config, sink)
            _reject(tokens, token_weights, config, sink)
        return table, rows

    table, rows = _in_threads(read, blocks, torch.get_num_threads() if on_cpu else 1)
    if reduce is not None:
        reduce(table, rows)
    _derive(table, config)
    decision = decide(table, rows, config)
    for at, ids in blocks:
        _spread(decision.sequence_kept, loss_mask[at], at, ids)
        if weights is not None and decision.sequence_weight is not None:
            _spread(decision.sequence_weight.float(), weights[at], at, ids)
    kept = (decision.sequence_kept & (table["kept"] > 0)) | (table["valid"] == 0)
    return CorrectionOutput(weights, loss_mask, kept, decision.statistics)


def _in_threads(
    read: Callable[[list[Block]], tuple[SequenceTable, BlockRows]], blocks: list[Block], threads: int
) -> tuple[SequenceTable, BlockRows]:
    """Read the blocks in contiguous shares, one for each thread, and join the results in order.

    Whole blocks go to threads, rather than slices of every operation: a hundred small operations would meet at a
    hundred barriers, and each waits for the slowest core of a busy machine.
    """
    threads = max(1, min(threads, len(blocks)))
    if threads == 1:
        return read(blocks)
    bounds = [len(blocks) * i // threads for i in range(threads + 1)]
    shares = [blocks[start:end] for start, end in pairwise(bounds)]
    with ThreadPoolExecutor(threads) as pool:
        (table, rows), *others = pool.map(read, shares)
    for other_table, other_rows in others:
        table.join(other_table)
        rows.join(other_rows)
    return table, rows


def token_blocks(mask: Tensor, cu_seqlens: Tensor | None, size: int | None = None) -> Iterator[Block]:
    """Slices of rows (padded) or of tokens (packed, with each token's sequence); one empty slice for no data."""
    size = size or (CPU_BLOCK if mask.device.type == "cpu" else DEVICE_BLOCK)
    step = size if cu_seqlens is not None else max(1, size // max(1, mask.shape[1]))
    for start in range(0, max(1, mask.shape[0]), step):
        at = slice(start, start + step)
        yield at, None if cu_seqlens is None else sequence_ids(mask[at], cu_seqlens=cu_seqlens - start)


def _spread(per_sequence: Tensor, out: Tensor, at: slice, ids: Tensor | None) -> None:
    """Multiply every token of a block by its sequence's value, in place."""
    out.mul_(per_sequence[at].unsqueeze(-1) if ids is None else per_sequence[ids])


class _Scratch:
    """float64 buffers in a block's shape, kept from block to block: fresh memory costs more than the arithmetic."""

    def __init__(self, buffers: dict[str, Tensor], block: Tensor) -> None:
        self._buffers, self._shape, self._device = buffers, block.shape, block.device

    def __call__(self, name: str) -> Tensor:
        """The buffer of that name; it holds whatever was last written."""
        size = self._shape.numel()
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.float64, device=self._device)
        return self._buffers[name][:size].view(self._shape)

    def filled(self, name: str, values: Tensor, where: Tensor, fill: float) -> Tensor:
        """A copy of the values in that buffer, with a fill where a mask is true."""
        return self(name).copy_(values).masked_fill_(where, fill)


class _Sink(NamedTuple):
    """Where a block's results go."""

    at: slice
    ids: Tensor | None
    table: SequenceTable
    rows: BlockRows
    scratch: _Scratch
    loss_mask: Tensor
    weights: Tensor | None

    def add(self, column: str, values: Tensor) -> None:
        self.table.add(column, values, self.at, self.ids)


class _Tokens(NamedTuple):
    """A block's tokens: their classes, and the log-ratio with what is built on it, 0 wherever nothing is measured."""

    valid: Tensor
    measured: Tensor
    zero: Tensor
    missing: Tensor
    counted: Tensor  # takes part in weights and criteria
    taking_part: Tensor  # counted, as float64
    number: Tensor  # how many are counted, 0-d float64
    d: Tensor
    em1: Tensor  # expm1(min(d, 20))
    k3: Tensor


def _read(
    train: Tensor, rollout: Tensor, valid: Tensor, config: RolloutCorrectionConfig, scratch: _Scratch
) -> tuple[_Tokens, tuple[Tensor, Tensor]]:
    """Classify and widen a block; masked and missing values are replaced before any arithmetic."""
    pi, mu = scratch("pi").copy_(train), scratch("mu").copy_(rollout)
    rollout_finite = (torch.abs(mu, out=scratch("low")) < torch.inf).logical_and_(valid)
    measured = (torch.abs(pi, out=scratch("low")) < torch.inf).logical_and_(rollout_finite)
    zero = (pi == -torch.inf).logical_and_(rollout_finite)
    compared = measured | zero
    counted = valid if config.nonfinite == "neutral" else compared
    pi.masked_fill_(~compared, 0.0)
    mu.masked_fill_(~compared, 0.0)
    d = torch.sub(pi, mu, out=scratch("d")).masked_fill_(zero, 0.0)
    capped = torch.clamp(d, max=CAP, out=scratch("k3"))
    em1 = torch.expm1(capped, out=scratch("em1"))
    k3 = torch.sub(em1, capped, out=capped)
    taking_part = scratch("taking_part").copy_(counted)
    number, missing = taking_part.sum(), valid ^ compared
    return _Tokens(valid, measured, zero, missing, counted, taking_part, number, d, em1, k3), (pi, mu)


def _collect_mismatch(tokens: _Tokens, log_probs: tuple[Tensor, Tensor], sink: _Sink) -> None:
    """How far apart the policies are, whatever is done about it."""
    d, em1, rows, scratch, (pi, mu) = tokens.d, tokens.em1, sink.rows, sink.scratch, log_probs
    sink.add("valid", tokens.valid)
    sink.add("measured", tokens.measured)
    sink.add("zero", tokens.zero)
    sink.add("log_ratio", d)
    sink.add("rollout", scratch.filled("low", mu, tokens.zero, 0.0))
    sink.table.extremes("log_ratio", *_ends(d, tokens.measured, scratch), sink.at, sink.ids)
    measured = tokens.measured.count_nonzero().double()
    excess = tokens.number - measured
    rows.moments("log_ratio", d, tokens.taking_part, measured, out=scratch("low"), excess=excess)

    rows.add("abs_log_ratio", torch.abs(d, out=scratch("low")).sum())
    rows.add("capped_high", (d > CAP).count_nonzero())
    rows.add("capped_low", (d < -CAP).count_nonzero())
    rows.add("k3", tokens.k3.sum())
    rows.add("chi2_token", torch.add(em1, 2.0, out=scratch("low")).mul_(em1).sum())  # ρ² − 1 = (ρ − 1)(ρ + 1)
    outside = ratio_above(d, 1.1).logical_or_(ratio_below(d, 0.9))
    rows.add("ratio_outside_10pct", outside.count_nonzero())
    difference = pi.exp_().sub_(mu.exp_()).abs_()  # exp(0) − exp(0) where nothing is compared
    difference.nan_to_num_(nan=0.0, posinf=torch.inf)  # as in `core.divergence`: ∞ − ∞ of two densities
    rows.add("prob_diff_abs", difference.sum())
    rows.extremes("prob_diff_abs", difference.new_zeros(1), difference)  # no metric reads its minimum


def _derive(table: SequenceTable, config: RolloutCorrectionConfig) -> None:
    """Columns that follow from the counted ones."""
    compared = table["measured"] + table["zero"]
    table["missing"] = table["valid"] - compared
    table["counted"] = table["valid"] if config.nonfinite == "neutral" else compared
    if not any(criterion.scope == "token" for criterion in config.criteria):
        rejected = table["missing"] if config.nonfinite in ("reject_token", "raise") else torch.zeros_like(compared)
        table["kept"], table["once"] = table["valid"] - rejected, rejected
        if config.rollout_is == "token":
            table["kept_weight"] = table["weight"]


def _ends(values: Tensor, mask: Tensor, scratch: _Scratch) -> tuple[Tensor, Tensor]:
    """The values with +inf, and with −inf, where the mask is false: what a minimum and a maximum are taken over."""
    outside = ~mask
    return scratch.filled("low", values, outside, torch.inf), scratch.filled("high", values, outside, -torch.inf)


def _weigh(tokens: _Tokens, config: RolloutCorrectionConfig, sink: _Sink) -> Tensor | None:
    """Token-level weights of a block, float64, 0 where nothing is counted. Sequence levels only mark what counts."""
    if sink.weights is None:
        return None
    if config.rollout_is != "token":
        sink.weights.copy_(tokens.counted)  # the sequence's weight is multiplied in at the end
        return None
    d, bound, rows, scratch = tokens.d, config.safety_bound, sink.rows, sink.scratch
    if bound == CAP:
        raw = torch.add(tokens.em1, 1.0, out=scratch("raw")).clamp_(min=math.exp(-bound))
    else:
        raw = torch.clamp(d, -bound, bound, out=scratch("raw")).exp_()
    raw.mul_(tokens.taking_part).masked_fill_(tokens.zero, 0.0)
    lower, upper = exceedance_band(config)
    positive = tokens.counted ^ tokens.zero  # probability zero is below every bound, and is added later
    high = ratio_above(d, upper).logical_and_(positive)
    low = ratio_below(d, lower).logical_and_(positive)
    weight = raw
    if config.is_mode == "icepop":
        weight = scratch.filled("weight", raw, high | low, 0.0)
        rows.extremes("weight", *_ends(weight, tokens.counted, scratch))
    elif config.is_upper is not None:
        weight = torch.clamp(raw, max=config.is_upper, out=scratch("weight"))
    rows.add("is_high", high.count_nonzero())
    rows.add("is_low", low.count_nonzero())
    if bound != CAP:
        rows.add("saturated_high", (d > bound).count_nonzero())
        rows.add("saturated_low", (d < -bound).count_nonzero())
    rows.moments("weight_raw", raw, tokens.taking_part, tokens.number, out=scratch("low"))
    rows.moments("weight", weight, tokens.taking_part, tokens.number, out=scratch("low"))
    sink.add("raw_weight", raw)
    sink.add("weight", weight)
    sink.weights.copy_(weight)
    return weight


def _reject(tokens: _Tokens, weight: Tensor | None, config: RolloutCorrectionConfig, sink: _Sink) -> None:
    """Token-level rejections of a block, and the per-sequence sums that sequence-level ones need."""
    summed = {criterion.kind for criterion in config.criteria if criterion.scope != "seq_max"}
    k2 = torch.square(tokens.d, out=sink.scratch("k2")).mul_(0.5) if "k2" in summed else tokens.k3
    if "k2" in summed:
        sink.add("k2", k2)
    if "k3" in summed:
        sink.add("k3", tokens.k3)
    if config.rollout_token_veto_threshold is not None:
        catastrophic = ratio_below(tokens.d, config.rollout_token_veto_threshold).logical_and_(tokens.counted)
        sink.add("catastrophic", catastrophic.logical_or_(tokens.zero))
    rejected = {
        criterion.name: _criterion(tokens, criterion, k2, sink)
        for criterion in config.criteria
        if criterion.scope == "token"
    }
    if config.nonfinite in ("reject_token", "raise"):
        rejected["nonfinite"] = tokens.missing
    if not any(name != "nonfinite" for name in rejected):
        sink.loss_mask.copy_(tokens.valid & ~tokens.missing if rejected else tokens.valid)
        return
    rejectors = torch.zeros_like(tokens.valid, dtype=torch.uint8)
    for mask in rejected.values():
        rejectors.add_(mask.view(torch.uint8))
    once = rejectors == 1
    kept = (rejectors == 0).logical_and_(tokens.valid)
    sink.add("kept", kept)
    sink.add("once", once)
    for name, mask in rejected.items():
        if name != "nonfinite":
            sink.add(f"{name}/rejected", mask)
            sink.add(f"{name}/alone", mask & once)
    if weight is not None:
        sink.add("kept_weight", sink.scratch.filled("low", weight, ~kept, 0.0))
    sink.loss_mask.copy_(kept)


def _criterion(tokens: _Tokens, criterion: Criterion, k2: Tensor, sink: _Sink) -> Tensor:
    """The tokens that a token-level criterion rejects; its own statistics on the way."""
    d, rows, row, scratch = tokens.d, sink.rows, f"rs/{criterion.name}", sink.scratch
    if criterion.kind == "k1":
        positive = tokens.counted ^ tokens.zero
        high = ratio_above(d, criterion.upper).logical_and_(positive)
        low = ratio_below(d, criterion.lower).logical_and_(positive)
        if criterion.lower is not None:
            low.logical_or_(tokens.zero)
    else:
        values = k2 if criterion.kind == "k2" else tokens.k3
        high = exceeds(values, criterion.upper).logical_or_(tokens.zero)
        low = torch.zeros_like(high)
        measured = tokens.measured.count_nonzero().double()
        excess = tokens.number - measured
        rows.moments(row, values, tokens.taking_part, measured, out=scratch("low"), excess=excess)
        rows.extremes(row, *_ends(values, tokens.measured, scratch))
    rows.add(f"{row}/high", high.count_nonzero())
    rows.add(f"{row}/low", low.count_nonzero())
    return high.logical_or_(low)
