"""From per-sequence sums to decisions and statistics: the second step of the correction in torch.

docs/background/correction.md explains the decisions. Contributions of sequences to the rows are collected first and
summed in one operation: on a GPU and in eager torch, an operation on a few hundred numbers costs as much as on one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.core import divergence
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics, extremes_of, no_extremes
from rollcorr.core.weights import bounded_weights, ratio_above, ratio_below
from rollcorr.kernels.correction.call import applied_weights, beyond_bounds, exceedance_band
from rollcorr.kernels.correction.rows import Computed, Sequences, Values
from rollcorr.kernels.correction.torch.table import SequenceTable


class _Tally(NamedTuple):
    """Sums read from the tokens, and the contributions of each sequence to the rows.

    Attributes:
        table: sums over each sequence.
        sequences: the sums and flags computed from the table.
        rows: the rows so far.
        sums: (B,) numbers or bools by name; the row is their sum.
        samples: (B,) numbers by name; the rows are their moments and extremes, over finite values of sequences with a
            counted token.
    """

    table: SequenceTable
    sequences: Sequences
    rows: Computed
    sums: Values
    samples: Values

    def finish(self) -> None:
        """Compute the rows from the collected values."""
        # torch.stack needs tensors of one dtype: flags are bool, sums are float64.
        for dtype in (torch.bool, STATISTICS_DTYPE):
            of_dtype = {name: values for name, values in self.sums.items() if values.dtype == dtype}
            totals = torch.stack(list(of_dtype.values())).sum(-1, dtype=STATISTICS_DTYPE)
            self.rows.sums.update(zip(of_dtype, totals.unbind(), strict=True))
        if not self.samples:
            return
        values = torch.stack(list(self.samples.values()))
        seen = values.isfinite() & self.sequences.has_counted
        for rows, found in (
            (self.rows.moments, _counted_moments(values, seen)),
            (self.rows.extremes, _masked_extremes(values, seen)),
        ):
            rows.update(zip(self.samples, found.unbind(), strict=True))


def decide(
    table: SequenceTable, rows: Computed, config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor | None, Statistics]:
    """Weigh and reject sequences, and complete the rows of statistics that the blocks began.

    Returns:
        The sequences that every sequence-level rejector keeps, (B,) bool; their tokens' weight, (B,) float64, at
        sequence and geometric level; and the batch's rows.
    """
    sequences = Sequences(
        valid=table["valid"],
        counted=table["valid" if config.nonfinite == "neutral" else "compared"],
        compared=table["compared"],
        measured=table["measured"],
        logs=torch.stack([table["log_ratio"], table["train"], table["rollout"]]),
    )
    tally = _Tally(table, sequences, rows, {"k3": table["k3"], **rows.add_sequences(sequences, config)}, {})
    rows.extremes["safety_bound"] = torch.full_like(rows.extremes["log_ratio"], config.safety_bound)

    # Rejection does not depend on weights, nor weights on rejection; only the denominators need both.
    kept = _reject(tally, config)
    weight = None if config.rollout_is is None else _compute_sequence_weights(tally, kept, config)
    tally.finish()
    if config.rollout_is is not None:
        _derive_weight_rows(rows, config)
    return kept, weight, rows.statistics(config, "torch")


def _compute_sequence_weights(tally: _Tally, kept: Tensor, config: RolloutCorrectionConfig) -> Tensor | None:
    """Return sequence weights (`None` at token level), and add each sequence's contributions to rows of weights."""
    table, sequences, _, sums, samples = tally
    counted, has_counted = sequences.counted.clamp(min=1), sequences.has_counted
    if config.weighs_tokens:
        weight = None
        samples["sequence_weight"], kept_weight = table["weight"] / counted, table["kept_weight"]
        log_mean_raw = (table["weight_raw"] / counted).log()
    else:
        product = sequences.log_product
        log_weight = product if config.rollout_is == "sequence" else product / counted
        raw = bounded_weights(log_weight, safety_bound=config.safety_bound)
        weight, log_mean_raw = applied_weights(raw, log_weight, config), raw.log()
        samples["sequence_weight"], kept_weight = weight.masked_fill(~has_counted, 0.0), weight * table["kept"]
        _describe_sequence_weights(tally, log_weight, raw, weight, config)

    # Count exceedances before the bounds are applied.
    lower, upper = exceedance_band(config)
    if (lower, upper) != (None, None):
        sums["is_seq_high"] = has_counted & ratio_above(log_mean_raw, upper)
        sums["is_seq_low"] = has_counted & ratio_below(log_mean_raw, lower)
    if config.is_upper is not None:
        sums["is_low_weight"] = has_counted & ratio_below(sequences.log_product, 1 / config.is_upper)

    sums["kept_weight"] = kept_weight.masked_fill(~kept, 0.0)
    sums["kept_sequence_weight"] = sums["kept_weight"] / table["kept"].clamp(min=1)
    return weight


def _describe_sequence_weights(
    tally: _Tally, log_weight: Tensor, raw: Tensor, weight: Tensor, config: RolloutCorrectionConfig
) -> None:
    """Add the rows that exist only at sequence level: units are sequences, and weights count once per token."""
    _, sequences, rows, sums, _ = tally
    has_counted, bound, (lower, upper) = sequences.has_counted, config.safety_bound, exceedance_band(config)
    finite = has_counted & log_weight.isfinite()
    sums["saturated_low"], sums["saturated_high"] = finite & (log_weight < -bound), finite & (log_weight > bound)
    if (lower, upper) != (None, None):
        sums["is_high"] = has_counted & ratio_above(log_weight, upper)
        sums["is_low"] = has_counted & ratio_below(log_weight, lower)
    if config.is_mode == "icepop":
        sums["is_outside"] = sequences.counted.masked_fill(weight > 0, 0.0)

    rows.extremes["log_weight"] = extremes_of(log_weight, finite)
    for name, values in (("weight", weight), ("weight_raw", raw)):
        rows.extremes[name] = extremes_of(values, has_counted)
        rows.moments[name] = _counted_moments(values, sequences.counted)


def _derive_weight_rows(rows: Computed, config: RolloutCorrectionConfig) -> None:
    """Compute the rows of weights that follow from other rows."""
    (sums, moments, _), token_level = rows, config.weighs_tokens
    sums["units"] = sums["tokens_counted" if token_level else "sequences_counted"]
    moments["unit_weight"] = moments["weight" if token_level else "sequence_weight"]

    # Sum and count of the weights for the normalizing mean: over all units, or over the units that rejection kept.
    if not config.rollout_is_batch_normalize:
        return
    if config.batch_normalize_over == "valid":
        count, mean, _ = moments["unit_weight"].unbind()
        sums["norm_weight"], sums["norm_units"] = count * mean, count
    elif token_level:
        sums["norm_weight"], sums["norm_units"] = sums["kept_weight"], sums["tokens_kept"]
    else:
        sums["norm_weight"], sums["norm_units"] = sums["kept_sequence_weight"], sums["sequences_kept"]


def _reject(tally: _Tally, config: RolloutCorrectionConfig) -> Tensor:
    """Return the sequences that every sequence-level rejector keeps, and add the rows of all rejectors."""
    table, sequences, _, sums, _ = tally
    valid, tokens_kept = sequences.valid, table["kept"]

    # Every rejector reads only the response mask, so their order never matters. Token-level rejectors remove tokens,
    # which the blocks have counted; the rest remove sequences.
    tokens_taken: Values = {}
    sequences_taken: Values = {}
    for criterion in config.criteria:
        beyond = _apply_criterion(tally, criterion)
        if criterion.scope == "token":
            tokens_taken[criterion.name] = table[f"{criterion.name}/rejected"]
        else:
            sequences_taken[criterion.name] = beyond
    if config.rollout_token_veto_threshold is not None:
        sums["catastrophic_tokens"] = table["catastrophic"]
        sums["vetoed_sequences"] = sequences_taken["veto"] = table["catastrophic"] > 0
    if config.nonfinite == "reject_sequence":
        sequences_taken["nonfinite"] = sequences.missing > 0
    elif config.nonfinite != "neutral":
        tokens_taken["nonfinite"] = sequences.missing

    # A sequence stays if no sequence-level rejector removes it; its tokens also need to pass the token-level rejectors.
    touching = {name: count > 0 for name, count in tokens_taken.items()}
    rejectors = sum(sequences_taken.values(), torch.zeros_like(valid))
    touched_by = sum(touching.values(), rejectors)
    kept, taken_by_one = rejectors == 0, rejectors == 1
    sums["tokens_kept"], sums["sequences_kept"] = tokens_kept * kept, kept & (tokens_kept > 0)
    sums["sequences_touched"], sums["sequences_rejected_by_several"] = touched_by > 0, touched_by > 1

    # Tokens removed by several rejectors, by the number of these that remove the sequence: zero, one or more.
    taken_by_tokens = valid - tokens_kept
    several = torch.where(taken_by_one, taken_by_tokens, valid)
    sums["rejected_by_several"] = torch.where(kept, taken_by_tokens - table["rejected_once"], several)

    # The tokens and sequences that only this criterion removes: they would stay without it.
    for criterion in config.criteria:
        name, row = criterion.name, f"rs/{criterion.name}"
        if criterion.scope == "token":
            tokens, touched = tokens_taken[name], touching[name]
            alone = table[f"{name}/alone"] * kept
        else:
            touched = sequences_taken[name]
            tokens, alone = valid * touched, tokens_kept * (touched & taken_by_one)
        sums[f"{row}/tokens"], sums[f"{row}/sequences"] = tokens, touched
        sums[f"{row}/tokens_alone"], sums[f"{row}/sequences_alone"] = alone, touched & (touched_by == 1)
    return kept


def _apply_criterion(tally: _Tally, criterion: Criterion) -> Tensor:
    """Add one criterion's statistic, and return the sequences in which it exceeds its bounds."""
    row, has_counted = f"rs/{criterion.name}", tally.sequences.has_counted
    value = _sequence_divergence(tally, criterion)
    high, low = (has_counted & beyond for beyond in beyond_bounds(value, criterion))

    # A token criterion has rows for tokens, and for its mean over each sequence, which decides no rejection.
    name, side = (f"{row}/seq", f"{row}/seq_") if criterion.scope == "token" else (row, f"{row}/")
    tally.samples[name] = value
    tally.sums[f"{side}high"], tally.sums[f"{side}low"] = high, low
    return high | low


def _sequence_divergence(tally: _Tally, criterion: Criterion) -> Tensor:
    """Compute a criterion's divergence of each sequence, (B,); a token criterion's mean over the sequence."""
    table, sequences, *_ = tally
    if criterion.scope == "seq_max":
        # The divergences are convex with their minimum at 0, so their maximum lies at one end of the range of d.
        ends = torch.stack([-table["negative_log_ratio_max"], table["log_ratio_max"]])
        ends = ends.masked_fill(sequences.unmeasured, 0.0)
        value = divergence.ESTIMATES[criterion.kind](ends).amax(0)
    else:
        value = -table["log_ratio"] if criterion.kind == "k1" else table[criterion.kind]
        if criterion.scope != "seq_sum":
            value = value / sequences.counted.clamp(min=1)

    # Some token has probability 0 in the trainer.
    return value.masked_fill(sequences.has_zero, torch.inf)


def _counted_moments(values: Tensor, counts: Tensor) -> Tensor:
    """Return (n, mean, M2) of samples: values[…, i] occurs counts[…, i] times; a bool counts as 0 or 1."""
    n = counts.sum(-1, dtype=STATISTICS_DTYPE)

    # An absent value may be NaN or inf, and NaN · 0 is NaN.
    present = values.masked_fill(counts == 0, 0.0)
    mean = (present * counts).sum(-1) / n.clamp(min=1)

    # Subtract the mean first: Σ x² − n mean² would cancel for a mean far from 0.
    m2 = ((present - mean.unsqueeze(-1)).square() * counts).sum(-1)
    return torch.stack([n, mean, m2], dim=-1)


def _masked_extremes(values: Tensor, seen: Tensor) -> Tensor:
    """Return (min, max) of rows of values, (S, B) → (S, 2), where `seen` is true."""
    if not values.shape[-1]:
        return no_extremes(values.device).expand(len(values), 2)
    ends = values.masked_fill(~seen, torch.inf).amin(-1), values.masked_fill(~seen, -torch.inf).amax(-1)
    return torch.stack(ends, dim=-1)
