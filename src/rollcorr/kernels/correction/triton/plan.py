"""Constants of the Triton kernels: a configuration at compile time, and the index of each number.

Kernels address columns, rows and limits by name. Names become indices when a kernel is compiled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.core.weights import log_band
from rollcorr.kernels.correction.call import accepted_band, exceedance_band
from rollcorr.kernels.correction.rows import CRITERION_ROWS, Abilities, empty_statistics, missing_rows

# Sums over tokens that every configuration has: rows of this name, in the order of `add_token_sums` in the token pass.
TOKEN_SUMS = ("abs_log_ratio", "k3", "chi2_token", "prob_diff_abs")

# Columns that every configuration has, columns of token-level weights, and columns of each kind of token criterion.
# The token pass relies on their order.
_TOKEN_COLUMNS = (
    *("valid", "measured", "zero", "outside", "capped_low", "capped_high"),
    *("log_ratio_mean", "log_ratio_m2", "log_ratio_min", "log_ratio_max"),
    *("train", "rollout", *TOKEN_SUMS, "difference_max", "k2", "catastrophic"),
)
_WEIGHT_COLUMNS = (
    *("is_low", "is_high", "outside_band", "saturated_low", "saturated_high", "counted"),
    *("raw_mean", "raw_m2", "weight_mean", "weight_m2", "weight_min", "weight_max", "kept_weight"),
)
_CRITERION_COLUMNS = ("low", "high", "alone", "mean", "m2", "min", "max")


@dataclass(frozen=True)
class Slots:
    """Names in order; `slots[name]` is the index of a name. Hashable, as a part of a kernel's cache key."""

    names: tuple[str, ...]

    def __getitem__(self, name: str) -> int:
        """Return the index of a name; Triton passes the name in a `constexpr` wrapper."""
        return self.names.index(getattr(name, "value", name))

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class CriterionPlan:
    """A criterion, with the index of its first row in each table; the next rows follow in `decide`'s order."""

    scope: str
    kind: str
    statistic_sums: int  # token: seq_high, seq_low, high, low; otherwise: high, low
    rejection_sums: int  # tokens, sequences, tokens_alone, sequences_alone
    moments: int  # token: of sequence means, then of tokens; otherwise: of sequences
    extremes: int
    bounded_below: bool  # k1: probability zero is below the bound
    limit: int  # index of the lower limit; the upper follows


@dataclass(frozen=True)
class Plan:
    """The parts of a configuration that change the code of a kernel; thresholds are excluded."""

    level: str  # "none", "token", "sequence", "geometric"
    mode: str  # "truncate", "icepop", "none"
    nonfinite: str
    normalize: str  # "none", "valid", "kept"
    own_bound: bool  # the safety bound differs from the cap of k3 and chi-squared
    banded: bool  # some band counts the weights that exceed it
    banded_below: bool
    veto: bool
    k2: bool  # the sum of k2 is needed
    token_criteria: bool
    rejects_sequences: bool
    criteria: tuple[CriterionPlan, ...]
    token_sums: tuple[str, ...]
    columns: Slots
    limits: Slots
    sums: Slots
    moments: Slots
    extremes: Slots

    @property
    def width(self) -> int:
        """Return the number of values in one set of rows: sums, moments of three, extremes of two."""
        return len(self.sums) + 3 * len(self.moments) + 2 * len(self.extremes)

    @property
    def spreads(self) -> bool:
        """Return whether any decision for a sequence changes its tokens."""
        return self.rejects_sequences or self.level in ("sequence", "geometric")


@cache
def abilities() -> Abilities:
    """Return the abilities of the kernels. Their rows are found by name in the source of the sequence pass."""
    source = Path(__file__).with_name("sequence_pass.py").read_text(encoding="utf-8")
    # A criterion's rows are not named there: the kernel writes all of them, in the order of the list.
    written = re.findall(r'PLAN\.(sums|moments|extremes)\["(\w+)"\]', source)
    written += [*(("sums", name) for name in TOKEN_SUMS), *((row.kind, row.name) for row in CRITERION_ROWS)]
    return Abilities(missing_rows(written), ("k1", "k2", "k3"), ("token", "seq_sum", "seq_mean", "seq_max"))


@lru_cache(maxsize=64)
def plan_of(config: RolloutCorrectionConfig) -> Plan:
    """Return the constants for a configuration."""
    names = empty_statistics(config, "meta").names
    sums, moments, extremes = Slots(names["sums"]), Slots(names["moments"]), Slots(names["extremes"])
    lower, upper = exceedance_band(config)
    normalize = config.batch_normalize_over if config.rollout_is_batch_normalize else "none"
    limits = Slots(tuple(_fixed_limits(config)))
    # Every field is a compile-time constant: a kernel contains only the code for its configuration.
    return Plan(
        level=config.rollout_is or "none",
        mode=config.is_mode,
        nonfinite="reject_token" if config.nonfinite == "raise" else config.nonfinite,
        normalize=normalize,
        own_bound=config.safety_bound != SAFETY_BOUND,
        banded=lower is not None or upper is not None,
        banded_below=lower is not None,
        veto=config.rollout_token_veto_threshold is not None,
        k2=any(c.kind == "k2" and c.scope != "seq_max" for c in config.criteria),
        token_criteria=any(c.scope == "token" for c in config.criteria),
        rejects_sequences=config.rollout_token_veto_threshold is not None
        or config.nonfinite == "reject_sequence"
        or any(c.scope != "token" for c in config.criteria),
        criteria=tuple(
            _criterion_plan(c, len(limits) + 2 * i, sums, moments, extremes) for i, c in enumerate(config.criteria)
        ),
        token_sums=TOKEN_SUMS,
        columns=Slots(_columns_of_config(config)),
        limits=limits,
        sums=sums,
        moments=moments,
        extremes=extremes,
    )


def limits_of(config: RolloutCorrectionConfig) -> tuple[float, ...]:
    """Return the kernels' thresholds: log-ratios in place of ratios, with the tolerance that makes bounds inclusive."""
    of_criteria = (limit for criterion in config.criteria for limit in accepted_band(criterion))
    return (*_fixed_limits(config).values(), *of_criteria)


def _fixed_limits(config: RolloutCorrectionConfig) -> dict[str, float]:
    low, high = log_band(*exceedance_band(config))
    outside_low, outside_high = log_band(0.9, 1.1)
    return {
        "safety_bound": config.safety_bound,
        "band_low": low,
        "band_high": high,
        "floor": config.is_lower or 0.0,
        "ceiling": config.is_upper or 0.0,
        "low_weight": log_band(1 / config.is_upper, None)[0] if config.is_upper else 0.0,
        "veto": log_band(config.rollout_token_veto_threshold, None)[0],
        "outside_low": outside_low,
        "outside_high": outside_high,
    }


def _criterion_plan(c: Criterion, limit: int, sums: Slots, moments: Slots, extremes: Slots) -> CriterionPlan:
    row = f"rs/{c.name}"
    first = f"{row}/seq" if c.scope == "token" else row
    high = f"{row}/seq_high" if c.scope == "token" else f"{row}/high"
    return CriterionPlan(
        c.scope, c.kind, sums[high], sums[f"{row}/tokens"], moments[first], extremes[first], c.lower is not None, limit
    )


def _columns_of_config(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """Return the columns that the token pass writes for each sequence and split, float64."""
    of_weights = _WEIGHT_COLUMNS if config.rollout_is == "token" else ()
    token_kinds = [c.kind for c in config.criteria if c.scope == "token"]
    of_rejection = ("kept", "rejected_once") if token_kinds else ()
    of_kinds = (f"{kind}_{what}" for kind in token_kinds for what in _CRITERION_COLUMNS)
    return (*_TOKEN_COLUMNS, *of_weights, *of_rejection, *of_kinds)
