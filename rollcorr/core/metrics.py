"""The metric registry: every metric's name, unit, sample, formula, finaliser, healthy range and source.

This is the one table that the code, the health check, the plots' guide lines and docs/metrics.md read. A metric appears
in a result when the rows that it needs were collected, which the configuration decides.

V are the valid tokens, R the sequences with at least one; "unit" is the token or the sequence, whichever the weights'
level counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollcorr.core.finalizers import (
    Finalizer,
    complement_share,
    effective_sample_size,
    exp_share,
    farthest,
    highest,
    length_times_kl,
    lowest,
    mean,
    share,
    std,
    total,
    viable_length,
)
from rollcorr.core.health_ranges import CRITERION_RANGES, RANGES, HealthyRange
from rollcorr.core.statistics import HostStatistics

PREFIX = "rollout_corr/"

_MATHS = "Li (2025), rollout correction mathematics"
_IS_GUIDE = "rollout importance sampling guide (2025-10)"
_PRAXIS = "Fang & Khazi (2025), Mismatch Praxis"
_OWN = "rollcorr"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric of the registry.

    Attributes:
        name: bare name, without the prefix. For a criterion's metrics, with the criterion's name filled in.
        unit: nats, tokens, sequences, ratio, probability, share or 1.
        sample: what is averaged over: tokens, sequences, unit or batch.
        formula: the definition, in the symbols of docs/notation.md.
        finalizer: how it is computed from merged statistics.
        source: who defined it.
        healthy: the healthy range, where one is known.
    """

    name: str
    unit: str
    sample: str
    formula: str
    finalizer: Finalizer
    source: str
    healthy: HealthyRange | None = None


def _table(*rows: tuple[str, str, str, str, Finalizer, str]) -> dict[str, Metric]:
    return {
        name: Metric(
            name=name,
            unit=unit,
            sample=sample,
            formula=formula,
            finalizer=finalizer,
            source=source,
            healthy=RANGES.get(name),
        )
        for name, unit, sample, formula, finalizer, source in rows
    }


METRICS: dict[str, Metric] = _table(
    # How much was seen.
    ("token_count", "tokens", "batch", "n = |V|", total("tokens"), _OWN),
    ("sequence_count", "sequences", "batch", "|R|", total("sequences"), _OWN),
    ("nonfinite_count", "tokens", "batch", "missing log-probs on V", total("nonfinite"), _OWN),
    ("zero_probability_count", "tokens", "batch", "log π = −inf on V", total("zero_probability"), _OWN),
    # How far apart the policies are.
    ("training_ppl", "1", "sequences", "sm(exp(−mean_i log π))", share("train_ppl", "sequences_measured"), _MATHS),
    (
        "training_log_ppl",
        "nats",
        "sequences",
        "sm(−mean_i log π)",
        share("train_log_ppl", "sequences_measured"),
        _MATHS,
    ),
    ("rollout_ppl", "1", "sequences", "sm(exp(−mean_i log μ))", share("rollout_ppl", "sequences_measured"), _MATHS),
    (
        "rollout_log_ppl",
        "nats",
        "sequences",
        "sm(−mean_i log μ)",
        share("rollout_log_ppl", "sequences_measured"),
        _MATHS,
    ),
    ("kl", "nats", "tokens", "tm(−d), estimates KL(μ‖π)", mean("log_ratio", scale=-1.0), _MATHS),
    ("k3_kl", "nats", "tokens", "tm(expm1(d) − d), estimates KL(μ‖π)", share("k3", "tokens_measured"), _MATHS),
    ("log_ppl_diff", "nats", "sequences", "sm(−G_i)", share("log_ppl_diff", "sequences_measured"), _MATHS),
    ("log_ppl_abs_diff", "nats", "sequences", "sm(|G_i|)", share("log_ppl_abs_diff", "sequences_measured"), _MATHS),
    ("log_ppl_diff_max", "nats", "sequences", "max_R(−G_i)", highest("log_ppl_diff"), _MATHS),
    ("log_ppl_diff_min", "nats", "sequences", "min_R(−G_i)", lowest("log_ppl_diff"), _MATHS),
    ("ppl_ratio", "ratio", "sequences", "sm(exp(−G_i))", share("ppl_ratio", "sequences_measured"), _MATHS),
    (
        "ppl_ratio_geo",
        "ratio",
        "sequences",
        "exp(sm(−G_i))",
        exp_share("log_ppl_diff", "sequences_measured"),
        _IS_GUIDE,
    ),
    ("chi2_token", "1", "tokens", "tm(expm1(2 d̂))", share("chi2_token", "tokens_compared"), _MATHS),
    ("chi2_seq", "1", "sequences", "sm(expm1(2 Ŝ_i))", share("chi2_seq", "sequences_compared"), _MATHS),
    ("capped_fraction", "share", "tokens", "share of V with |d| > 20", share("capped", "tokens_compared"), _OWN),
    (
        "chi2_seq_capped_fraction",
        "share",
        "sequences",
        "share of R with |S_i| > 20",
        share("capped_sequences", "sequences_compared"),
        _OWN,
    ),
    ("log_ratio_mean", "nats", "tokens", "tm(d)", mean("log_ratio"), _OWN),
    ("log_ratio_std", "nats", "tokens", "std_V(d)", std("log_ratio"), _OWN),
    ("log_ratio_abs_mean", "nats", "tokens", "tm(|d|)", share("abs_log_ratio", "tokens_measured"), _OWN),
    ("log_ratio_min", "nats", "tokens", "min_V(d)", lowest("log_ratio"), _OWN),
    ("log_ratio_max", "nats", "tokens", "max_V(d)", highest("log_ratio"), _OWN),
    ("prob_diff_abs_mean", "probability", "tokens", "tm(|π − μ|)", share("prob_diff_abs", "tokens_compared"), _OWN),
    ("prob_diff_abs_max", "probability", "tokens", "max_V(|π − μ|)", highest("prob_diff_abs"), _OWN),
    (
        "ratio_outside_10pct",
        "share",
        "tokens",
        "share of V with ρ outside [0.9, 1.1]",
        share("ratio_outside_10pct", "tokens_compared"),
        _OWN,
    ),
    ("t_times_kl", "nats", "batch", "mean c_i · kl", length_times_kl(), _PRAXIS),
    ("max_viable_length", "tokens", "batch", "safety_bound / kl; inf if kl ≤ 0", viable_length(), _PRAXIS),
    # The importance weights.
    ("rollout_is_mean", "ratio", "tokens", "mean_V(w), applied weights", mean("weight"), _IS_GUIDE),
    ("rollout_is_std", "ratio", "tokens", "std_V(w)", std("weight"), _IS_GUIDE),
    ("rollout_is_min", "ratio", "tokens", "min_V(w)", lowest("weight"), _IS_GUIDE),
    ("rollout_is_max", "ratio", "tokens", "max_V(w)", highest("weight"), _IS_GUIDE),
    ("rollout_is_raw_mean", "ratio", "tokens", "mean_V(exp ℓ̂), before truncation", mean("weight_raw"), _OWN),
    ("rollout_is_raw_std", "ratio", "tokens", "std_V(exp ℓ̂)", std("weight_raw"), _OWN),
    ("rollout_is_raw_min", "ratio", "tokens", "min_V(exp ℓ̂)", lowest("weight_raw"), _OWN),
    ("rollout_is_raw_max", "ratio", "tokens", "max_V(exp ℓ̂)", highest("weight_raw"), _OWN),
    ("rollout_is_log_min", "nats", "sequences", "min_R(ℓ), never clamped", lowest("log_weight"), _OWN),
    ("rollout_is_log_max", "nats", "sequences", "max_R(ℓ), never clamped", highest("log_weight"), _OWN),
    ("rollout_is_ratio_fraction_high", "share", "unit", "share with exp ℓ > C", share("is_high", "units"), _IS_GUIDE),
    ("rollout_is_ratio_fraction_low", "share", "unit", "share with exp ℓ < lo", share("is_low", "units"), _IS_GUIDE),
    (
        "rollout_is_eff_sample_size",
        "share",
        "unit",
        "(Σ w)² / (k Σ w²), in [0, 1]",
        effective_sample_size("unit_weight"),
        "Kish (1965)",
    ),
    ("rollout_is_seq_mean", "ratio", "sequences", "mean_R(q_i), q_i = mean_i(w)", mean("sequence_weight"), _IS_GUIDE),
    ("rollout_is_seq_std", "ratio", "sequences", "std_R(q_i)", std("sequence_weight"), _IS_GUIDE),
    ("rollout_is_seq_min", "ratio", "sequences", "min_R(q_i)", lowest("sequence_weight"), _IS_GUIDE),
    ("rollout_is_seq_max", "ratio", "sequences", "max_R(q_i)", highest("sequence_weight"), _IS_GUIDE),
    (
        "rollout_is_seq_max_deviation",
        "ratio",
        "sequences",
        "max_R |q_i − 1|",
        farthest("sequence_weight", centre=1.0),
        _IS_GUIDE,
    ),
    (
        "rollout_is_seq_fraction_high",
        "share",
        "sequences",
        "share of R with raw q_i > C",
        share("is_seq_high", "sequences_compared"),
        _IS_GUIDE,
    ),
    (
        "rollout_is_seq_fraction_low",
        "share",
        "sequences",
        "share of R with raw q_i < lo",
        share("is_seq_low", "sequences_compared"),
        _IS_GUIDE,
    ),
    (
        "rollout_is_low_weight_fraction",
        "share",
        "sequences",
        "share of R with exp(S_i) < 1/C",
        share("is_low_weight", "sequences_compared"),
        _PRAXIS,
    ),
    ("saturated_low_fraction", "share", "unit", "share with ℓ < −safety_bound", share("saturated_low", "units"), _OWN),
    ("saturated_high_fraction", "share", "unit", "share with ℓ > safety_bound", share("saturated_high", "units"), _OWN),
    ("rollout_is_oob_ratio", "share", "unit", "share outside the IcePop band", share("is_outside", "units"), _MATHS),
    (
        "rollout_is_batch_norm_factor",
        "ratio",
        "unit",
        "mean weight that the weights are divided by",
        share("norm_weight", "norm_units"),
        _MATHS,
    ),
    # Rejection.
    (
        "rollout_rs_masked_fraction",
        "share",
        "tokens",
        "rejected / |V|",
        complement_share("tokens_kept", "tokens"),
        _MATHS,
    ),
    (
        "rollout_rs_seq_masked_fraction",
        "share",
        "sequences",
        "sequences with a rejected token / |R|",
        share("sequences_touched", "sequences"),
        _MATHS,
    ),
    (
        "rollout_rs_seq_dropped_fraction",
        "share",
        "sequences",
        "sequences without a kept token / |R|",
        complement_share("sequences_kept", "sequences"),
        _OWN,
    ),
    (
        "rollout_rs_overlap_fraction",
        "share",
        "tokens",
        "tokens that several criteria, the veto included, reject / |V|",
        share("rejected_by_several", "tokens"),
        _OWN,
    ),
    (
        "rollout_rs_seq_overlap_fraction",
        "share",
        "sequences",
        "sequences that several criteria, the veto included, touch / |R|",
        share("sequences_rejected_by_several", "sequences"),
        _OWN,
    ),
    (
        "rollout_is_veto_fraction",
        "share",
        "sequences",
        "sequences with a token ρ < τ / |R|",
        share("vetoed_sequences", "sequences"),
        _IS_GUIDE,
    ),
    (
        "rollout_is_catastrophic_token_fraction",
        "share",
        "tokens",
        "tokens with ρ < τ / |V|",
        share("catastrophic_tokens", "tokens"),
        _IS_GUIDE,
    ),
)


def criterion_metrics(criterion: str) -> dict[str, Metric]:
    """The metrics of one rejection criterion, e.g. `seq_mean_k3`; the same names for each (spec: one set of keys).

    The statistic is −log ρ for k1, and k2 or k3 in nats, over the criterion's own unit: V for token_*, R for seq_*.
    "high" means ρ above the upper bound for k1, the divergence above its bound for k2 and k3; "low" is 0 for those.
    """
    row = f"rs/{criterion}"
    token_scope = criterion.startswith("token_")
    unit, count = ("tokens", "tokens_counted") if token_scope else ("sequences", "sequences_compared")
    sequence_row = f"{row}/seq" if token_scope else row
    if token_scope:
        seq_high, seq_low = f"{row}/seq_high", f"{row}/seq_low"
    else:
        seq_high, seq_low = f"{row}/high", f"{row}/low"
    value = criterion if not token_scope else f"{criterion} averaged over the sequence"
    parts: list[tuple[str, str, str, str, Finalizer]] = [
        ("mean", "nats", unit, f"mean({criterion})", mean(row)),
        ("std", "nats", unit, f"std({criterion})", std(row)),
        ("min", "nats", unit, f"min({criterion})", lowest(row)),
        ("max", "nats", unit, f"max({criterion})", highest(row)),
        ("fraction_high", "share", unit, "share above the upper bound", share(f"{row}/high", count)),
        ("fraction_low", "share", unit, "share below the lower bound", share(f"{row}/low", count)),
        ("masked_fraction", "share", "tokens", "tokens it rejects / |V|", share(f"{row}/tokens", "tokens")),
        (
            "seq_masked_fraction",
            "share",
            "sequences",
            "sequences with a token it rejects / |R|",
            share(f"{row}/sequences", "sequences"),
        ),
        (
            "alone_fraction",
            "share",
            "tokens",
            "tokens that it rejects and nothing else does / |V|",
            share(f"{row}/tokens_alone", "tokens"),
        ),
        (
            "seq_alone_fraction",
            "share",
            "sequences",
            "sequences that it touches and nothing else does / |R|",
            share(f"{row}/sequences_alone", "sequences"),
        ),
        ("seq_mean", "nats", "sequences", f"mean_R({value})", mean(sequence_row)),
        ("seq_std", "nats", "sequences", f"std_R({value})", std(sequence_row)),
        ("seq_min", "nats", "sequences", f"min_R({value})", lowest(sequence_row)),
        ("seq_max", "nats", "sequences", f"max_R({value})", highest(sequence_row)),
        ("seq_max_deviation", "nats", "sequences", f"max_R |{value}|", farthest(sequence_row)),
        (
            "seq_fraction_high",
            "share",
            "sequences",
            "share of R above the upper bound",
            share(seq_high, "sequences_compared"),
        ),
        (
            "seq_fraction_low",
            "share",
            "sequences",
            "share of R below the lower bound",
            share(seq_low, "sequences_compared"),
        ),
    ]
    return {
        f"rollout_rs_{criterion}_{suffix}": Metric(
            name=f"rollout_rs_{criterion}_{suffix}",
            unit=unit_of_value,
            sample=sample,
            formula=formula,
            finalizer=finalizer,
            source=_MATHS,
            healthy=CRITERION_RANGES.get(suffix),
        )
        for suffix, unit_of_value, sample, formula, finalizer in parts
    }


CRITERIA: tuple[str, ...] = (
    *(f"{scope}_{kind}" for scope in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
"""The eleven rejection criteria. seq_max_k1 does not exist: a maximum of a signed estimate means nothing."""

_CRITERION_METRICS = {name: found for criterion in CRITERIA for name, found in criterion_metrics(criterion).items()}


def metric(name: str) -> Metric:
    """Look a metric up by its bare or prefixed name, those of the rejection criteria included.

    Raises:
        KeyError: there is no such metric.
    """
    bare = name.removeprefix(PREFIX)
    found = METRICS.get(bare) or _CRITERION_METRICS.get(bare)
    if found is None:
        raise KeyError(f"no metric is called {name!r}; docs/metrics.md lists them all")
    return found


def finalize(statistics: HostStatistics, *, prefix: str = PREFIX) -> dict[str, float]:
    """Every metric whose rows the statistics have, prefixed, in the registry's order."""
    return {
        f"{prefix}{name}": found.finalizer.compute(statistics)
        for name, found in (*METRICS.items(), *_CRITERION_METRICS.items())
        if found.finalizer.available(statistics)
    }
