"""The metrics that every rejection criterion has, made from its name."""

from __future__ import annotations

from rollcorr.config.thresholds import CRITERIA as CRITERIA
from rollcorr.core.finalizers import Finalizer, farthest, highest, lowest, mean, share, std
from rollcorr.core.health_ranges import CRITERION_RANGES
from rollcorr.core.metric_type import MATHS, Metric


def criterion_metrics(criterion: str) -> dict[str, Metric]:
    """The metrics of one rejection criterion, e.g. `seq_mean_k3`; the same names for each (spec: one set of keys).

    The statistic is −log ρ for k1, and k2 or k3 in nats, over the criterion's own unit: V for token_*, R for seq_*.
    "high" means ρ above the upper bound for k1, the divergence above its bound for k2 and k3; "low" is 0 for those.
    """
    row = f"rs/{criterion}"
    token_scope = criterion.startswith(("token_", "step_"))
    unit, count = ("tokens", "tokens_counted") if token_scope else ("sequences", "sequences_counted")
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
            share(seq_high, "sequences_counted"),
        ),
        (
            "seq_fraction_low",
            "share",
            "sequences",
            "share of R below the lower bound",
            share(seq_low, "sequences_counted"),
        ),
    ]
    return {
        f"rollout_rs_{criterion}_{suffix}": Metric(
            name=f"rollout_rs_{criterion}_{suffix}",
            unit=unit_of_value,
            sample=sample,
            formula=formula,
            finalizer=finalizer,
            source=MATHS,
            healthy=CRITERION_RANGES.get(suffix),
        )
        for suffix, unit_of_value, sample, formula, finalizer in parts
    }
