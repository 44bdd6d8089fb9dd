"""From per-sequence sums to decisions and statistics: the second step of the correction in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.core import divergence
from rollcorr.core.bounds import exceeds, ratio_above, ratio_below
from rollcorr.core.statistics import Statistics, extremes_of, moments_of
from rollcorr.core.weights import bounded_weights, masked_weights, truncated_weights
from rollcorr.kernels.correction.band import exceedance_band
from rollcorr.kernels.correction.torch.table import BlockRows, SequenceTable

if TYPE_CHECKING:
    from rollcorr.config import Criterion, RolloutCorrectionConfig


class Decision(NamedTuple):
    """What is decided for whole sequences.

    Attributes:
        sequence_kept: (B,) bool: no sequence-level criterion rejects it.
        sequence_weight: (B,) float64 weight of every token, at sequence and geometric level; None otherwise.
        statistics: the batch's rows.
    """

    sequence_kept: Tensor
    sequence_weight: Tensor | None
    statistics: Statistics


class _State(NamedTuple):
    table: SequenceTable
    rows: BlockRows
    config: RolloutCorrectionConfig
    sums: dict[str, Tensor]
    moments: dict[str, Tensor]
    extremes: dict[str, Tensor]

    @property
    def nonempty(self) -> Tensor:
        return self.table["counted"] > 0

    @property
    def log_product(self) -> Tensor:
        """S_i; −inf for a sequence with a token of probability zero."""
        return self.table["log_ratio"].masked_fill(self.table["zero"] > 0, -torch.inf)

    def average(self, sums: Tensor) -> Tensor:
        return sums / self.table["counted"].clamp(min=1)

    def sample(self, name: str, values: Tensor) -> None:
        """Describe a per-sequence value over R, where it is finite."""
        mask = self.nonempty & values.isfinite()
        self.moments[name], self.extremes[name] = moments_of(values, mask), extremes_of(values, mask)


def decide(table: SequenceTable, rows: BlockRows, config: RolloutCorrectionConfig) -> Decision:
    """Weigh and reject sequences, and finish every row of statistics."""
    state = _State(table, rows, config, {}, {}, {})
    _mismatch(state)
    state.extremes["safety_bound"] = torch.full_like(state.extremes["log_ratio"], config.safety_bound)
    kept = _reject(state)
    weight = _weigh(state, kept) if config.rollout_is is not None else None
    statistics = Statistics.of(sums=state.sums, moments=state.moments, extremes=state.extremes)
    return Decision(kept, weight, statistics)


def _mismatch(state: _State) -> None:
    table, rows, sums = state.table, state.rows, state.sums
    zero = table["zero"].sum()
    sums["tokens"] = table["valid"].sum()
    sums["sequences"] = (table["valid"] > 0).sum()
    sums["nonfinite"] = table["missing"].sum()
    sums["zero_probability"] = zero
    sums["tokens_measured"] = table["measured"].sum()
    sums["tokens_compared"] = table["compared"].sum()
    sums["tokens_counted"] = table["counted"].sum()
    sums["k3"] = table["k3"].sum()
    sums["abs_log_ratio"] = rows.sum("abs_log_ratio")
    sums["capped"] = rows.sum("capped_low") + rows.sum("capped_high")
    # ρ² − 1 = (ρ − 1)² + 2 (ρ − 1), and −1 at probability zero.
    sums["chi2_token"] = rows.sum("expm1_squares") + 2.0 * table["expm1"].sum() - zero
    sums["ratio_outside_10pct"] = rows.sum("ratio_above_10pct") + rows.sum("ratio_below_10pct") + zero
    state.moments["log_ratio"] = rows.merged_moments("log_ratio")
    state.extremes["log_ratio"] = torch.stack([_amin(table["log_ratio_min"]), -_amin(-table["log_ratio_max"])])
    sums["prob_diff_abs"] = rows.sum("prob_diff_abs")
    state.extremes["prob_diff_abs"] = _unless_empty(
        rows.merged_extremes("prob_diff_abs", zero.device), sums["tokens_compared"]
    )

    count = table["measured"].clamp(min=1)
    seen = table["measured"] > 0
    # Each has its own sum: a log-prob at the end of the float range leaves no digits of the other policy in d.
    train_log_ppl, rollout_log_ppl = -table["train"] / count, -table["rollout"] / count
    log_ppl_diff = -table["log_ratio"] / count
    sums["sequences_measured"] = seen.sum()
    for name, values in (
        ("train_log_ppl", train_log_ppl),
        ("train_ppl", train_log_ppl.exp()),
        ("rollout_log_ppl", rollout_log_ppl),
        ("rollout_ppl", rollout_log_ppl.exp()),
        ("log_ppl_diff", log_ppl_diff),
        ("log_ppl_abs_diff", log_ppl_diff.abs()),
        ("ppl_ratio", log_ppl_diff.exp()),
    ):
        sums[name] = values.masked_fill(~seen, 0.0).sum()
    state.extremes["log_ppl_diff"] = extremes_of(log_ppl_diff, seen)
    product = state.log_product
    sums["sequences_compared"] = state.nonempty.sum()
    sums["chi2_seq"] = divergence.chi_squared(product).masked_fill(~state.nonempty, 0.0).sum()
    sums["capped_sequences"] = (table["log_ratio"].abs() > divergence.CAP).logical_and_(product.isfinite()).sum()


def _weigh(state: _State, kept: Tensor) -> Tensor | None:
    """Sequence weights (None at token level) and the statistics of the weights at every level."""
    table, rows, config, sums = state.table, state.rows, state.config, state.sums
    lower, upper = exceedance_band(config)
    bounded = lower is not None or upper is not None
    product, weight = state.log_product, None
    if config.rollout_is == "token":
        mean_weight = state.average(table["weight"])
        sequence_level = state.average(table["raw"]).log()
        kept_weight = table["kept_weight"].masked_fill(~kept, 0.0)
        _token_rows(state, bounded)
    else:
        level = product if config.rollout_is == "sequence" else state.average(product)
        weight, mean_weight, sequence_level = _sequence_weights(state, level, bounded)
        kept_weight = (weight * table["kept"]).masked_fill(~kept, 0.0)
    state.sample("sequence_weight", mean_weight)
    state.moments["unit_weight"] = state.moments["weight" if config.rollout_is == "token" else "sequence_weight"]
    if bounded:
        sums["is_seq_high"] = ratio_above(sequence_level, upper).logical_and_(state.nonempty).sum()
        sums["is_seq_low"] = ratio_below(sequence_level, lower).logical_and_(state.nonempty).sum()
    if config.is_upper is not None:
        sums["is_low_weight"] = ratio_below(product, 1 / config.is_upper).logical_and_(state.nonempty).sum()
    if config.is_mode == "icepop":  # tokens whose weight is 0, at every level
        inside = rows.sum("is_inside") if weight is None else (table["counted"] * (weight > 0)).sum()
        sums["is_outside"] = sums["tokens_counted"] - inside
    sums["kept_weight"] = kept_weight.sum()
    sums["kept_sequence_weight"] = (kept_weight / table["kept"].clamp(min=1)).sum()
    if config.rollout_is_batch_normalize:
        _normalization_rows(state, kept)
    return weight


def _token_rows(state: _State, bounded: bool) -> None:
    """Finish the rows of token-level weights that the blocks began."""
    rows, sums, zero = state.rows, state.sums, state.sums["zero_probability"]
    sums["units"] = state.table["counted"].sum()
    saturated = "capped" if state.config.safety_bound == divergence.CAP else "saturated"
    sums["saturated_low"], sums["saturated_high"] = rows.sum(f"{saturated}_low"), rows.sum(f"{saturated}_high")
    if bounded:
        sums["is_high"] = rows.sum("is_high")
        sums["is_low"] = rows.sum("is_low") + (zero if exceedance_band(state.config)[0] is not None else 0)
    state.moments["weight"] = rows.merged_moments("weight")
    state.moments["weight_raw"] = (
        state.moments["weight"] if state.config.is_mode == "none" else rows.merged_moments("weight_raw")
    )
    raw = weight = _raw_extremes(state)
    if state.config.is_mode == "icepop":
        weight = rows.merged_extremes("weight", zero.device)
    elif state.config.is_mode == "truncate":
        weight = raw.clamp(max=state.config.is_upper)
    state.extremes["weight_raw"] = _unless_empty(raw, sums["units"])
    state.extremes["weight"] = _unless_empty(weight, sums["units"])


def _raw_extremes(state: _State) -> Tensor:
    """(min, max) of exp(clamp(d)) from those of d, as it is monotone; zero and neutral tokens join with 0 and 1."""
    low, high = bounded_weights(state.extremes["log_ratio"], safety_bound=state.config.safety_bound).unbind()
    measured, zero = state.sums["tokens_measured"] > 0, state.sums["zero_probability"] > 0
    neutral = state.sums["units"] > state.sums["tokens_compared"]
    low, high = torch.where(measured, low, torch.inf), torch.where(measured, high, -torch.inf)
    for joins, value in ((zero, 0.0), (neutral, 1.0)):
        low, high = torch.where(joins, low.clamp(max=value), low), torch.where(joins, high.clamp(min=value), high)
    return torch.stack([low, high])


def _sequence_weights(state: _State, level: Tensor, bounded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of whole sequences, 0 for empty ones in the second, and the log of the raw weight."""
    config, sums, bound = state.config, state.sums, state.config.safety_bound
    unit, finite = state.nonempty, level.isfinite()
    raw = bounded_weights(level, safety_bound=bound)
    if config.is_mode == "icepop":
        lower, upper = config.is_lower or 0.0, config.is_upper or 0.0
        weight = masked_weights(level, lower=lower, upper=upper, safety_bound=bound)
    elif config.is_upper is not None:
        weight = truncated_weights(level, upper=config.is_upper, safety_bound=bound)
    else:
        weight = raw
    sums["units"] = unit.sum()
    sums["saturated_low"] = (unit & finite & (level < -bound)).sum()
    sums["saturated_high"] = (unit & (level > bound)).sum()
    if bounded:
        low, high = exceedance_band(config)
        sums["is_high"] = ratio_above(level, high).logical_and_(unit).sum()
        sums["is_low"] = ratio_below(level, low).logical_and_(unit).sum()
    state.extremes["log_weight"] = extremes_of(level, unit & finite)
    for name, values in (("weight", weight), ("weight_raw", raw)):
        state.moments[name] = _repeated_moments(values, state.table["counted"])
        state.extremes[name] = extremes_of(values, unit)
    return weight, weight.masked_fill(~unit, 0.0), raw.log()


def _normalization_rows(state: _State, kept: Tensor) -> None:
    """Sum and count of the weights whose mean the batch is normalised by."""
    sums, config = state.sums, state.config
    if config.batch_normalize_over == "valid":
        n, mean, _ = state.moments["unit_weight"]
        sums["norm_weight"], sums["norm_units"] = n * mean, n
    elif config.rollout_is == "token":
        sums["norm_weight"], sums["norm_units"] = sums["kept_weight"], sums["tokens_kept"]
    else:
        sums["norm_weight"], sums["norm_units"] = sums["kept_sequence_weight"], sums["sequences_kept"]


def _reject(state: _State) -> Tensor:
    """Which sequences every sequence-level rejector keeps, and the rows of all rejectors."""
    table, config, sums = state.table, state.config, state.sums
    token_rejections = {c.name: table[f"{c.name}/rejected"] for c in config.criteria if c.scope == "token"}
    rejected = {c.name: _criterion(state, c) for c in config.criteria}
    by_sequence = {name: mask for name, mask in rejected.items() if name not in token_rejections}
    if config.rollout_token_veto_threshold is not None:
        by_sequence["veto"] = table["catastrophic"] > 0
        sums["catastrophic_tokens"], sums["vetoed_sequences"] = table["catastrophic"].sum(), by_sequence["veto"].sum()
    if config.nonfinite == "reject_sequence":
        by_sequence["nonfinite"] = table["missing"] > 0
    elif config.nonfinite != "neutral":
        token_rejections["nonfinite"] = table["missing"]

    rejectors = torch.zeros_like(table["valid"])
    for mask in by_sequence.values():
        rejectors = rejectors + mask
    touching = rejectors
    for count in token_rejections.values():
        touching = touching + (count > 0)
    kept = rejectors == 0
    never, once = table["kept"], table["once"]
    several = table["valid"] - never - once
    sums["tokens_kept"] = never.masked_fill(~kept, 0.0).sum()
    sums["sequences_kept"] = (kept & (never > 0)).sum()
    sums["sequences_touched"] = (touching > 0).sum()
    crowded = torch.where(kept, several, torch.where(rejectors == 1, once + several, table["valid"]))
    sums["rejected_by_several"] = crowded.sum()
    sums["sequences_rejected_by_several"] = (touching > 1).sum()
    for criterion in config.criteria:
        name, row = criterion.name, f"rs/{criterion.name}"
        if name in token_rejections:
            touched, tokens = token_rejections[name] > 0, token_rejections[name]
            alone = table[f"{name}/alone"].masked_fill(~kept, 0.0)
        else:
            touched, tokens = by_sequence[name], table["valid"].masked_fill(~by_sequence[name], 0.0)
            alone = never.masked_fill(~(touched & (rejectors == 1)), 0.0)
        sums[f"{row}/tokens"], sums[f"{row}/sequences"] = tokens.sum(), touched.sum()
        sums[f"{row}/tokens_alone"], sums[f"{row}/sequences_alone"] = alone.sum(), (touched & (touching == 1)).sum()
    return kept


def _criterion(state: _State, criterion: Criterion) -> Tensor:
    """Describe one criterion and return the sequences whose statistic is beyond its bound."""
    table, rows, sums, row = state.table, state.rows, state.sums, f"rs/{criterion.name}"
    value = _statistic(state, criterion)
    if criterion.kind == "k1":
        high, low = ratio_above(-value, criterion.upper), ratio_below(-value, criterion.lower)
    else:
        high, low = exceeds(value, criterion.upper), torch.zeros_like(value, dtype=torch.bool)
    high, low = high & state.nonempty, low & state.nonempty
    if criterion.scope != "token":
        state.sample(row, value)
        sums[f"{row}/high"], sums[f"{row}/low"] = high.sum(), low.sum()
        return high | low
    state.sample(f"{row}/seq", value)
    sums[f"{row}/seq_high"], sums[f"{row}/seq_low"] = high.sum(), low.sum()
    sums[f"{row}/high"], sums[f"{row}/low"] = rows.sum(f"{row}/high"), rows.sum(f"{row}/low")
    if criterion.kind == "k1":
        count, mean, m2 = state.moments["log_ratio"]
        state.moments[row] = torch.stack([count, -mean, m2])
        state.extremes[row] = -state.extremes["log_ratio"].flip(0)
    else:
        state.moments[row] = rows.merged_moments(row)
        state.extremes[row] = _unless_empty(rows.merged_extremes(row, value.device), sums["tokens_measured"])
    return table[f"{criterion.name}/rejected"] > 0


def _statistic(state: _State, criterion: Criterion) -> Tensor:
    """A criterion's divergence for each sequence, (B,); a token criterion's averaged over the sequence."""
    table = state.table
    if criterion.scope == "seq_max":
        # k2 and k3 are convex with their minimum at 0, so their maximum lies at one end of the range of d.
        estimate = divergence.k2 if criterion.kind == "k2" else divergence.k3
        ends = [table[f"log_ratio_{end}"].masked_fill(table["measured"] == 0, 0.0) for end in ("min", "max")]
        value = torch.maximum(estimate(ends[0]), estimate(ends[1]))
    else:
        value = -table["log_ratio"] if criterion.kind == "k1" else table[criterion.kind]
        if criterion.scope != "seq_sum":
            value = state.average(value)
    return value.masked_fill(table["zero"] > 0, torch.inf)


def _repeated_moments(values: Tensor, counts: Tensor) -> Tensor:
    """Moments of a sample in which values[i] occurs counts[i] times: (3,)."""
    total = counts.sum()
    mean = (values * counts).sum() / total.clamp(min=1)
    return torch.stack([total, mean, (counts * (values - mean).square()).sum()])


def _unless_empty(extremes: Tensor, count: Tensor) -> Tensor:
    """The extremes, or (+inf, −inf) for an empty sample."""
    empty = torch.tensor([torch.inf, -torch.inf], dtype=extremes.dtype, device=extremes.device)
    return torch.where(count > 0, extremes, empty)


def _amin(column: Tensor) -> Tensor:
    return column.amin() if column.numel() else column.new_full((), torch.inf)
