"""From per-sequence sums to decisions and statistics: the second step of the correction in torch.

docs/correction.md says what is decided and why; the functions here follow it in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.core import divergence
from rollcorr.core.bounds import ratio_above, ratio_below
from rollcorr.core.mergeable_statistics import Statistics, extremes_of, no_extremes
from rollcorr.core.weights import between, bounded_weights
from rollcorr.kernels.correction.bands import applied_weights, beyond_bounds, exceedance_band
from rollcorr.kernels.correction.rows import Computed, Sequences
from rollcorr.kernels.correction.torch.table import BlockRows, SequenceTable


class Decision(NamedTuple):
    """What is decided for whole sequences.

    Attributes:
        sequence_kept: (B,) bool: no sequence-level rejector takes it.
        sequence_weight: (B,) float64 weight of every token, at sequence and geometric level; None otherwise.
        statistics: the batch's rows.
    """

    sequence_kept: Tensor
    sequence_weight: Tensor | None
    statistics: Statistics


class _State(NamedTuple):
    """What was read of the tokens, and the rows of statistics so far."""

    table: SequenceTable
    sequences: Sequences
    blocks: BlockRows
    config: RolloutCorrectionConfig
    rows: Computed

    def mean_counted(self, sums: Tensor) -> Tensor:
        """Per-sequence sums over counted tokens, divided by their number."""
        return sums / self.sequences.counted.clamp(min=1)

    def number_of(self, sequences: Tensor) -> Tensor:
        """How many of these sequences have a counted token, 0-d."""
        return sequences.logical_and(self.sequences.has_counted).sum()

    def sample(self, name: str, values: Tensor) -> None:
        """Describe a per-sequence value over the sequences with a counted token, where it is finite."""
        self.rows.sample(name, values, self.sequences.has_counted)


def decide(table: SequenceTable, blocks: BlockRows, config: RolloutCorrectionConfig) -> Decision:
    """Weigh and reject sequences, and finish every row of statistics."""
    sequences = Sequences(
        valid=table["valid"],
        counted=table["counted"],
        compared=table["compared"],
        measured=table["measured"],
        log_ratio=table["log_ratio"],
        train=table["train"],
        rollout=table["rollout"],
    )
    state = _State(table, sequences, blocks, config, Computed({}, {}, {}))
    _compare(state)

    # Rejection does not look at weights, nor weights at rejection; only the denominators need both.
    kept = _reject(state)
    weight = _weigh(state, kept) if config.rollout_is is not None else None
    return Decision(kept, weight, state.rows.statistics(config, "torch"))


def _compare(state: _State) -> None:
    """How far apart the policies are, whatever is done about it."""
    table, blocks, (sums, moments, extremes) = state.table, state.blocks, state.rows
    state.rows.add_sequences(state.sequences, state.config)
    zero = sums["zero_probability"]

    moments["log_ratio"] = blocks.merged_moments("log_ratio")
    extremes["log_ratio"] = torch.stack([_amin(table["log_ratio_min"]), -_amin(-table["log_ratio_max"])])
    sums["abs_log_ratio"] = blocks.sum("abs_log_ratio")
    sums["k3"] = table["k3"].sum()
    sums["capped"] = blocks.sum("capped_low") + blocks.sum("capped_high")

    # ρ² − 1 = (ρ − 1)² + 2 (ρ − 1). The blocks saw measured tokens; each one of probability zero adds −1.
    sums["chi2_token"] = blocks.sum("expm1_squares") + 2.0 * table["expm1"].sum() - zero
    sums["ratio_outside_10pct"] = blocks.sum("ratio_above_10pct") + blocks.sum("ratio_below_10pct") + zero

    sums["prob_diff_abs"] = blocks.sum("prob_diff_abs")
    differences = blocks.merged_extremes("prob_diff_abs", zero.device)
    extremes["prob_diff_abs"] = _unless_empty(differences, sums["tokens_compared"])
    extremes["safety_bound"] = torch.full_like(extremes["log_ratio"], state.config.safety_bound)


# --- Weights ----------------------------------------------------------------------------------------------------------


def _weigh(state: _State, kept: Tensor) -> Tensor | None:
    """Sequence weights (None at token level) and the statistics of the weights at every level."""
    table, config, rows, sums = state.table, state.config, state.rows, state.rows.sums
    log_product = state.sequences.log_product

    if config.rollout_is == "token":
        weight = None
        mean_weight = state.mean_counted(table["weight"])
        log_mean_raw = state.mean_counted(table["raw"]).log()
        kept_weight = table["kept_weight"]
        _describe_token_weights(state)
    else:
        log_weight = log_product if config.rollout_is == "sequence" else state.mean_counted(log_product)
        raw = bounded_weights(log_weight, safety_bound=config.safety_bound)
        weight, log_mean_raw = applied_weights(raw, log_weight, config), raw.log()
        mean_weight = weight.masked_fill(~state.sequences.has_counted, 0.0)
        kept_weight = weight * table["kept"]
        _describe_sequence_weights(state, log_weight, raw, weight)

    state.sample("sequence_weight", mean_weight)
    rows.moments["unit_weight"] = rows.moments["weight" if weight is None else "sequence_weight"]

    # How many sequences are beyond a bound is counted before it acts.
    lower, upper = exceedance_band(config)
    if lower is not None or upper is not None:
        sums["is_seq_high"] = state.number_of(ratio_above(log_mean_raw, upper))
        sums["is_seq_low"] = state.number_of(ratio_below(log_mean_raw, lower))
    if config.is_upper is not None:
        sums["is_low_weight"] = state.number_of(ratio_below(log_product, 1 / config.is_upper))
    if config.is_mode == "icepop":
        inside = state.blocks.sum("is_inside") if weight is None else (table["counted"] * (weight > 0)).sum()
        sums["is_outside"] = sums["tokens_counted"] - inside

    kept_weight = kept_weight.masked_fill(~kept, 0.0)
    sums["kept_weight"] = kept_weight.sum()
    sums["kept_sequence_weight"] = (kept_weight / table["kept"].clamp(min=1)).sum()
    if config.rollout_is_batch_normalize:
        _describe_normalization(state)
    return weight


def _describe_token_weights(state: _State) -> None:
    """Finish the rows of token-level weights that the blocks began."""
    blocks, config, (sums, moments, extremes) = state.blocks, state.config, state.rows
    lower, upper = exceedance_band(config)
    sums["units"] = sums["tokens_counted"]

    # Up to the cap of k3 and χ², the blocks have counted already what lies beyond the safety bound.
    counter = "capped" if config.safety_bound == divergence.CAP else "saturated"
    sums["saturated_low"], sums["saturated_high"] = blocks.sum(f"{counter}_low"), blocks.sum(f"{counter}_high")
    if lower is not None or upper is not None:
        sums["is_high"], sums["is_low"] = blocks.sum("is_high"), blocks.sum("is_low")
        if lower is not None:
            sums["is_low"] = sums["is_low"] + sums["zero_probability"]

    raw = applied = _raw_extremes(state)
    moments["weight"] = moments["weight_raw"] = blocks.merged_moments("weight")
    if config.is_mode != "none":
        moments["weight_raw"] = blocks.merged_moments("weight_raw")
    if config.is_mode == "icepop":
        applied = blocks.merged_extremes("weight", raw.device)
    elif config.is_mode == "truncate":
        applied = between(raw, config.rollout_is_floor, config.is_upper)
    extremes["weight_raw"] = _unless_empty(raw, sums["units"])
    extremes["weight"] = _unless_empty(applied, sums["units"])


def _raw_extremes(state: _State) -> Tensor:
    """(min, max) of exp(clamp(d)) from those of d, as it is monotone; zero and neutral tokens join with 0 and 1."""
    sums, _, extremes = state.rows
    low, high = bounded_weights(extremes["log_ratio"], safety_bound=state.config.safety_bound).unbind()
    has_measured, has_zero = sums["tokens_measured"] > 0, sums["zero_probability"] > 0
    has_neutral = sums["units"] > sums["tokens_compared"]

    low, high = torch.where(has_measured, low, torch.inf), torch.where(has_measured, high, -torch.inf)
    for joins, value in ((has_zero, 0.0), (has_neutral, 1.0)):
        low, high = torch.where(joins, low.clamp(max=value), low), torch.where(joins, high.clamp(min=value), high)
    return torch.stack([low, high])


def _describe_sequence_weights(state: _State, log_weight: Tensor, raw: Tensor, weight: Tensor) -> None:
    """The rows of weights that a whole sequence shares: units are sequences, weights are counted once per token."""
    (sums, moments, extremes), has_counted, bound = state.rows, state.sequences.has_counted, state.config.safety_bound
    finite = has_counted & log_weight.isfinite()
    lower, upper = exceedance_band(state.config)

    sums["units"] = sums["sequences_counted"]
    sums["saturated_low"] = (finite & (log_weight < -bound)).sum()
    sums["saturated_high"] = state.number_of(log_weight > bound)
    if lower is not None or upper is not None:
        sums["is_high"] = state.number_of(ratio_above(log_weight, upper))
        sums["is_low"] = state.number_of(ratio_below(log_weight, lower))

    extremes["log_weight"] = extremes_of(log_weight, finite)
    for name, values in (("weight", weight), ("weight_raw", raw)):
        moments[name] = _repeated_moments(values, state.table["counted"])
        extremes[name] = extremes_of(values, has_counted)


def _describe_normalization(state: _State) -> None:
    """Sum and count of the weights whose mean the batch is normalized by: over units, or over what is left of them."""
    config, (sums, moments, _) = state.config, state.rows
    if config.batch_normalize_over == "valid":
        count, mean, _ = moments["unit_weight"]
        sums["norm_weight"], sums["norm_units"] = count * mean, count
    elif config.rollout_is == "token":
        sums["norm_weight"], sums["norm_units"] = sums["kept_weight"], sums["tokens_kept"]
    else:
        sums["norm_weight"], sums["norm_units"] = sums["kept_sequence_weight"], sums["sequences_kept"]


# --- Rejection --------------------------------------------------------------------------------------------------------


def _reject(state: _State) -> Tensor:
    """Which sequences every sequence-level rejector keeps, and the rows of all rejectors."""
    table, config, sums = state.table, state.config, state.rows.sums

    # Every rejector looks at the response mask alone, so their order never matters. Some take single tokens, and the
    # blocks have counted those; the others take whole sequences.
    tokens_taken: dict[str, Tensor] = {}
    sequences_taken: dict[str, Tensor] = {}
    for criterion in config.criteria:
        beyond = _criterion(state, criterion)
        if criterion.scope == "token":
            tokens_taken[criterion.name] = table[f"{criterion.name}/rejected"]
        else:
            sequences_taken[criterion.name] = beyond
    if config.rollout_token_veto_threshold is not None:
        vetoed = sequences_taken["veto"] = table["catastrophic"] > 0
        sums["catastrophic_tokens"], sums["vetoed_sequences"] = table["catastrophic"].sum(), vetoed.sum()
    if config.nonfinite == "reject_sequence":
        sequences_taken["nonfinite"] = table["missing"] > 0
    elif config.nonfinite != "neutral":
        tokens_taken["nonfinite"] = table["missing"]

    # A sequence stays if no sequence-level rejector takes it; its tokens stay if no token-level one takes them either.
    rejectors = torch.zeros_like(table["valid"])
    for taken in sequences_taken.values():
        rejectors = rejectors + taken
    sequence_kept = rejectors == 0
    tokens_kept = table["kept"]  # by every token-level rejector
    sums["tokens_kept"] = tokens_kept.masked_fill(~sequence_kept, 0.0).sum()
    sums["sequences_kept"] = (sequence_kept & (tokens_kept > 0)).sum()

    touching = rejectors
    for count in tokens_taken.values():
        touching = touching + (count > 0)
    sums["sequences_touched"] = (touching > 0).sum()
    sums["sequences_rejected_by_several"] = (touching > 1).sum()
    sums["rejected_by_several"] = _taken_by_several(table, rejectors).sum()

    # What a criterion takes alone says what would be kept without it.
    for criterion in config.criteria:
        name, row = criterion.name, f"rs/{criterion.name}"
        if criterion.scope == "token":
            tokens = tokens_taken[name]
            touched = tokens > 0
            alone = table[f"{name}/alone"].masked_fill(~sequence_kept, 0.0)
        else:
            touched = sequences_taken[name]
            tokens = table["valid"].masked_fill(~touched, 0.0)
            alone = tokens_kept.masked_fill(~(touched & (rejectors == 1)), 0.0)
        sums[f"{row}/tokens"], sums[f"{row}/sequences"] = tokens.sum(), touched.sum()
        sums[f"{row}/tokens_alone"], sums[f"{row}/sequences_alone"] = alone.sum(), (touched & (touching == 1)).sum()
    return sequence_kept


def _taken_by_several(table: SequenceTable, rejectors: Tensor) -> Tensor:
    """How many tokens of each sequence several rejectors take, where `rejectors` of them take the whole sequence."""
    taken_once = table["rejected_once"]  # by token-level rejectors
    taken_again = table["valid"] - table["kept"] - taken_once
    beside_one = torch.where(rejectors == 1, taken_once + taken_again, table["valid"])
    return torch.where(rejectors == 0, taken_again, beside_one)


def _criterion(state: _State, criterion: Criterion) -> Tensor:
    """Describe one criterion and return the sequences whose statistic is beyond its bound."""
    row, blocks, (sums, moments, extremes) = f"rs/{criterion.name}", state.blocks, state.rows
    value = _statistic(state, criterion)
    high, low = (side & state.sequences.has_counted for side in beyond_bounds(value, criterion))

    if criterion.scope != "token":
        state.sample(row, value)
        sums[f"{row}/high"], sums[f"{row}/low"] = high.sum(), low.sum()
        return high | low

    # A token criterion is described twice: for tokens, and by its mean over each sequence, which decides nothing.
    state.sample(f"{row}/seq", value)
    sums[f"{row}/seq_high"], sums[f"{row}/seq_low"] = high.sum(), low.sum()
    sums[f"{row}/high"], sums[f"{row}/low"] = blocks.sum(f"{row}/high"), blocks.sum(f"{row}/low")
    if criterion.kind == "k1":
        count, mean, m2 = moments["log_ratio"]
        moments[row] = torch.stack([count, -mean, m2])
        extremes[row] = -extremes["log_ratio"].flip(0)
    else:
        moments[row] = blocks.merged_moments(row)
        extremes[row] = _unless_empty(blocks.merged_extremes(row, value.device), sums["tokens_measured"])
    return high | low


def _statistic(state: _State, criterion: Criterion) -> Tensor:
    """A criterion's divergence for each sequence, (B,); a token criterion's averaged over the sequence."""
    table, zero = state.table, state.sequences.zero
    if criterion.scope == "seq_max":
        # The divergences are convex with their minimum at 0, so their maximum lies at one end of the range of d.
        estimate = divergence.ESTIMATES[criterion.kind]
        ends = [table[f"log_ratio_{end}"].masked_fill(table["measured"] == 0, 0.0) for end in ("min", "max")]
        value = torch.maximum(estimate(ends[0]), estimate(ends[1]))
    else:
        value = -table["log_ratio"] if criterion.kind == "k1" else table[criterion.kind]
        if criterion.scope != "seq_sum":
            value = state.mean_counted(value)
    return value.masked_fill(zero > 0, torch.inf)


# --- Small sums -------------------------------------------------------------------------------------------------------


def _repeated_moments(values: Tensor, counts: Tensor) -> Tensor:
    """Moments of a sample in which values[i] occurs counts[i] times: (3,)."""
    total = counts.sum()
    mean = (values * counts).sum() / total.clamp(min=1)
    return torch.stack([total, mean, (counts * (values - mean).square()).sum()])


def _unless_empty(extremes: Tensor, count: Tensor) -> Tensor:
    """The extremes, or (+inf, −inf) for an empty sample."""
    return torch.where(count > 0, extremes, no_extremes(extremes.device))


def _amin(column: Tensor) -> Tensor:
    return column.amin() if column.numel() else column.new_full((), torch.inf)
