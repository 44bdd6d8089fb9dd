"""From per-sequence sums to decisions and statistics: the second step of the correction in torch.

docs/background/correction.md says what is decided and why. First everything that is known of each sequence is noted in
a tally. The tally then becomes rows, all of one kind at once: for a GPU, and for eager torch, an operation on a few
hundred numbers costs what it costs on one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.core import divergence
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics, no_extremes
from rollcorr.core.weights import between, bounded_weights, ratio_above, ratio_below
from rollcorr.kernels.correction.bands import applied_weights, beyond_bounds, exceedance_band
from rollcorr.kernels.correction.rows import Computed, Sequences, Values, rows_of
from rollcorr.kernels.correction.torch.table import SequenceTable


class Decision(NamedTuple):
    """What is decided for whole sequences.

    Attributes:
        kept: (B,) bool: no sequence-level rejector takes it.
        keeps_tokens: (B,) bool: it is kept, and so is at least one of its tokens.
        weight: (B,) float64 weight of every token, at sequence and geometric level; None otherwise.
        statistics: the batch's rows.
    """

    kept: Tensor
    keeps_tokens: Tensor
    weight: Tensor | None
    statistics: Statistics


class _Tally:
    """What each sequence adds to the rows, (B,) each, under the name of its row.

    Attributes:
        numbers: the row is their sum.
        conditions: bool; the row is how many hold.
        of_counted: the same, where the sequence has a counted token.
        samples: the rows are moments and extremes, where finite and the sequence has a counted token.
        repeated: the rows are moments of a sample in which each value occurs once per counted token.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.numbers: Values = {}
        self.conditions: Values = {}
        self.of_counted: Values = {}
        self.samples: Values = {}
        self.repeated: Values = {}

    def sums(self) -> Values:
        """Name → sum, 0-d float64."""
        found: Values = {}
        for values in (self.numbers, self.conditions, self.of_counted):
            if values:
                columns = torch.stack(list(values.values()))
                if values is self.of_counted:
                    columns &= self.sequences.has_counted
                found |= zip(values, columns.sum(-1, dtype=STATISTICS_DTYPE).unbind(), strict=True)
        return found

    def describe(self, rows: Computed) -> None:
        """Fill the moments and extremes of all samples."""
        if self.samples:
            values = torch.stack(list(self.samples.values()))
            seen = (values.abs() < torch.inf) & self.sequences.has_counted
            rows.moments.update(zip(self.samples, _moments(values, seen, ~seen).unbind(), strict=True))
            rows.extremes.update(zip(self.samples, _extremes(values, values, ~seen).unbind(), strict=True))
            rows.moments.pop("log_weight", None)  # of which only the ends are a row
        if self.repeated:
            repeated = _repeated_moments(torch.stack(list(self.repeated.values())), self.sequences.counted)
            rows.moments.update(zip(self.repeated, repeated.unbind(), strict=True))


class _State:
    """What was read of the tokens, what it says about each sequence, and the rows of statistics so far."""

    def __init__(self, table: SequenceTable, blocks: Computed, config: RolloutCorrectionConfig) -> None:
        self.table, self.blocks, self.config = table, blocks, config
        self.sequences = Sequences(
            valid=table["valid"],
            counted=table["counted"],
            compared=table["compared"],
            measured=table["measured"],
            logs=table.neighbors("log_ratio", "rollout"),
        )
        self.tally, self.rows = _Tally(self.sequences), Computed({}, {}, {})
        self.at_least_one_counted = self.sequences.counted.clamp(min=1)  # what means are divided by


def decide(table: SequenceTable, blocks: Computed, config: RolloutCorrectionConfig) -> Decision:
    """Weigh and reject sequences, and finish every row of statistics."""
    state = _State(table, blocks, config)
    _compare(state)

    # Rejection does not look at weights, nor weights at rejection; only the denominators need both.
    kept, keeps_tokens = _reject(state)
    weight = _weigh(state, kept) if config.rollout_is is not None else None
    return Decision(kept, keeps_tokens, weight, _statistics(state))


# --- What is known of each sequence -----------------------------------------------------------------------------------


def _compare(state: _State) -> None:
    """How far apart the policies are, whatever is done about it."""
    tally, table = state.tally, state.table
    for row in rows_of(state.config):
        if row.of is not None and row.kind == "sums":
            values = row.of(state.sequences)
            (tally.conditions if values.dtype == torch.bool else tally.numbers)[row.name] = values
    tally.numbers["k3"], tally.numbers["expm1"] = table["k3"], table["expm1"]


def _weigh(state: _State, kept: Tensor) -> Tensor | None:
    """Sequence weights (None at token level), and what each sequence says about the weights at every level."""
    table, config, tally = state.table, state.config, state.tally
    log_product = state.sequences.log_product

    if config.rollout_is == "token":
        weight = None
        mean_weight = table["weight"] / state.at_least_one_counted
        log_mean_raw = (table["raw"] / state.at_least_one_counted).log()
        kept_weight = table["kept_weight"]
    else:
        log_weight = log_product if config.rollout_is == "sequence" else log_product / state.at_least_one_counted
        raw = bounded_weights(log_weight, safety_bound=config.safety_bound)
        weight, log_mean_raw = applied_weights(raw, log_weight, config), raw.log()
        mean_weight = weight.masked_fill(~state.sequences.has_counted, 0.0)
        kept_weight = weight * table["kept"]
        _note_sequence_weights(state, log_weight, raw, weight)
    tally.samples["sequence_weight"] = mean_weight

    # How many sequences are beyond a bound is counted before it acts.
    lower, upper = exceedance_band(config)
    if lower is not None or upper is not None:
        tally.of_counted["is_seq_high"] = ratio_above(log_mean_raw, upper)
        tally.of_counted["is_seq_low"] = ratio_below(log_mean_raw, lower)
    if config.is_upper is not None:
        tally.of_counted["is_low_weight"] = ratio_below(log_product, 1 / config.is_upper)

    kept_weight = kept_weight.masked_fill(~kept, 0.0)
    tally.numbers["kept_weight"] = kept_weight
    tally.numbers["kept_sequence_weight"] = kept_weight / table["kept"].clamp(min=1)
    return weight


def _note_sequence_weights(state: _State, log_weight: Tensor, raw: Tensor, weight: Tensor) -> None:
    """What only weights that a whole sequence shares have: units are sequences, weights count once per token."""
    tally, config, bound = state.tally, state.config, state.config.safety_bound
    lower, upper = exceedance_band(config)

    tally.of_counted["saturated_low"] = (log_weight > -torch.inf) & (log_weight < -bound)
    tally.of_counted["saturated_high"] = log_weight > bound
    if lower is not None or upper is not None:
        tally.of_counted["is_high"] = ratio_above(log_weight, upper)
        tally.of_counted["is_low"] = ratio_below(log_weight, lower)
    if config.is_mode == "icepop":
        tally.numbers["inside"] = state.sequences.counted * (weight > 0)

    tally.samples |= {"log_weight": log_weight, "weight": weight, "weight_raw": raw}
    tally.repeated |= {"weight": weight, "weight_raw": raw}


def _reject(state: _State) -> tuple[Tensor, Tensor]:
    """Which sequences every sequence-level rejector keeps, and which of these have a kept token."""
    table, config, tally = state.table, state.config, state.tally
    valid, missing = state.sequences.valid, state.sequences.missing

    # Every rejector looks at the response mask alone, so their order never matters. Some take single tokens, and the
    # blocks have counted those; the others take whole sequences.
    tokens_taken: Values = {}
    sequences_taken: Values = {}
    for criterion in config.criteria:
        beyond = _criterion(state, criterion)
        if criterion.scope == "token":
            tokens_taken[criterion.name] = table[f"{criterion.name}/rejected"]
        else:
            sequences_taken[criterion.name] = beyond
    if config.rollout_token_veto_threshold is not None:
        vetoed = sequences_taken["veto"] = table["catastrophic"] > 0
        tally.numbers["catastrophic_tokens"], tally.conditions["vetoed_sequences"] = table["catastrophic"], vetoed
    if config.nonfinite == "reject_sequence":
        sequences_taken["nonfinite"] = missing > 0
    elif config.nonfinite != "neutral":
        tokens_taken["nonfinite"] = missing

    # A sequence stays if no sequence-level rejector takes it; its tokens stay if no token-level one takes them either.
    rejectors = _how_many(sequences_taken, like=valid)
    tokens_kept, kept, taken_by_one = table["kept"], rejectors == 0, rejectors == 1
    keeps_tokens = kept & (tokens_kept > 0)
    tally.numbers["tokens_kept"], tally.conditions["sequences_kept"] = tokens_kept * kept, keeps_tokens

    touching = {name: count > 0 for name, count in tokens_taken.items()}
    touched_by = rejectors + _how_many(touching, like=valid)
    touched_by_one = touched_by == 1
    tally.conditions["sequences_touched"] = touched_by > 0
    tally.conditions["sequences_rejected_by_several"] = touched_by > 1
    tally.numbers["rejected_by_several"] = _taken_by_several(table, kept, taken_by_one)

    # What a criterion takes alone says what would be kept without it.
    for criterion in config.criteria:
        name, row = criterion.name, f"rs/{criterion.name}"
        if criterion.scope == "token":
            tokens, touched = tokens_taken[name], touching[name]
            alone = table[f"{name}/alone"] * kept
        else:
            touched = sequences_taken[name]
            tokens = valid * touched
            alone = tokens_kept * (touched & taken_by_one)
        tally.numbers[f"{row}/tokens"], tally.conditions[f"{row}/sequences"] = tokens, touched
        tally.numbers[f"{row}/tokens_alone"] = alone
        tally.conditions[f"{row}/sequences_alone"] = touched & touched_by_one
    return kept, keeps_tokens


def _how_many(taken: Values, like: Tensor) -> Tensor:
    """How many rejectors take each sequence, (B,) float64."""
    if not taken:
        return torch.zeros_like(like)
    first, *others = taken.values()
    return torch.stack([first, *others]).sum(0, dtype=like.dtype) if others else first.to(like.dtype)


def _taken_by_several(table: SequenceTable, kept: Tensor, taken_by_one: Tensor) -> Tensor:
    """How many tokens of each sequence several rejectors take, given how many of them take the whole sequence."""
    taken_by_tokens = table["valid"] - table["kept"]
    taken_again = taken_by_tokens - table["rejected_once"]
    beside_others = torch.where(taken_by_one, taken_by_tokens, table["valid"])
    return torch.where(kept, taken_again, beside_others)


def _criterion(state: _State, criterion: Criterion) -> Tensor:
    """Note one criterion's statistic, and return the sequences where it is beyond its bound."""
    row, tally = f"rs/{criterion.name}", state.tally
    value = _statistic(state, criterion)
    high, low = beyond_bounds(value, criterion)

    # A token criterion is described twice: for tokens, and by its mean over each sequence, which decides nothing.
    name = f"{row}/seq" if criterion.scope == "token" else row
    side = f"{row}/seq_" if criterion.scope == "token" else f"{row}/"
    tally.samples[name] = value
    tally.of_counted[f"{side}high"], tally.of_counted[f"{side}low"] = high, low
    return (high | low) & state.sequences.has_counted


def _statistic(state: _State, criterion: Criterion) -> Tensor:
    """A criterion's divergence for each sequence, (B,); a token criterion's averaged over the sequence."""
    table = state.table
    if criterion.scope == "seq_max":
        # The divergences are convex with their minimum at 0, so their maximum lies at one end of the range of d.
        ends = torch.stack([table["log_ratio_min"], table["log_ratio_max"]])
        ends = ends.masked_fill(state.sequences.unmeasured, 0.0)
        value = divergence.ESTIMATES[criterion.kind](ends).amax(0)
    else:
        value = -table["log_ratio"] if criterion.kind == "k1" else table[criterion.kind]
        if criterion.scope != "seq_sum":
            value = value / state.at_least_one_counted
    return value.masked_fill(state.sequences.has_zero, torch.inf)


# --- The rows of the batch --------------------------------------------------------------------------------------------


def _statistics(state: _State) -> Statistics:
    """Every row, from what the blocks and the tally hold."""
    config, rows, blocks = state.config, state.rows, state.blocks
    sums, extremes = rows.sums, rows.extremes
    sums |= state.tally.sums()
    state.tally.describe(rows)

    _finish_comparison(state)
    if config.rollout_is == "token":
        _finish_token_weights(state)
    if config.rollout_is is not None:
        _finish_weights(state)
    for criterion in config.criteria:
        if criterion.scope == "token":
            _finish_token_criterion(criterion, rows, blocks)

    # An empty sample has no smallest and no largest value.
    may_be_empty = {"prob_diff_abs": sums["tokens_compared"]}
    if config.rollout_is == "token":
        may_be_empty |= {"weight": sums["units"], "weight_raw": sums["units"]}
    for criterion in config.criteria:
        if criterion.scope == "token" and criterion.kind != "k1":
            may_be_empty[f"rs/{criterion.name}"] = sums["tokens_measured"]
    empty = torch.stack(list(may_be_empty.values())) == 0
    found = torch.stack([extremes[name] for name in may_be_empty])
    nothing = no_extremes(found.device)
    extremes |= zip(may_be_empty, torch.where(empty.unsqueeze(-1), nothing, found).unbind(), strict=True)
    return rows.statistics(config, "torch")


def _finish_comparison(state: _State) -> None:
    """The rows of the mismatch."""
    blocks, (sums, moments, extremes) = state.blocks, state.rows
    zero = sums["zero_probability"]

    moments["log_ratio"] = blocks.moments["log_ratio"]
    extremes["log_ratio"], extremes["log_ppl_diff"] = _extremes_of_measured(state)
    sums["abs_log_ratio"] = blocks.sums["abs_log_ratio"]
    sums["capped"] = blocks.sums["capped_low"] + blocks.sums["capped_high"]

    # ρ² − 1 = (ρ − 1)² + 2 (ρ − 1). The blocks saw measured tokens; each one of probability zero adds −1.
    sums["chi2_token"] = blocks.sums["expm1_squares"].add(sums.pop("expm1"), alpha=2.0) - zero
    sums["ratio_outside_10pct"] = blocks.sums["ratio_above_10pct"] + blocks.sums["ratio_below_10pct"] + zero

    sums["prob_diff_abs"] = blocks.sums["prob_diff_abs"]
    extremes["prob_diff_abs"] = blocks.extremes["prob_diff_abs"]
    extremes["safety_bound"] = torch.full_like(extremes["log_ratio"], state.config.safety_bound)


def _extremes_of_measured(state: _State) -> tuple[Tensor, Tensor]:
    """Extremes of d, and of the log-perplexities' difference, over the sequences with a measured token."""
    difference = state.sequences.log_ppls[0]
    smallest = torch.stack([state.table["log_ratio_min"], difference])
    largest = torch.stack([state.table["log_ratio_max"], difference])
    of_d, of_difference = _extremes(smallest, largest, state.sequences.unmeasured).unbind()
    return of_d, of_difference


def _finish_weights(state: _State) -> None:
    """The rows of weights at every level."""
    config, blocks, (sums, moments, _) = state.config, state.blocks, state.rows
    token_level = config.rollout_is == "token"
    if not token_level:
        sums["units"] = sums["sequences_counted"]
    moments["unit_weight"] = moments["weight" if token_level else "sequence_weight"]

    if config.is_mode == "icepop":
        inside = blocks.sums["is_inside"] if token_level else sums.pop("inside")
        sums["is_outside"] = sums["tokens_counted"] - inside

    # Sum and count of the weights whose mean the batch is normalized by: over units, or over what is left of them.
    if not config.rollout_is_batch_normalize:
        return
    if config.batch_normalize_over == "valid":
        count, mean, _ = moments["unit_weight"].unbind()
        sums["norm_weight"], sums["norm_units"] = count * mean, count
    elif token_level:
        sums["norm_weight"], sums["norm_units"] = sums["kept_weight"], sums["tokens_kept"]
    else:
        sums["norm_weight"], sums["norm_units"] = sums["kept_sequence_weight"], sums["sequences_kept"]


def _finish_token_weights(state: _State) -> None:
    """The rows of token-level weights that the blocks began."""
    blocks, config, (sums, moments, extremes) = state.blocks, state.config, state.rows
    lower, upper = exceedance_band(config)
    sums["units"] = sums["tokens_counted"]

    # Up to the cap of k3 and χ², the blocks have counted already what lies beyond the safety bound.
    counter = "capped" if config.safety_bound == divergence.SAFETY_BOUND else "saturated"
    sums["saturated_low"], sums["saturated_high"] = blocks.sums[f"{counter}_low"], blocks.sums[f"{counter}_high"]
    if lower is not None or upper is not None:
        sums["is_high"], sums["is_low"] = blocks.sums["is_high"], blocks.sums["is_low"]
        if lower is not None:
            sums["is_low"] = sums["is_low"] + sums["zero_probability"]

    raw = applied = _raw_extremes(state)
    moments["weight"] = moments["weight_raw"] = blocks.moments["weight"]
    if config.is_mode != "none":
        moments["weight_raw"] = blocks.moments["weight_raw"]
    if config.is_mode == "icepop":
        applied = blocks.extremes["weight"]
    elif config.is_mode == "truncate":
        applied = between(raw, config.rollout_is_floor, config.is_upper)
    extremes["weight_raw"], extremes["weight"] = raw, applied


def _raw_extremes(state: _State) -> Tensor:
    """(min, max) of exp(clamp(d)) from those of d, as it is monotone; zero and neutral tokens join with 0 and 1.

    Where there is no unit at all, the numbers mean nothing.
    """
    sums, _, extremes = state.rows
    low, high = bounded_weights(extremes["log_ratio"], safety_bound=state.config.safety_bound).unbind()
    unmeasured = sums["tokens_measured"] == 0
    low, high = low.masked_fill(unmeasured, torch.inf), high.masked_fill(unmeasured, 0.0)

    # No weight is below 0, so a token of probability zero is the smallest, and the largest only where it is alone.
    low = low.masked_fill(sums["zero_probability"] > 0, 0.0)
    if state.config.nonfinite == "neutral":
        has_neutral = sums["units"] > sums["tokens_compared"]
        low = torch.where(has_neutral, low.clamp(max=1.0), low)
        high = torch.where(has_neutral, high.clamp(min=1.0), high)
    return torch.stack([low, high])


def _finish_token_criterion(criterion: Criterion, rows: Computed, blocks: Computed) -> None:
    """The rows of a token-level criterion that the blocks began; those of k1 = −d follow from d."""
    row, (sums, moments, extremes) = f"rs/{criterion.name}", rows
    sums[f"{row}/high"], sums[f"{row}/low"] = blocks.sums[f"{row}/high"], blocks.sums[f"{row}/low"]
    if criterion.kind == "k1":
        count, mean, m2 = moments["log_ratio"].unbind()
        moments[row] = torch.stack([count, -mean, m2])
        extremes[row] = -extremes["log_ratio"].flip(0)
    else:
        moments[row] = blocks.moments[row]
        extremes[row] = blocks.extremes[row]


# --- Samples, all at once ---------------------------------------------------------------------------------------------


def _moments(values: Tensor, seen: Tensor, unseen: Tensor) -> Tensor:
    """(n, mean, M2) of each row of values, (S, B) → (S, 3), over what is seen; `unseen` is its opposite."""
    count = seen.sum(-1, dtype=STATISTICS_DTYPE)
    present = values.masked_fill(unseen, 0.0)
    mean = present.sum(-1) / count.clamp(min=1)

    # Deviations are taken from the mean itself: Σ x² − n mean² would cancel for a mean far from 0.
    deviation = (present - mean.unsqueeze(-1)) * seen
    return torch.stack([count, mean, deviation.square().sum(-1)], dim=-1)


def _extremes(smallest: Tensor, largest: Tensor, unseen: Tensor) -> Tensor:
    """(min, max) of rows of values, (S, B) → (S, 2), over what is not unseen: of `smallest` and of `largest`."""
    # The largest value is the smallest of the negative ones, so both take one pass.
    low = torch.stack([smallest, -largest]).masked_fill_(unseen, torch.inf)
    ends = low.amin(-1) if low.shape[-1] else low.new_full(low.shape[:-1], torch.inf)
    ends[1].neg_()
    return ends.T


def _repeated_moments(values: Tensor, counts: Tensor) -> Tensor:
    """Moments of samples in which values[:, i] occurs counts[i] times: (S, B) → (S, 3)."""
    total = counts.sum()
    mean = (values * counts).sum(-1) / total.clamp(min=1)
    m2 = (counts * (values - mean.unsqueeze(-1)).square()).sum(-1)
    return torch.stack([total.expand_as(mean), mean, m2], dim=-1)
