"""The metrics that every rejection criterion has, made from its name."""

from __future__ import annotations

from rollcorr.core.finalizers import farthest, highest, lowest, mean, share, std
from rollcorr.core.health_ranges import CRITERION_RANGES
from rollcorr.core.metric_type import MATHS, Line, Metric, R, V, metric_table

CRITERIA: tuple[str, ...] = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
"""The rejection criteria, those of `rollcorr.config`. No seq_max_k1: a maximum of a signed estimate means nothing."""


def criterion_metrics(criterion: str) -> dict[str, Metric]:
    """The metrics of one rejection criterion, e.g. `seq_mean_k3`; the same names for each (spec: one set of keys).

    The statistic is −log ρ for k1, and k2 or k3 in nats, over the criterion's own unit: V for token_*, R for seq_*.
    "high" means ρ above the upper bound for k1, the divergence above its bound for k2 and k3; "low" is 0 for those.
    """
    row = f"rs/{criterion}"
    token_scope = criterion.startswith(("token_", "step_"))
    unit, count = (V, "tokens_counted") if token_scope else (R, "sequences_counted")
    sequence_row = f"{row}/seq" if token_scope else row
    sequence_side = f"{row}/seq_" if token_scope else f"{row}/"
    value = criterion if not token_scope else f"{criterion} averaged over the sequence"
    lines: list[Line] = [
        ("mean", "nats", unit, f"mean({criterion})", mean(row), MATHS),
        ("std", "nats", unit, f"std({criterion})", std(row), MATHS),
        ("min", "nats", unit, f"min({criterion})", lowest(row), MATHS),
        ("max", "nats", unit, f"max({criterion})", highest(row), MATHS),
        ("fraction_high", "share", unit, "share above the upper bound", share(f"{row}/high", count), MATHS),
        ("fraction_low", "share", unit, "share below the lower bound", share(f"{row}/low", count), MATHS),
        ("masked_fraction", "share", V, "tokens it rejects / |V|", share(f"{row}/tokens", V), MATHS),
        (
            "seq_masked_fraction",
            "share",
            R,
            "sequences with a token it rejects / |R|",
            share(f"{row}/sequences", R),
            MATHS,
        ),
        (
            "alone_fraction",
            "share",
            V,
            "tokens that it rejects and nothing else does / |V|",
            share(f"{row}/tokens_alone", V),
            MATHS,
        ),
        (
            "seq_alone_fraction",
            "share",
            R,
            "sequences that it touches and nothing else does / |R|",
            share(f"{row}/sequences_alone", R),
            MATHS,
        ),
        ("seq_mean", "nats", R, f"mean_R({value})", mean(sequence_row), MATHS),
        ("seq_std", "nats", R, f"std_R({value})", std(sequence_row), MATHS),
        ("seq_min", "nats", R, f"min_R({value})", lowest(sequence_row), MATHS),
        ("seq_max", "nats", R, f"max_R({value})", highest(sequence_row), MATHS),
        ("seq_max_deviation", "nats", R, f"max_R |{value}|", farthest(sequence_row), MATHS),
        (
            "seq_fraction_high",
            "share",
            R,
            "share of R above the upper bound",
            share(f"{sequence_side}high", "sequences_counted"),
            MATHS,
        ),
        (
            "seq_fraction_low",
            "share",
            R,
            "share of R below the lower bound",
            share(f"{sequence_side}low", "sequences_counted"),
            MATHS,
        ),
    ]
    return metric_table(CRITERION_RANGES, *lines, prefix=f"rollout_rs_{criterion}_")
