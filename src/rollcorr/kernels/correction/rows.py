"""The list of statistics: every row that a correction returns, with its kind, condition and description.

Each row is defined once, here. Its metric reads it by name (`rollcorr.core.metric_registry`). `reference` and `torch`
share the formula of a row that follows from sums over each sequence (`of`), or from the log-ratio of each token
(`measured`, `compared`; torch has shorter ways to some). Each implementation computes the other rows:

    reference, torch    a missing row, or one that is not on the list, raises an error that names it
    cpu                 the library reports its rows, which are compared with the list when it is loaded
    triton              the rows that its kernels write are read from their source, and compared in the same way

If `cpu` or `triton` lacks a row of the configuration, "auto" skips it and `rollcorr info` reports that.

valid, counted, compared and measured tokens are defined on docs/reference/notation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.criteria import check_token_criteria
from rollcorr.core import divergence, weights
from rollcorr.core.mergeable_statistics import Statistics, extremes_of, moments_of
from rollcorr.kernels.correction.call import exceedance_band

Values = dict[str, Tensor]


class Sequences:
    """Sums over the tokens of each sequence, (B,), from which per-sequence rows are computed.

    Attributes:
        valid, counted, compared, measured: number of such tokens.
        missing: number of valid tokens that are not compared.
        zero: number of tokens of probability zero: compared, but not measured.
        has_valid: whether it contains a valid token.
        has_counted: whether it contains a counted token, and so has a weight and a statistic for every criterion.
        has_measured: whether it contains a measured token, and so has a perplexity under both policies.
        unmeasured: the opposite of `has_measured`.
        has_zero: whether it has a token of probability zero.
        log_ratio: Σ d over measured tokens, nats.
        log_product: S_i; −inf for a sequence with a token of probability zero.
        log_ppls: −mean over measured tokens of d, log π and log μ, (3, B), nats; 0 without a measured token.
        ppls: exp of `log_ppls`, (3, B); 0 without a measured token.
    """

    def __init__(self, valid: Tensor, counted: Tensor, compared: Tensor, measured: Tensor, logs: Tensor) -> None:
        """Initialize from the sums; `logs` are Σ d, Σ log π and Σ log μ over measured tokens, (3, B), nats."""
        self.valid, self.counted, self.compared, self.measured = valid, counted, compared, measured
        self.missing, self.zero = valid - compared, compared - measured
        self.has_valid, self.has_counted, self.has_measured = valid > 0, counted > 0, measured > 0
        self.unmeasured, self.has_zero = ~self.has_measured, self.zero > 0

        self.log_ratio = logs[0]
        self.log_product = self.log_ratio.masked_fill(self.has_zero, -torch.inf)

        # Sum each policy separately: if one log-prob is near the float limit, d has no digits of the other one.
        self.log_ppls = logs / -measured.clamp(min=1)
        self.ppls = self.log_ppls.exp().masked_fill(self.unmeasured, 0.0)

    def capped(self) -> Tensor:
        """Return whether S_i is finite and beyond the cap."""
        size = self.log_product.abs()
        return (size > divergence.SAFETY_BOUND) & (size < torch.inf)


class Row(NamedTuple):
    """One row of statistics.

    Attributes:
        name: as in `Statistics`. A criterion's rows are listed once, with {criterion} for its name.
        kind: "sums", "moments" or "extremes".
        what: description, in one line.
        when: the condition under which a configuration has it (`_true_conditions`); of a criterion's rows, "always" or
            the scope of the criteria that have it.
        of: optional; the contribution of each sequence, (B,), a number or a bool. The row is their sum, or their
            extremes over the sequences with a measured token. By default each implementation computes the row.
        measured: optional; the contribution of each measured token, from d. The row is their sum.
        compared: optional; the same for each compared token. At probability zero d is below every bound.
    """

    name: str
    kind: Literal["sums", "moments", "extremes"]
    what: str
    when: str
    of: Callable[[Sequences], Tensor] | None = None
    measured: Callable[[Tensor], Tensor] | None = None
    compared: Callable[[Tensor], Tensor] | None = None


def _true_conditions(config: RolloutCorrectionConfig) -> frozenset[str]:
    """Return the conditions of `ROWS` that are true for a configuration."""
    weighs = config.rollout_is is not None
    held = {
        "always": True,
        "weights": weighs,
        "sequence weights": weighs and not config.weighs_tokens,
        "weight band": weighs and exceedance_band(config) != (None, None),
        "weight ceiling": weighs and config.is_upper is not None,
        "icepop": weighs and config.is_mode == "icepop",
        "batch normalization": weighs and config.rollout_is_batch_normalize,
        "veto": config.rollout_token_veto_threshold is not None,
    }
    return frozenset(condition for condition, holds in held.items() if holds)


ROWS: tuple[Row, ...] = (
    # Counts.
    Row("tokens", "sums", "valid tokens", "always", lambda s: s.valid),
    Row("sequences", "sums", "sequences with a valid token", "always", lambda s: s.has_valid),
    Row("nonfinite", "sums", "missing tokens: valid, not compared", "always", lambda s: s.missing),
    Row("zero_probability", "sums", "tokens of probability zero", "always", lambda s: s.zero),
    Row("tokens_measured", "sums", "measured tokens", "always", lambda s: s.measured),
    Row("tokens_compared", "sums", "compared tokens", "always", lambda s: s.compared),
    Row("tokens_counted", "sums", "counted tokens", "always", lambda s: s.counted),
    Row("sequences_measured", "sums", "sequences with a measured token", "always", lambda s: s.has_measured),
    Row("sequences_counted", "sums", "sequences with a counted token", "always", lambda s: s.has_counted),
    # Mismatch of the policies, per token.
    Row("log_ratio", "moments", "d of measured tokens", "always"),
    Row("log_ratio", "extremes", "d of measured tokens", "always"),
    Row("abs_log_ratio", "sums", "Σ |d| of measured tokens", "always", measured=torch.abs),
    Row("k3", "sums", "Σ k3 of measured tokens", "always", measured=divergence.k3),
    Row("chi2_token", "sums", "Σ (ρ² − 1) of compared tokens, d within ±20", "always", compared=divergence.chi_squared),
    Row(
        "capped",
        "sums",
        "measured tokens with |d| > 20",
        "always",
        measured=lambda d: d.abs() > divergence.SAFETY_BOUND,
    ),
    Row(
        "ratio_outside_10pct",
        "sums",
        "compared tokens with ρ outside [0.9, 1.1]",
        "always",
        compared=lambda d: ~weights.within_ratio_band(d, lower=0.9, upper=1.1),
    ),
    Row("prob_diff_abs", "sums", "Σ |π − μ| of compared tokens", "always"),
    Row("prob_diff_abs", "extremes", "0 and the largest |π − μ| of compared tokens", "always"),
    Row("safety_bound", "extremes", "the safety bound, nats; it travels so that it merges to itself", "always"),
    # Mismatch of the policies, per sequence: means over measured tokens.
    Row("train_log_ppl", "sums", "Σ −mean log π", "always", lambda s: s.log_ppls[1]),
    Row("train_ppl", "sums", "Σ exp(−mean log π)", "always", lambda s: s.ppls[1]),
    Row("rollout_log_ppl", "sums", "Σ −mean log μ", "always", lambda s: s.log_ppls[2]),
    Row("rollout_ppl", "sums", "Σ exp(−mean log μ)", "always", lambda s: s.ppls[2]),
    Row("log_ppl_diff", "sums", "Σ −G_i", "always", lambda s: s.log_ppls[0]),
    Row("log_ppl_diff", "extremes", "−G_i", "always", lambda s: s.log_ppls[0]),
    Row("log_ppl_abs_diff", "sums", "Σ |G_i|", "always", lambda s: s.log_ppls[0].abs()),
    Row("ppl_ratio", "sums", "Σ exp(−G_i)", "always", lambda s: s.ppls[0]),
    Row("chi2_seq", "sums", "Σ expm1(2 Ŝ_i)", "always", lambda s: divergence.chi_squared(s.log_product)),
    Row("capped_sequences", "sums", "sequences with a finite |S_i| > 20", "always", lambda s: s.capped()),
    # Rejection.
    Row("tokens_kept", "sums", "tokens of the loss mask", "always"),
    Row("sequences_kept", "sums", "sequences with a token in the loss mask", "always"),
    Row("sequences_touched", "sums", "sequences that a rejector takes a token of", "always"),
    Row("rejected_by_several", "sums", "tokens that several rejectors take", "always"),
    Row("sequences_rejected_by_several", "sums", "sequences that several rejectors touch", "always"),
    Row("catastrophic_tokens", "sums", "counted tokens with ρ < τ", "veto"),
    Row("vetoed_sequences", "sums", "sequences with such a token", "veto"),
    # The weights. A unit has one weight: a counted token at levels token and horizon, else a sequence with such a one.
    Row("units", "sums", "units", "weights"),
    Row("saturated_low", "sums", "units with a finite ℓ < −safety_bound", "weights"),
    Row("saturated_high", "sums", "units with ℓ > safety_bound", "weights"),
    Row("is_high", "sums", "units with exp ℓ above the band", "weight band"),
    Row("is_low", "sums", "units with exp ℓ below the band", "weight band"),
    Row("is_seq_high", "sums", "sequences whose mean raw weight is above the band", "weight band"),
    Row("is_seq_low", "sums", "sequences whose mean raw weight is below the band", "weight band"),
    Row("is_low_weight", "sums", "sequences with exp(S_i) < 1/C", "weight ceiling"),
    Row("is_outside", "sums", "counted tokens to which IcePop gives weight 0", "icepop"),
    Row("weight", "moments", "applied weights of counted tokens", "weights"),
    Row("weight", "extremes", "applied weights of counted tokens", "weights"),
    Row("weight_raw", "moments", "weights of counted tokens before truncation", "weights"),
    Row("weight_raw", "extremes", "weights of counted tokens before truncation", "weights"),
    Row("sequence_weight", "moments", "q_i, where finite", "weights"),
    Row("sequence_weight", "extremes", "q_i, where finite", "weights"),
    Row("unit_weight", "moments", "weights of units", "weights"),
    Row("log_weight", "extremes", "ℓ of sequences, where finite", "sequence weights"),
    Row("kept_weight", "sums", "Σ w of the loss mask", "weights"),
    Row("kept_sequence_weight", "sums", "Σ over sequences of the mean w of their loss mask", "weights"),
    Row("norm_weight", "sums", "Σ w of what the batch mean is taken over", "batch normalization"),
    Row("norm_units", "sums", "how many they are", "batch normalization"),
)

# The kernels of `triton` rely on this order within a kind.
CRITERION_ROWS: tuple[Row, ...] = (
    Row("rs/{criterion}/seq_high", "sums", "sequences whose mean is above the bound", "token"),
    Row("rs/{criterion}/seq_low", "sums", "sequences whose mean is below the bound", "token"),
    Row("rs/{criterion}/high", "sums", "tokens or sequences above the bound", "always"),
    Row("rs/{criterion}/low", "sums", "tokens or sequences below the bound", "always"),
    Row("rs/{criterion}/tokens", "sums", "tokens that it rejects", "always"),
    Row("rs/{criterion}/sequences", "sums", "sequences that it rejects a token of", "always"),
    Row("rs/{criterion}/tokens_alone", "sums", "tokens that it alone rejects", "always"),
    Row("rs/{criterion}/sequences_alone", "sums", "sequences that it alone touches", "always"),
    Row("rs/{criterion}/seq", "moments", "its mean over each sequence, where finite", "token"),
    Row("rs/{criterion}/seq", "extremes", "its mean over each sequence, where finite", "token"),
    Row("rs/{criterion}", "moments", "its value for tokens or sequences, where finite", "always"),
    Row("rs/{criterion}", "extremes", "its value for tokens or sequences, where finite", "always"),
)

_ROW_SHAPES: dict[str, tuple[int, ...]] = {"sums": (), "moments": (3,), "extremes": (2,)}


class MissingRowError(ValueError):
    """An implementation does not compute a row of the list."""


def rows_of(config: RolloutCorrectionConfig) -> tuple[Row, ...]:
    """Return the rows of a configuration, in order, with the names of its criteria filled in.

    Raises:
        ValueError: a criterion is for denoising steps only.
    """
    # torch.compile ignores caches, with a warning; the graph that it traces keeps the list anyway.
    return _rows_of_config(config) if torch.compiler.is_compiling() else known_rows(config)


def _rows_of_config(config: RolloutCorrectionConfig) -> tuple[Row, ...]:
    check_token_criteria(config.criteria)
    named = [
        row._replace(name=row.name.format(criterion=criterion.name))
        for criterion in config.criteria
        for row in CRITERION_ROWS
        if row.when in ("always", criterion.scope)
    ]
    conditions = _true_conditions(config)
    return (*(row for row in ROWS if row.when in conditions), *named)


known_rows = lru_cache(maxsize=64)(_rows_of_config)


@lru_cache(maxsize=64)
def empty_statistics(config: RolloutCorrectionConfig, device: torch.device | str) -> Statistics:
    """Return the rows of a configuration, all 0: a template into which a vector of values is unpacked."""
    rows = Computed({}, {}, {})
    for row in rows_of(config):
        getattr(rows, row.kind)[row.name] = torch.zeros(_ROW_SHAPES[row.kind], device=device)
    return rows.statistics(config, "")


class Computed(NamedTuple):
    """The rows that an implementation computes, by kind; when finished, it contains the configuration's list."""

    sums: Values
    moments: Values
    extremes: Values

    @classmethod
    def of(cls, statistics: Statistics) -> Computed:
        """Return the rows of statistics by kind and name."""
        named = (zip(statistics.names[kind], statistics.rows[kind].unbind(), strict=True) for kind in _ROW_SHAPES)
        return cls(*map(dict, named))

    def sample(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Compute a sample's moments and extremes, over its finite values."""
        mask = mask & values.isfinite()
        self.moments[name], self.extremes[name] = moments_of(values, mask), extremes_of(values, mask)

    def add_sequences(self, sequences: Sequences, config: RolloutCorrectionConfig) -> Values:
        """Compute the extremes from sums over each sequence; return each sequence's contributions to the sums."""
        added: Values = {}
        for row in rows_of(config):
            if row.of is not None and row.kind == "sums":
                added[row.name] = row.of(sequences)
            elif row.of is not None:
                self.extremes[row.name] = extremes_of(row.of(sequences), sequences.has_measured)
        return added

    def add_tokens(
        self,
        log_ratio: Tensor,
        measured: Tensor,
        compared: Tensor,
        config: RolloutCorrectionConfig,
        skip: Container[str] = (),
    ) -> None:
        """Compute the sums that have a formula for tokens, except those in `skip`."""
        self.sums.update(
            (row.name, formula(log_ratio).masked_fill(mask.logical_not(), 0).sum())
            for row in rows_of(config)
            for formula, mask in ((row.measured, measured), (row.compared, compared))
            if formula is not None and row.name not in skip
        )

    def statistics(self, config: RolloutCorrectionConfig, implementation: str) -> Statistics:
        """Return the rows in the order of the list.

        Raises:
            ValueError: a row of the list was not computed, or one that is not on the list was.
        """
        ordered: dict[str, Values] = {kind: {} for kind in _ROW_SHAPES}
        for row in rows_of(config):
            values = getattr(self, row.kind)
            if row.name not in values:
                raise MissingRowError(
                    f"impl={implementation!r} cannot take this batch: {_describe_missing_row(row)}; compute it there"
                )
            ordered[row.kind][row.name] = values[row.name]
        unlisted = [name for kind in _ROW_SHAPES for name in getattr(self, kind) if name not in ordered[kind]]
        if unlisted:
            raise ValueError(f"impl={implementation!r} computes {unlisted}, which kernels/correction/rows.py lacks")
        return Statistics.of(sums=ordered["sums"], moments=ordered["moments"], extremes=ordered["extremes"])


class Abilities(NamedTuple):
    """Abilities of a kernel that has its own copy of the decisions.

    Attributes:
        missing: rows of the list that it lacks.
        kinds: divergences that it supports.
        scopes: scopes of a criterion that it supports.
    """

    missing: tuple[Row, ...]
    kinds: tuple[str, ...]
    scopes: tuple[str, ...]

    @property
    def note(self) -> str:
        """Return a description of the missing rows; empty without any."""
        return "; ".join(_describe_missing_row(row) for row in self.missing)

    def why_not(self, config: RolloutCorrectionConfig) -> str | None:
        """Return why the kernel cannot compute the configuration; `None` if it can."""
        for criterion in config.criteria:
            if criterion.kind not in self.kinds or criterion.scope not in self.scopes:
                return f"it does not know the criterion {criterion.name!r}"
        of_criteria = {condition for criterion in config.criteria for condition in ("always", criterion.scope)}
        for row in self.missing:
            if row.when in (of_criteria if row in CRITERION_ROWS else _true_conditions(config)):
                return _describe_missing_row(row)
        return None


def missing_rows(computed: Container[tuple[str, str]]) -> tuple[Row, ...]:
    """Return the rows of the list not in `computed`: kinds and names, with {criterion} for the name of a criterion."""
    return tuple(row for row in (*ROWS, *CRITERION_ROWS) if (row.kind, row.name) not in computed)


def _describe_missing_row(row: Row) -> str:
    return f"it does not compute the row {row.name!r} ({row.kind}: {row.what})"
