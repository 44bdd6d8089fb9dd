"""The specification: each formula on complete float64 tensors. The faster implementations are tested against it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.core import divergence, layout, ratios, weights
from rollcorr.core.horizon import horizon_log_weights
from rollcorr.core.mergeable_statistics import extremes_of
from rollcorr.core.weights import ratio_above, ratio_below
from rollcorr.kernels.correction.call import (
    Batch,
    CorrectionOutput,
    applied_weights,
    beyond_bounds,
    exceedance_band,
)
from rollcorr.kernels.correction.rows import Computed, Sequences


class _TokenInputs(NamedTuple):
    """The inputs in float64, with values that several steps below need."""

    train: Tensor
    rollout: Tensor
    valid: Tensor
    missing: Tensor
    counted: Tensor
    compared: Tensor
    measured: Tensor
    log_ratio: Tensor  # d; −inf at probability zero, 0 on unmeasured tokens
    cu_seqlens: Tensor | None

    def sum(self, values: Tensor, mask: Tensor) -> Tensor:
        return layout.sequence_sum(values, mask, cu_seqlens=self.cu_seqlens)

    def counts(self, mask: Tensor) -> Tensor:
        return layout.token_count(mask, cu_seqlens=self.cu_seqlens)

    def expand(self, per_sequence: Tensor) -> Tensor:
        return layout.expand(per_sequence, self.valid, cu_seqlens=self.cu_seqlens)

    @property
    def has_counted(self) -> Tensor:
        """Return the sequences that take part in weights and criteria."""
        return self.counts(self.counted) > 0


def reference_correction(inputs: Batch, config: RolloutCorrectionConfig) -> CorrectionOutput:
    """Compute the correction as `rollcorr.kernels.correction.dispatch.correction_kernel` does."""
    train, rollout, mask, cu_seqlens = inputs
    measured, zero_probability, missing = ratios.classify_tokens(train, rollout, mask)
    compared = measured | zero_probability
    counted = mask if config.nonfinite == "neutral" else compared

    log_ratio = ratios.token_log_ratio(train.double(), rollout.double(), measured)
    log_ratio = log_ratio.masked_fill(zero_probability, -torch.inf)
    batch = _TokenInputs(
        train.double(), rollout.double(), mask, missing, counted, compared, measured, log_ratio, cu_seqlens
    )
    rows = Computed({}, {}, {})
    policy_sums = _compare_policies(batch, config, rows)

    # Rejection does not depend on weights, nor weights on rejection; only the denominators need both.
    loss_mask = _reject(batch, config, rows)
    token_weights = None if config.rollout_is is None else _compute_weights(batch, config, loss_mask, rows).float()

    # Group baselines leave out a sequence that rejection emptied, but not one that was empty before.
    sequence_kept = (batch.counts(loss_mask) > 0) | (batch.counts(batch.valid) == 0)
    return CorrectionOutput(token_weights, loss_mask, sequence_kept, rows.statistics(config, "reference"), policy_sums)


def _compare_policies(batch: _TokenInputs, config: RolloutCorrectionConfig, rows: Computed) -> Tensor:
    """Compare the policies, independent of the correction. Returns `CorrectionOutput.policy_sums`."""
    d, sums, measured, compared = batch.log_ratio, rows.sums, batch.measured, batch.compared
    logs = torch.stack([batch.sum(values, measured) for values in (d, batch.train, batch.rollout)])
    sequences = Sequences(
        valid=batch.counts(batch.valid),
        counted=batch.counts(batch.counted),
        compared=batch.counts(compared),
        measured=batch.counts(measured),
        logs=logs,
    )
    sums.update({name: values.sum() for name, values in rows.add_sequences(sequences, config).items()})

    # χ² and the shares include ρ = 0, but it has no logarithm to average.
    rows.sample("log_ratio", d, measured)
    rows.add_tokens(d, measured, compared, config)

    difference = divergence.probability_difference(batch.train, batch.rollout)
    sums["prob_diff_abs"] = _masked_sum(difference, compared)
    smallest, largest = extremes_of(difference, compared)
    rows.extremes["prob_diff_abs"] = torch.stack([smallest.clamp(max=0.0), largest])  # no metric reads its minimum
    rows.extremes["safety_bound"] = torch.full_like(rows.extremes["log_ratio"], config.safety_bound)
    return torch.stack([sequences.valid.double(), sequences.measured.double(), *logs[1:]])


def _compute_weights(batch: _TokenInputs, config: RolloutCorrectionConfig, loss_mask: Tensor, rows: Computed) -> Tensor:
    """Compute the importance weights, 0 on tokens that are not counted, and their statistics."""
    count, has_counted = batch.counts(batch.counted), batch.has_counted
    log_product = batch.sum(batch.log_ratio, batch.counted)
    token_level = config.weighs_tokens

    # Sum first; then clamp ℓ and bound the weight.
    if token_level:
        log_weight, units = batch.log_ratio, batch.counted
        if config.rollout_is == "horizon":
            log_weight = horizon_log_weights(
                log_weight,
                batch.valid,
                decay=config.horizon_decay,
                per_turn=config.rollout_is_horizon_per_turn,
                cu_seqlens=batch.cu_seqlens,
            )
    else:
        log_weight = log_product if config.rollout_is == "sequence" else log_product / count.clamp(min=1)
        units = has_counted
        rows.extremes["log_weight"] = extremes_of(log_weight, units & log_weight.isfinite())
    raw = weights.bounded_weights(log_weight, safety_bound=config.safety_bound)
    applied = applied_weights(raw, log_weight, config)

    sums = rows.sums
    sums["units"] = units.sum()
    sums["saturated_low"] = (units & log_weight.isfinite() & (log_weight < -config.safety_bound)).sum()
    sums["saturated_high"] = (units & (log_weight > config.safety_bound)).sum()

    # The loss has one weight per token at every level.
    token_raw, token_weight = (raw, applied) if token_level else (batch.expand(raw), batch.expand(applied))
    token_weight = token_weight.masked_fill(~batch.counted, 0.0)
    mean_raw = batch.sum(token_raw, batch.counted) / count.clamp(min=1)
    mean_weight = batch.sum(token_weight, batch.counted) / count.clamp(min=1)
    rows.sample("weight", token_weight, batch.counted)
    rows.sample("weight_raw", token_raw, batch.counted)
    rows.sample("sequence_weight", mean_weight, has_counted)
    rows.moments["unit_weight"] = rows.moments["weight" if token_level else "sequence_weight"]

    # Count exceedances before the bounds are applied.
    lower, upper = exceedance_band(config)
    if upper is not None or lower is not None:
        sums["is_high"] = (units & ratio_above(log_weight, upper)).sum()
        sums["is_low"] = (units & ratio_below(log_weight, lower)).sum()
        sums["is_seq_high"] = (has_counted & ratio_above(mean_raw.log(), upper)).sum()
        sums["is_seq_low"] = (has_counted & ratio_below(mean_raw.log(), lower)).sum()
    if config.is_upper is not None:
        sums["is_low_weight"] = (has_counted & ratio_below(log_product, 1 / config.is_upper)).sum()
    if config.is_mode == "icepop":
        sums["is_outside"] = (batch.counted & (token_weight == 0)).sum()

    kept_count = batch.counts(loss_mask)
    kept_weight = batch.sum(token_weight, loss_mask)
    sums["kept_weight"] = kept_weight.sum()
    sums["kept_sequence_weight"] = (kept_weight / kept_count.clamp(min=1)).sum()

    # The mean for batch normalization: over all units, or over the units that rejection kept.
    if config.rollout_is_batch_normalize:
        normalized = units
        if config.batch_normalize_over == "kept":
            normalized = loss_mask if token_level else kept_count > 0
        sums["norm_weight"] = _masked_sum(applied, normalized)
        sums["norm_units"] = normalized.sum()
    return token_weight


def _reject(batch: _TokenInputs, config: RolloutCorrectionConfig, rows: Computed) -> Tensor:
    """Compute the loss mask: the response mask without the tokens of each rejector."""
    sums = rows.sums

    # Every rejector reads only the response mask, so their order never matters.
    rejected = {criterion.name: _apply_criterion(batch, criterion, rows) for criterion in config.criteria}
    threshold = config.rollout_token_veto_threshold
    if threshold is not None:
        catastrophic = batch.counted & ratio_below(batch.log_ratio, threshold)
        vetoed = batch.counts(catastrophic) > 0
        sums["catastrophic_tokens"], sums["vetoed_sequences"] = catastrophic.sum(), vetoed.sum()
        rejected["veto"] = batch.valid & batch.expand(vetoed)
    if config.nonfinite == "reject_sequence":
        rejected["nonfinite"] = batch.valid & batch.expand(batch.counts(batch.missing) > 0)
    elif config.nonfinite != "neutral":
        rejected["nonfinite"] = batch.missing

    # A token stays if no rejector removes it.
    rejectors_of_token = torch.zeros_like(batch.valid, dtype=torch.int64)
    rejectors_of_sequence = torch.zeros_like(batch.counts(batch.valid))
    for taken in rejected.values():
        rejectors_of_token = rejectors_of_token + taken
        rejectors_of_sequence = rejectors_of_sequence + (batch.counts(taken) > 0)
    loss_mask = batch.valid & (rejectors_of_token == 0)
    sums["tokens_kept"] = loss_mask.sum()
    sums["sequences_kept"] = (batch.counts(loss_mask) > 0).sum()
    sums["sequences_touched"] = (rejectors_of_sequence > 0).sum()

    # Overlap shows rejectors that only repeat each other.
    sums["rejected_by_several"] = (rejectors_of_token > 1).sum()
    sums["sequences_rejected_by_several"] = (rejectors_of_sequence > 1).sum()
    for criterion in config.criteria:
        taken, row = rejected[criterion.name], f"rs/{criterion.name}"
        touched = batch.counts(taken) > 0
        sums[f"{row}/tokens"], sums[f"{row}/sequences"] = taken.sum(), touched.sum()
        sums[f"{row}/tokens_alone"] = (taken & (rejectors_of_token == 1)).sum()
        sums[f"{row}/sequences_alone"] = (touched & (rejectors_of_sequence == 1)).sum()
    return loss_mask


def _apply_criterion(batch: _TokenInputs, criterion: Criterion, rows: Computed) -> Tensor:
    """Return the tokens that one criterion rejects, and add the statistics of its divergence."""
    row, has_counted = f"rs/{criterion.name}", batch.has_counted
    estimate = divergence.ESTIMATES[criterion.kind](batch.log_ratio)
    value = _sequence_divergence(batch, criterion, estimate)

    # A token criterion has rows for tokens, and for its mean over each sequence, which decides no rejection.
    units = described = has_counted
    if criterion.scope == "token":
        rows.sample(f"{row}/seq", value, has_counted)
        seq_high, seq_low = beyond_bounds(value, criterion)
        rows.sums[f"{row}/seq_high"] = (has_counted & seq_high).sum()
        rows.sums[f"{row}/seq_low"] = (has_counted & seq_low).sum()
        value, units, described = estimate, batch.counted, batch.counted & ~batch.missing

    rows.sample(row, value, described)
    high, low = beyond_bounds(value, criterion)
    rows.sums[f"{row}/high"], rows.sums[f"{row}/low"] = (units & high).sum(), (units & low).sum()
    rejected = units & (high | low)
    return rejected if criterion.scope == "token" else batch.valid & batch.expand(rejected)


def _sequence_divergence(batch: _TokenInputs, criterion: Criterion, estimate: Tensor) -> Tensor:
    """Compute a criterion's divergence of each sequence, (B,); a token criterion's mean over the sequence."""
    if criterion.scope == "seq_max":
        largest = layout.sequence_max(estimate, batch.counted, cu_seqlens=batch.cu_seqlens)
        return largest.masked_fill(~batch.has_counted, 0.0)
    total = batch.sum(estimate, batch.counted)
    return total if criterion.scope == "seq_sum" else total / batch.counts(batch.counted).clamp(min=1)


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0).sum()
