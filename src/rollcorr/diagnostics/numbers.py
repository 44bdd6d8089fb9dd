"""Numbers for people: which come first, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping

HEADLINES: Mapping[str, str] = {
    "rollout_is_mean": "mean weight",
    "rollout_is_eff_sample_size": "effective sample size",
    "kl": "KL, nats per token",
    "k3_kl": "KL (k3), nats per token",
    "ppl_ratio": "perplexity ratio",
    "chi2_token": "χ² per token",
    "rollout_rs_masked_fraction": "tokens rejected",
    "t_times_kl": "length × KL, nats",
}
"""The metrics that head a verdict, in order, with their labels."""

LABELS: Mapping[str, str] = {
    "rollout_is_mean": "mean weight",
    "rollout_is_std": "spread of the weights",
    "rollout_is_eff_sample_size": "effective sample size",
    "rollout_is_veto_fraction": "vetoed share",
    "rollout_is_catastrophic_token_fraction": "share of all but impossible tokens",
    "rollout_is_ratio_fraction_high": "share above the weight threshold",
    "rollout_is_ratio_fraction_low": "share below the lower weight threshold",
    "rollout_is_seq_max_deviation": "largest deviation of a sequence weight",
    "rollout_rs_masked_fraction": "rejected share",
    "kl": "KL",
    "chi2_token": "token-level χ²",
    "t_times_kl": "length × KL",
    "capped_fraction": "share of log-ratios beyond 20 nats",
    "nonfinite_count": "number of missing log-probs",
    "zero_probability_count": "number of tokens with trainer probability 0",
}
"""What the metrics with a healthy range are called in a sentence."""


def label(name: str) -> str:
    """A metric in words: its label, or its name without underscores."""
    return LABELS.get(name, name.replace("_", " "))


def format_number(value: float) -> str:
    """About four significant digits, without noise: 1.0003, 0.25, 1.30e−05, 12,345.

    Example:
        >>> [format_number(x) for x in (1.00031, 0.25, 1.3e-5, 12345.0, 0.0)]
        ['1.0003', '0.25', '1.30e−05', '12,345', '0']
    """
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "NaN")
    size = abs(value)
    if float(value).is_integer() and size < 1e9:
        text = f"{value:,.0f}" if value else "0"
    elif size < 1e-3 or size >= 1e6:
        text = f"{value:.2e}"
    elif size >= 1000:
        text = f"{value:,.1f}"
    else:
        text = f"{value:.4f}" if 0.9 <= size < 10 else f"{value:.4g}"
    return text.replace("-", "−")
