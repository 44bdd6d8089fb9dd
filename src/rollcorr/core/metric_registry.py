"""The metric registry: every metric's name, unit, sample, formula, finalizer, healthy range and source.

This table is the single source for the code, the health check, the plots' guide lines and docs/reference/metrics.md. A
result contains a metric if the configuration collected the rows that it needs.

V are the valid tokens, R the sequences with at least one; "unit" is the token or the sequence, as set by the weights'
level.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from rollcorr import config
from rollcorr.core.health_ranges import RANGES
from rollcorr.core.host_statistics import HostStatistics, row_places
from rollcorr.core.metric_tables import (
    BY_TIMESTEP,
    DIFFUSION_METRICS,
    IS_GUIDE,
    LAG_METRICS,
    MATHS,
    OWN,
    PRAXIS,
    STEP_KL_METRICS,
    Metric,
    Numbers,
    R,
    V,
    by_timestep,
    complement_share,
    criterion_metrics,
    effective_sample_size,
    exp_share,
    farthest,
    highest,
    length_times_kl,
    lowest,
    mean,
    metric_table,
    quantile_of,
    share,
    std,
    total,
    viable_length,
)

__all__ = ["CRITERIA", "METRICS", "PREFIX", "Metric", "criterion_metrics", "finalize", "metric"]

PREFIX = "rollout_corr/"

CRITERIA = tuple(config.CRITERIA)
"""The rejection criteria of `rollcorr.config`."""

METRICS: dict[str, Metric] = metric_table(
    RANGES,
    # Counts of the sample.
    ("token_count", "tokens", "batch", "n = |V|", total("tokens"), OWN),
    ("sequence_count", "sequences", "batch", "|R|", total("sequences"), OWN),
    ("nonfinite_count", "tokens", "batch", "missing log-probs on V", total("nonfinite"), OWN),
    ("zero_probability_count", "tokens", "batch", "log π = −inf on V", total("zero_probability"), OWN),
    # Distance between the policies.
    ("training_ppl", "1", R, "sm(exp(−mean_i log π))", share("train_ppl", "sequences_measured"), MATHS),
    ("training_log_ppl", "nats", R, "sm(−mean_i log π)", share("train_log_ppl", "sequences_measured"), MATHS),
    ("rollout_ppl", "1", R, "sm(exp(−mean_i log μ))", share("rollout_ppl", "sequences_measured"), MATHS),
    ("rollout_log_ppl", "nats", R, "sm(−mean_i log μ)", share("rollout_log_ppl", "sequences_measured"), MATHS),
    ("kl", "nats", V, "tm(−d), estimates KL(μ‖π)", mean("log_ratio", scale=-1.0), MATHS),
    ("k3_kl", "nats", V, "tm(expm1(d) − d), estimates KL(μ‖π)", share("k3", "tokens_measured"), MATHS),
    ("log_ppl_diff", "nats", R, "sm(−G_i)", share("log_ppl_diff", "sequences_measured"), MATHS),
    ("log_ppl_abs_diff", "nats", R, "sm(|G_i|)", share("log_ppl_abs_diff", "sequences_measured"), MATHS),
    ("log_ppl_diff_max", "nats", R, "max_R(−G_i)", highest("log_ppl_diff"), MATHS),
    ("log_ppl_diff_min", "nats", R, "min_R(−G_i)", lowest("log_ppl_diff"), MATHS),
    ("ppl_ratio", "ratio", R, "sm(exp(−G_i))", share("ppl_ratio", "sequences_measured"), MATHS),
    ("ppl_ratio_geo", "ratio", R, "exp(sm(−G_i))", exp_share("log_ppl_diff", "sequences_measured"), IS_GUIDE),
    ("chi2_token", "1", V, "tm(expm1(2 d̂))", share("chi2_token", "tokens_compared"), MATHS),
    ("chi2_seq", "1", R, "sm(expm1(2 Ŝ_i))", share("chi2_seq", "sequences_counted"), MATHS),
    ("capped_fraction", "share", V, "share of V with |d| > 20", share("capped", "tokens_compared"), OWN),
    (
        "chi2_seq_capped_fraction",
        "share",
        R,
        "share of R with |S_i| > 20",
        share("capped_sequences", "sequences_counted"),
        OWN,
    ),
    ("log_ratio_mean", "nats", V, "tm(d)", mean("log_ratio"), OWN),
    ("log_ratio_std", "nats", V, "std_V(d)", std("log_ratio"), OWN),
    ("log_ratio_abs_mean", "nats", V, "tm(|d|)", share("abs_log_ratio", "tokens_measured"), OWN),
    ("log_ratio_min", "nats", V, "min_V(d)", lowest("log_ratio"), OWN),
    ("log_ratio_max", "nats", V, "max_V(d)", highest("log_ratio"), OWN),
    ("prob_diff_abs_mean", "probability", V, "tm(|π − μ|)", share("prob_diff_abs", "tokens_compared"), OWN),
    ("prob_diff_abs_max", "probability", V, "max_V(|π − μ|)", highest("prob_diff_abs"), OWN),
    (
        "ratio_outside_10pct",
        "share",
        V,
        "share of V with ρ outside [0.9, 1.1]",
        share("ratio_outside_10pct", "tokens_compared"),
        OWN,
    ),
    ("t_times_kl", "nats", "batch", "mean c_i · kl", length_times_kl(), PRAXIS),
    ("max_viable_length", "tokens", "batch", "safety_bound / kl, at most 1e9; 1e9 if kl ≤ 0", viable_length(), PRAXIS),
    # Importance weights.
    ("rollout_is_mean", "ratio", V, "mean_V(w), applied weights", mean("weight"), IS_GUIDE),
    ("rollout_is_std", "ratio", V, "std_V(w)", std("weight"), IS_GUIDE),
    ("rollout_is_min", "ratio", V, "min_V(w)", lowest("weight"), IS_GUIDE),
    ("rollout_is_max", "ratio", V, "max_V(w)", highest("weight"), IS_GUIDE),
    ("rollout_is_raw_mean", "ratio", V, "mean_V(exp ℓ̂), before truncation", mean("weight_raw"), OWN),
    ("rollout_is_raw_std", "ratio", V, "std_V(exp ℓ̂)", std("weight_raw"), OWN),
    ("rollout_is_raw_min", "ratio", V, "min_V(exp ℓ̂)", lowest("weight_raw"), OWN),
    ("rollout_is_raw_max", "ratio", V, "max_V(exp ℓ̂)", highest("weight_raw"), OWN),
    ("rollout_is_log_min", "nats", R, "min_R(ℓ), never clamped", lowest("log_weight"), OWN),
    ("rollout_is_log_max", "nats", R, "max_R(ℓ), never clamped", highest("log_weight"), OWN),
    ("rollout_is_ratio_fraction_high", "share", "unit", "share with exp ℓ > C", share("is_high", "units"), IS_GUIDE),
    ("rollout_is_ratio_fraction_low", "share", "unit", "share with exp ℓ < lo", share("is_low", "units"), IS_GUIDE),
    (
        "rollout_is_eff_sample_size",
        "share",
        "unit",
        "(Σ w)² / (k Σ w²), in [0, 1]",
        effective_sample_size("unit_weight"),
        "Kish (1965)",
    ),
    ("rollout_is_horizon", "1", "batch", 'λ of rollout_is="horizon"', highest("horizon"), OWN),
    ("rollout_is_seq_mean", "ratio", R, "mean_R(q_i), q_i = mean_i(w)", mean("sequence_weight"), IS_GUIDE),
    ("rollout_is_seq_std", "ratio", R, "std_R(q_i)", std("sequence_weight"), IS_GUIDE),
    ("rollout_is_seq_min", "ratio", R, "min_R(q_i)", lowest("sequence_weight"), IS_GUIDE),
    ("rollout_is_seq_max", "ratio", R, "max_R(q_i)", highest("sequence_weight"), IS_GUIDE),
    ("rollout_is_seq_max_deviation", "ratio", R, "max_R |q_i − 1|", farthest("sequence_weight", center=1.0), IS_GUIDE),
    (
        "rollout_is_seq_fraction_high",
        "share",
        R,
        "share of R with raw q_i > C",
        share("is_seq_high", "sequences_counted"),
        IS_GUIDE,
    ),
    (
        "rollout_is_seq_fraction_low",
        "share",
        R,
        "share of R with raw q_i < lo",
        share("is_seq_low", "sequences_counted"),
        IS_GUIDE,
    ),
    (
        "rollout_is_low_weight_fraction",
        "share",
        R,
        "share of R with exp(S_i) < 1/C",
        share("is_low_weight", "sequences_counted"),
        PRAXIS,
    ),
    ("saturated_low_fraction", "share", "unit", "share with ℓ < −safety_bound", share("saturated_low", "units"), OWN),
    ("saturated_high_fraction", "share", "unit", "share with ℓ > safety_bound", share("saturated_high", "units"), OWN),
    (
        "rollout_is_oob_ratio",
        "share",
        V,
        "share of V with weight 0 by IcePop, at every level",
        share("is_outside", "tokens_counted"),
        MATHS,
    ),
    (
        "rollout_is_batch_norm_factor",
        "ratio",
        "unit",
        "mean weight, the divisor of the weights",
        share("norm_weight", "norm_units"),
        MATHS,
    ),
    # Rejection.
    ("rollout_rs_masked_fraction", "share", V, "rejected / |V|", complement_share("tokens_kept", "tokens"), MATHS),
    (
        "rollout_rs_seq_masked_fraction",
        "share",
        R,
        "sequences with a rejected token / |R|",
        share("sequences_touched", "sequences"),
        MATHS,
    ),
    (
        "rollout_rs_seq_dropped_fraction",
        "share",
        R,
        "sequences without a kept token / |R|",
        complement_share("sequences_kept", "sequences"),
        OWN,
    ),
    (
        "rollout_rs_overlap_fraction",
        "share",
        V,
        "tokens that several filters reject / |V|",
        share("rejected_by_several", "tokens"),
        OWN,
    ),
    (
        "rollout_rs_seq_overlap_fraction",
        "share",
        R,
        "sequences in which several filters reject tokens / |R|",
        share("sequences_rejected_by_several", "sequences"),
        OWN,
    ),
    (
        "rollout_is_veto_fraction",
        "share",
        R,
        "sequences with a token of ρ < τ / |R|",
        share("vetoed_sequences", "sequences"),
        IS_GUIDE,
    ),
    (
        "rollout_is_catastrophic_token_fraction",
        "share",
        V,
        "tokens with ρ < τ / |V|",
        share("catastrophic_tokens", "tokens"),
        IS_GUIDE,
    ),
    # Quantiles, with `detail`.
    ("log_ratio_abs_p50", "nats", V, "median of |d|", quantile_of("log_ratio", 0.5, absolute=True), OWN),
    ("log_ratio_abs_p99", "nats", V, "0.99 quantile of |d|", quantile_of("log_ratio", 0.99, absolute=True), OWN),
    ("log_ratio_abs_p999", "nats", V, "0.999 quantile of |d|", quantile_of("log_ratio", 0.999, absolute=True), OWN),
    ("seq_log_ratio_p01", "nats", R, "0.01 quantile of S_i", quantile_of("sequence_log_ratio", 0.01), OWN),
    ("seq_log_ratio_p50", "nats", R, "median of S_i", quantile_of("sequence_log_ratio", 0.5), OWN),
    ("seq_log_ratio_p99", "nats", R, "0.99 quantile of S_i", quantile_of("sequence_log_ratio", 0.99), OWN),
    ("rollout_is_p01", "ratio", V, "0.01 quantile of w, applied weights", quantile_of("weight", 0.01), OWN),
    ("rollout_is_p50", "ratio", V, "median of w", quantile_of("weight", 0.5), OWN),
    ("rollout_is_p99", "ratio", V, "0.99 quantile of w", quantile_of("weight", 0.99), OWN),
)

_CRITERION_METRICS = {name: found for criterion in CRITERIA for name, found in criterion_metrics(criterion).items()}
_ALL_METRICS = METRICS | _CRITERION_METRICS | STEP_KL_METRICS | DIFFUSION_METRICS | LAG_METRICS

HEALTHY_RANGES = {name: found.healthy for name, found in _ALL_METRICS.items() if found.healthy is not None}
"""Bare name → healthy range, for metrics with a limit or an ideal."""


def metric(name: str) -> Metric:
    """Look up a metric by its bare or prefixed name, including rejection criteria and denoising steps.

    Raises:
        KeyError: there is no such metric.
    """
    try:
        return _ALL_METRICS[name.removeprefix(PREFIX)]
    except KeyError:
        raise KeyError(f"no metric is called {name!r}; docs/reference/metrics.md lists them all") from None


def finalize(statistics: HostStatistics, *, prefix: str = PREFIX) -> dict[str, float]:
    """Compute every metric whose rows the statistics contain, prefixed, in the registry's order.

    Args:
        statistics: result of `Statistics.read()`: rows on the host, merged over micro-batches and ranks.
        prefix: put before each name.
    """
    numbers = statistics.numbers
    computable, has_timesteps = _computable_metrics(statistics.names, prefix)
    metrics = {name: compute(numbers) for name, compute in computable}
    if has_timesteps:
        metrics |= {f"{prefix}{name}": value for name, value in by_timestep(statistics).items()}
    return metrics


@lru_cache(maxsize=64)
def _computable_metrics(
    names: tuple[tuple[str, ...], ...], prefix: str
) -> tuple[list[tuple[str, Callable[[Numbers], float]]], bool]:
    """Return the metrics computable from these rows, with their prefix, in the registry's order.

    The result is the same at every step of a run, so it is cached.

    Returns:
        (name, computation) of each metric; and whether the data have rows for single timesteps, as in diffusion.
    """
    places = row_places(names)
    computable = [
        (prefix + name, found.finalizer.at(*(places[row] for row in found.finalizer.rows)))
        for name, found in _ALL_METRICS.items()
        if places.keys() >= set(found.finalizer.rows)
    ]
    return computable, any(row.startswith(f"moments:{BY_TIMESTEP}") for row in places)
