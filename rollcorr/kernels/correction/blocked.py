"""The correction in one pass over cache-sized blocks, in eager torch: the fast twin of `reference` on every device.

Three steps. Each block of tokens is read once and leaves per-sequence sums and block-wide moments. The per-sequence
table then decides weights and rejections (`decide`). Last, those decisions are spread over the outputs. No value is
read on the way, so nothing waits for the device.

Arithmetic inside a block is float64, where it costs no memory traffic: log-ratios of 1e-7 keep their digits, and k3
needs no series.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.core.bounds import exceeds, ratio_above, ratio_below
from rollcorr.core.divergence import CAP
from rollcorr.core.layout import sequence_count, sequence_ids
from rollcorr.kernels.correction.band import exceedance_band
from rollcorr.kernels.correction.decide import decide
from rollcorr.kernels.correction.output import CorrectionOutput
from rollcorr.kernels.correction.table import BlockRows, SequenceTable

if TYPE_CHECKING:
    from rollcorr.config import Criterion, RolloutCorrectionConfig

CPU_BLOCK = 1 << 16
"""Tokens in a block on the CPU: half a megabyte for each float64 temporary, so that a block stays in cache."""

DEVICE_BLOCK = 1 << 22
"""Tokens in a block elsewhere: enough to fill the device, few enough that temporaries stay below a gigabyte."""


def blocked_correction(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    *,
    cu_seqlens: Tensor | None = None,
    block_tokens: int | None = None,
) -> CorrectionOutput:
    """As `rollcorr.kernels.correction.correction_kernel`; `block_tokens` sets a block's size."""
    size = block_tokens or (CPU_BLOCK if mask.device.type == "cpu" else DEVICE_BLOCK)
    table, rows = SequenceTable(sequence_count(mask, cu_seqlens=cu_seqlens), mask.device), BlockRows()
    loss_mask = torch.empty_like(mask)
    weights = None if config.rollout_is is None else torch.empty_like(mask, dtype=torch.float32)
    blocks = list(_blocks(mask, cu_seqlens, size))
    for at, ids in blocks:
        sink = _Sink(at, ids, table, rows, loss_mask[at], None if weights is None else weights[at])
        tokens, log_probs = _read(train_log_prob[at], rollout_log_prob[at], mask[at], config)
        _collect_mismatch(tokens, log_probs, sink)
        token_weights = _weigh(tokens, config, sink)
        _reject(tokens, token_weights, config, sink)
    decision = decide(table, rows, config)
    for at, ids in blocks:
        _spread(decision.sequence_kept, loss_mask[at], at, ids)
        if weights is not None and decision.sequence_weight is not None:
            _spread(decision.sequence_weight.float(), weights[at], at, ids)
    kept = (decision.sequence_kept & (table["kept"] > 0)) | (table["valid"] == 0)
    return CorrectionOutput(weights, loss_mask, kept, decision.statistics)


def _blocks(mask: Tensor, cu_seqlens: Tensor | None, size: int) -> Iterator[tuple[slice, Tensor | None]]:
    """Slices of rows (padded) or of tokens (packed, with each token's sequence); one empty slice for no data."""
    step = size if cu_seqlens is not None else max(1, size // max(1, mask.shape[1]))
    for start in range(0, max(1, mask.shape[0]), step):
        at = slice(start, start + step)
        yield at, None if cu_seqlens is None else sequence_ids(mask[at], cu_seqlens=cu_seqlens - start)


def _spread(per_sequence: Tensor, out: Tensor, at: slice, ids: Tensor | None) -> None:
    """Multiply every token of a block by its sequence's value, in place."""
    out.mul_(per_sequence[at].unsqueeze(-1) if ids is None else per_sequence[ids])


class _Sink(NamedTuple):
    """Where a block's results go."""

    at: slice
    ids: Tensor | None
    table: SequenceTable
    rows: BlockRows
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

    def fill(self, values: Tensor, value: float) -> Tensor:
        """The values with a fill where nothing is measured."""
        return values.masked_fill(~self.measured, value)


def _read(
    train: Tensor, rollout: Tensor, valid: Tensor, config: RolloutCorrectionConfig
) -> tuple[_Tokens, tuple[Tensor, Tensor]]:
    """Classify and widen a block; masked and missing values are replaced before any arithmetic."""
    rollout_finite = (rollout.abs() < torch.inf) & valid
    measured = (train.abs() < torch.inf) & rollout_finite
    zero = (train == -torch.inf) & rollout_finite
    compared = measured | zero
    counted = valid if config.nonfinite == "neutral" else compared
    pi = train.masked_fill(~compared, 0.0).double()  # out of place: float64 inputs are not copied by double()
    mu = rollout.masked_fill(~compared, 0.0).double()
    d = (pi - mu).masked_fill_(zero, 0.0)
    capped = d.clamp(max=CAP)
    em1 = torch.expm1(capped)
    taking_part = counted.double()
    count = taking_part.sum()
    return _Tokens(valid, measured, zero, valid ^ compared, counted, taking_part, count, d, em1, em1 - capped), (pi, mu)


def _collect_mismatch(tokens: _Tokens, log_probs: tuple[Tensor, Tensor], sink: _Sink) -> None:
    """How far apart the policies are, whatever is done about it."""
    d, rows, (pi, mu) = tokens.d, sink.rows, log_probs
    for column in ("valid", "measured", "zero", "missing", "counted"):
        sink.add(column, getattr(tokens, column))
    sink.add("log_ratio", d)
    sink.add("rollout", mu.masked_fill(tokens.zero, 0.0))
    low, high = tokens.fill(d, torch.inf), tokens.fill(d, -torch.inf)
    sink.table.extremes("log_ratio", low, high, sink.at, sink.ids)
    measured = tokens.measured.count_nonzero().double()
    rows.moments("log_ratio", d, tokens.taking_part, measured, excess=tokens.number - measured)

    size = d.abs()
    rows.add("abs_log_ratio", size.sum())
    rows.add("capped", (size > CAP).count_nonzero())
    rows.add("k3", tokens.k3.sum())
    rows.add("chi2_token", (tokens.em1 + 2.0).mul_(tokens.em1).sum())  # ρ² − 1 = (ρ − 1)(ρ + 1)
    outside = ratio_above(d, 1.1).logical_or_(ratio_below(d, 0.9))
    rows.add("ratio_outside_10pct", outside.count_nonzero())
    difference = pi.exp_().sub_(mu.exp_()).abs_()  # exp(0) − exp(0) where nothing is compared
    rows.add("prob_diff_abs", difference.sum())
    compared = tokens.measured | tokens.zero
    rows.extremes("prob_diff_abs", difference.masked_fill(~compared, torch.inf), difference)


def _weigh(tokens: _Tokens, config: RolloutCorrectionConfig, sink: _Sink) -> Tensor | None:
    """Token-level weights of a block, float64, 0 where nothing is counted. Sequence levels only mark what counts."""
    if sink.weights is None:
        return None
    if config.rollout_is != "token":
        sink.weights.copy_(tokens.counted)  # the sequence's weight is multiplied in at the end
        return None
    d, bound, rows = tokens.d, config.safety_bound, sink.rows
    raw = (tokens.em1 + 1.0).clamp_(min=math.exp(-bound)) if bound == CAP else d.clamp(-bound, bound).exp_()
    raw.mul_(tokens.taking_part).masked_fill_(tokens.zero, 0.0)
    lower, upper = exceedance_band(config)
    high, low = ratio_above(d, upper), ratio_below(d, lower)
    if config.is_mode == "icepop":
        weight = raw.masked_fill(high | low, 0.0)
    else:
        weight = raw if config.is_upper is None else raw.clamp(max=config.is_upper)
    rows.add("is_high", high.count_nonzero())
    rows.add("is_low", (low & tokens.counted).count_nonzero())
    rows.add("saturated_high", (d > bound).count_nonzero())
    rows.add("saturated_low", (d < -bound).count_nonzero())
    rows.moments("weight_raw", raw, tokens.taking_part, tokens.number)
    rows.moments("weight", weight, tokens.taking_part, tokens.number)
    rows.extremes("weight_raw", raw.masked_fill(~tokens.counted, torch.inf), raw)
    if config.is_mode == "icepop":  # otherwise the truncated extremes are the extremes truncated
        rows.extremes("weight", weight.masked_fill(~tokens.counted, torch.inf), weight)
    sink.add("raw_weight", raw)
    sink.add("weight", weight)
    sink.weights.copy_(weight)
    return weight


def _reject(tokens: _Tokens, weight: Tensor | None, config: RolloutCorrectionConfig, sink: _Sink) -> None:
    """Token-level rejections of a block, and the per-sequence sums that sequence-level ones need."""
    k2 = tokens.d.square().mul_(0.5) if any(c.kind == "k2" and c.scope != "seq_max" for c in config.criteria) else None
    for kind, values in (("k2", k2), ("k3", tokens.k3)):
        if values is not None and any(c.kind == kind and c.scope != "seq_max" for c in config.criteria):
            sink.add(kind, values)
    if config.rollout_token_veto_threshold is not None:
        veto = ratio_below(tokens.d, config.rollout_token_veto_threshold).logical_and_(tokens.counted)
        sink.add("catastrophic", veto.logical_or_(tokens.zero))
    rejected = {
        criterion.name: _criterion(tokens, criterion, k2, sink)
        for criterion in config.criteria
        if criterion.scope == "token"
    }
    if config.nonfinite in ("reject_token", "raise"):
        rejected["nonfinite"] = tokens.missing
    rejectors = torch.zeros_like(tokens.valid, dtype=torch.uint8)
    for mask in rejected.values():
        rejectors.add_(mask.view(torch.uint8))
    once = rejectors == 1
    kept = tokens.valid & (rejectors == 0)
    sink.add("kept", kept)
    sink.add("once", once)
    for name, mask in rejected.items():
        if name != "nonfinite":
            sink.add(f"{name}/rejected", mask)
            sink.add(f"{name}/alone", mask & once)
    if weight is not None:
        sink.add("kept_weight", weight.masked_fill(~kept, 0.0) if len(rejected) > 1 else weight)
    sink.loss_mask.copy_(kept)


def _criterion(tokens: _Tokens, criterion: Criterion, k2: Tensor | None, sink: _Sink) -> Tensor:
    """The tokens that a token-level criterion rejects; its own statistics on the way."""
    d, rows, row = tokens.d, sink.rows, f"rs/{criterion.name}"
    compared = tokens.counted & ~tokens.zero
    measured = tokens.measured.count_nonzero().double()
    if criterion.kind == "k1":
        high = ratio_above(d, criterion.upper).logical_and_(compared)
        low = ratio_below(d, criterion.lower).logical_and_(compared)
        if criterion.lower is not None:
            low.logical_or_(tokens.zero)
    else:
        values = tokens.k3 if k2 is None or criterion.kind == "k3" else k2
        high = exceeds(values, criterion.upper).logical_or_(tokens.zero)
        low = torch.zeros_like(high)
        rows.moments(row, values, tokens.taking_part, measured, excess=tokens.number - measured)
        rows.extremes(row, tokens.fill(values, torch.inf), tokens.fill(values, -torch.inf))
    rows.add(f"{row}/high", high.count_nonzero())
    rows.add(f"{row}/low", low.count_nonzero())
    return high.logical_or_(low)
