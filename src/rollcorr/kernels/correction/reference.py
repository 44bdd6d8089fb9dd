"""The correction, one formula at a time on whole float64 tensors: what faster twins are tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.core import divergence, layout, ratios, rejection, weights
from rollcorr.core.bounds import exceeds, ratio_above, ratio_below
from rollcorr.core.statistics import Statistics, extremes_of, moments_of
from rollcorr.kernels.correction.band import exceedance_band
from rollcorr.kernels.correction.output import CorrectionOutput

if TYPE_CHECKING:
    from rollcorr.config import Criterion, RolloutCorrectionConfig

Rows = dict[str, Tensor]


class _Batch(NamedTuple):
    """The inputs in float64, with what every step below needs."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    classes: ratios.TokenClasses
    counted: Tensor  # tokens that take part in weights and criteria
    log_ratio: Tensor  # d; −inf at probability zero, 0 where nothing is measured
    cu_seqlens: Tensor | None

    def sum(self, values: Tensor, mask: Tensor) -> Tensor:
        return layout.sequence_sum(values, mask, cu_seqlens=self.cu_seqlens)

    def counts(self, mask: Tensor) -> Tensor:
        return layout.token_count(mask, cu_seqlens=self.cu_seqlens)

    def expand(self, per_sequence: Tensor) -> Tensor:
        return layout.expand(per_sequence, self.mask, cu_seqlens=self.cu_seqlens)

    @property
    def nonempty(self) -> Tensor:
        return self.counts(self.counted) > 0


class _Rows(NamedTuple):
    sums: Rows
    moments: Rows
    extremes: Rows

    def sample(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Describe a sample by its moments and extremes, over its finite values."""
        mask = mask & values.isfinite()
        self.moments[name] = moments_of(values, mask)
        self.extremes[name] = extremes_of(values, mask)


def reference_correction(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    config: RolloutCorrectionConfig,
    *,
    cu_seqlens: Tensor | None = None,
) -> CorrectionOutput:
    """As `rollcorr.kernels.correction.correction_kernel`."""
    batch = _prepare(train_log_prob, rollout_log_prob, mask, config, cu_seqlens)
    rows = _Rows({}, {}, {})
    _mismatch(batch, rows)
    rows.extremes["safety_bound"] = torch.full((2,), config.safety_bound, dtype=torch.float64, device=mask.device)
    loss_mask = _reject(batch, config, rows)
    token_weights = _weigh(batch, config, loss_mask, rows) if config.rollout_is is not None else None
    statistics = Statistics.of(sums=rows.sums, moments=rows.moments, extremes=rows.extremes, device=mask.device)
    kept = (batch.counts(loss_mask) > 0) | (batch.counts(mask) == 0)
    return CorrectionOutput(None if token_weights is None else token_weights.float(), loss_mask, kept, statistics)


def _prepare(
    train: Tensor, rollout: Tensor, mask: Tensor, config: RolloutCorrectionConfig, cu_seqlens: Tensor | None
) -> _Batch:
    classes = ratios.classify_tokens(train, rollout, mask)
    log_ratio = ratios.token_log_ratio(train.double(), rollout.double(), classes.measured)
    log_ratio = log_ratio.masked_fill(classes.zero_probability, -torch.inf)
    counted = mask if config.nonfinite == "neutral" else classes.measured | classes.zero_probability
    return _Batch(train.double(), rollout.double(), mask, classes, counted, log_ratio, cu_seqlens)


def _mismatch(batch: _Batch, rows: _Rows) -> None:
    """How far apart the policies are, whatever is done about it."""
    measured, zero, missing = batch.classes
    compared = measured | zero
    d, sums = batch.log_ratio, rows.sums
    sums["tokens"] = batch.mask.sum()
    sums["sequences"] = (batch.counts(batch.mask) > 0).sum()
    sums["nonfinite"] = missing.sum()
    sums["zero_probability"] = zero.sum()
    sums["tokens_measured"] = measured.sum()
    sums["tokens_compared"] = compared.sum()
    sums["tokens_counted"] = batch.counted.sum()
    sums["k3"] = _masked_sum(divergence.k3(d), measured)
    sums["abs_log_ratio"] = _masked_sum(d.abs(), measured)
    sums["chi2_token"] = _masked_sum(divergence.chi_squared(d), compared)
    sums["capped"] = (measured & (d.abs() > divergence.CAP)).sum()
    sums["ratio_outside_10pct"] = (compared & ~rejection.within_ratio_band(d, lower=0.9, upper=1.1)).sum()
    rows.sample("log_ratio", d, measured)
    difference = divergence.probability_difference(batch.train, batch.rollout)
    sums["prob_diff_abs"] = _masked_sum(difference, compared)
    ends = extremes_of(difference, compared)
    rows.extremes["prob_diff_abs"] = torch.stack([ends[0].clamp(max=0.0), ends[1]])  # no metric reads its minimum

    count = batch.counts(measured)
    seen = count > 0
    train_log_ppl = -batch.sum(batch.train, measured) / count.clamp(min=1)
    rollout_log_ppl = -batch.sum(batch.rollout, measured) / count.clamp(min=1)
    log_ppl_diff = -batch.sum(d, measured) / count.clamp(min=1)
    sums["sequences_measured"] = seen.sum()
    sums["train_log_ppl"] = _masked_sum(train_log_ppl, seen)
    sums["train_ppl"] = _masked_sum(train_log_ppl.exp(), seen)
    sums["rollout_log_ppl"] = _masked_sum(rollout_log_ppl, seen)
    sums["rollout_ppl"] = _masked_sum(rollout_log_ppl.exp(), seen)
    sums["log_ppl_diff"] = _masked_sum(log_ppl_diff, seen)
    sums["log_ppl_abs_diff"] = _masked_sum(log_ppl_diff.abs(), seen)
    sums["ppl_ratio"] = _masked_sum(log_ppl_diff.exp(), seen)
    rows.extremes["log_ppl_diff"] = extremes_of(log_ppl_diff, seen)

    sequence = batch.sum(d, batch.counted)
    sums["sequences_compared"] = batch.nonempty.sum()
    sums["chi2_seq"] = _masked_sum(divergence.chi_squared(sequence), batch.nonempty)
    sums["capped_sequences"] = (batch.nonempty & sequence.isfinite() & (sequence.abs() > divergence.CAP)).sum()


def _weigh(batch: _Batch, config: RolloutCorrectionConfig, loss_mask: Tensor, rows: _Rows) -> Tensor:
    """The importance weights, 0 where nothing is counted, and their statistics."""
    sequence = ratios.sequence_log_ratio(batch.log_ratio, batch.counted, cu_seqlens=batch.cu_seqlens)
    count = batch.counts(batch.counted)
    token_level = config.rollout_is == "token"
    if token_level:
        level, unit = batch.log_ratio, batch.counted
    else:
        level = sequence if config.rollout_is == "sequence" else sequence / count.clamp(min=1)
        unit = batch.nonempty
        rows.extremes["log_weight"] = extremes_of(level, unit & level.isfinite())
    raw = weights.bounded_weights(level, safety_bound=config.safety_bound)
    applied = _applied_weights(level, config)
    sums = rows.sums
    sums["units"] = unit.sum()
    sums["saturated_low"] = (unit & level.isfinite() & (level < -config.safety_bound)).sum()
    sums["saturated_high"] = (unit & (level > config.safety_bound)).sum()

    token_raw, token_weight = (raw, applied) if token_level else (batch.expand(raw), batch.expand(applied))
    token_weight = token_weight.masked_fill(~batch.counted, 0.0)
    mean_raw = batch.sum(token_raw, batch.counted) / count.clamp(min=1)
    mean_weight = batch.sum(token_weight, batch.counted) / count.clamp(min=1)
    rows.sample("weight", token_weight, batch.counted)
    rows.sample("weight_raw", token_raw, batch.counted)
    rows.sample("sequence_weight", mean_weight, batch.nonempty)
    rows.moments["unit_weight"] = rows.moments["weight" if token_level else "sequence_weight"]
    lower, upper = exceedance_band(config)
    if upper is not None or lower is not None:
        high, low = ratio_above(level, upper), ratio_below(level, lower)
        sums["is_high"], sums["is_low"] = (unit & high).sum(), (unit & low).sum()
        sequence_level = mean_raw.log()
        sums["is_seq_high"] = (batch.nonempty & ratio_above(sequence_level, upper)).sum()
        sums["is_seq_low"] = (batch.nonempty & ratio_below(sequence_level, lower)).sum()
    if config.is_upper is not None:
        sums["is_low_weight"] = (batch.nonempty & ratio_below(sequence, 1 / config.is_upper)).sum()
    if config.is_mode == "icepop":
        sums["is_outside"] = (batch.counted & (token_weight == 0)).sum()

    kept_count = batch.counts(loss_mask)
    kept_sum = batch.sum(token_weight, loss_mask)
    sums["kept_weight"] = kept_sum.sum()
    sums["kept_sequence_weight"] = (kept_sum / kept_count.clamp(min=1)).sum()
    if config.rollout_is_batch_normalize:
        normalized = unit
        if config.batch_normalize_over == "kept":
            normalized = loss_mask if token_level else kept_count > 0
        sums["norm_weight"] = _masked_sum(applied, normalized)
        sums["norm_units"] = normalized.sum()
    return token_weight


def _applied_weights(level: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    bound = config.safety_bound
    if config.is_mode == "icepop":
        lower, upper = config.is_lower or 0.0, config.is_upper or 0.0
        return weights.masked_weights(level, lower=lower, upper=upper, safety_bound=bound)
    if config.is_upper is not None:
        return weights.truncated_weights(level, upper=config.is_upper, safety_bound=bound)
    return weights.bounded_weights(level, safety_bound=bound)


def _reject(batch: _Batch, config: RolloutCorrectionConfig, rows: _Rows) -> Tensor:
    """The loss mask: the response mask, less what each rejector takes out of it."""
    rejected = {criterion.name: _criterion(batch, criterion, rows) for criterion in config.criteria}
    if config.rollout_token_veto_threshold is not None:
        catastrophic = batch.counted & rejection.catastrophic_tokens(
            batch.log_ratio, threshold=config.rollout_token_veto_threshold
        )
        vetoed = batch.counts(catastrophic) > 0
        rows.sums["catastrophic_tokens"], rows.sums["vetoed_sequences"] = catastrophic.sum(), vetoed.sum()
        rejected["veto"] = batch.mask & batch.expand(vetoed)
    if config.nonfinite == "reject_sequence":
        rejected["nonfinite"] = batch.mask & batch.expand(batch.counts(batch.classes.missing) > 0)
    elif config.nonfinite != "neutral":
        rejected["nonfinite"] = batch.classes.missing

    rejectors = torch.zeros_like(batch.mask, dtype=torch.int64)
    touching = torch.zeros_like(batch.counts(batch.mask))
    for mask in rejected.values():
        rejectors = rejectors + mask
        touching = touching + (batch.counts(mask) > 0)
    for criterion in config.criteria:
        mask, row = rejected[criterion.name], f"rs/{criterion.name}"
        rows.sums[f"{row}/tokens"] = mask.sum()
        rows.sums[f"{row}/sequences"] = (batch.counts(mask) > 0).sum()
        rows.sums[f"{row}/tokens_alone"] = (mask & (rejectors == 1)).sum()
        rows.sums[f"{row}/sequences_alone"] = ((batch.counts(mask) > 0) & (touching == 1)).sum()
    loss_mask = batch.mask & (rejectors == 0)
    rows.sums["tokens_kept"] = loss_mask.sum()
    rows.sums["sequences_kept"] = (batch.counts(loss_mask) > 0).sum()
    rows.sums["sequences_touched"] = (touching > 0).sum()
    rows.sums["rejected_by_several"] = (rejectors > 1).sum()
    rows.sums["sequences_rejected_by_several"] = (touching > 1).sum()
    return loss_mask


def _criterion(batch: _Batch, criterion: Criterion, rows: _Rows) -> Tensor:
    """The tokens that one criterion rejects, and the statistics of its divergence."""
    d, counted, row = batch.log_ratio, batch.counted, f"rs/{criterion.name}"
    estimate = {"k1": divergence.k1, "k2": divergence.k2, "k3": divergence.k3}[criterion.kind](d)
    token_scope = criterion.scope == "token"
    count = batch.counts(counted).clamp(min=1)
    if token_scope:
        value, unit = estimate, counted
        rows.sample(row, value, unit & ~batch.classes.missing)
        mean = batch.sum(estimate, counted) / count
        rows.sample(f"{row}/seq", mean, batch.nonempty)
        seq_high, seq_low = _outside(mean, criterion)
        rows.sums[f"{row}/seq_high"] = (batch.nonempty & seq_high).sum()
        rows.sums[f"{row}/seq_low"] = (batch.nonempty & seq_low).sum()
    else:
        unit = batch.nonempty
        if criterion.scope == "seq_max":
            value = layout.sequence_max(estimate, counted, cu_seqlens=batch.cu_seqlens).masked_fill(~unit, 0.0)
        else:
            value = batch.sum(estimate, counted) / (count if criterion.scope == "seq_mean" else 1)
        rows.sample(row, value, unit)
    high, low = _outside(value, criterion)
    rows.sums[f"{row}/high"], rows.sums[f"{row}/low"] = (unit & high).sum(), (unit & low).sum()
    rejected = unit & (high | low)
    return rejected if token_scope else batch.mask & batch.expand(rejected)


def _outside(value: Tensor, criterion: Criterion) -> tuple[Tensor, Tensor]:
    """Where the statistic is beyond the upper and the lower bound; for k1 the bounds are on ρ = exp(−value)."""
    if criterion.kind == "k1":
        return ratio_above(-value, criterion.upper), ratio_below(-value, criterion.lower)
    return exceeds(value, criterion.upper), torch.zeros_like(value, dtype=torch.bool)


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0).sum()
