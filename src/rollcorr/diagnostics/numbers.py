"""Select and format numbers for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

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
"""Headline metrics of a verdict, in order, with their labels."""

LAG_HEADLINES: Mapping[str, str] = {
    "k3_kl_lag0": "of the engine, at lag 0",
    "k3_kl_staleness": "of old weights, over all tokens",
    "k3_kl_per_version": "of each version of lag",
}
"""Parts of k3, if versions of the weights are recorded."""

STEP_HEADLINES: Mapping[str, str] = {
    "exact_kl_mean": "exact KL of a step, mean, nats",
    "exact_kl_max": "exact KL of a step, largest, nats",
    "kl_joint": "joint KL of a step, nats",
    "k3_kl_joint": "joint KL (k3) of a step, nats",
    "rejected_ratio": "steps rejected",
    "actor/zeroed_fraction_positive": "gradients zeroed, advantage above 0",
    "actor/zeroed_fraction_negative": "gradients zeroed, advantage below 0",
    "reward/mean": "reward",
}
"""Headline metrics of a verdict on denoising steps."""

_STEP_METRICS = frozenset(
    {
        *STEP_HEADLINES,
        "kl_per_dimension",
        "rollout_is_mean",
        "rollout_is_std",
        "rollout_is_min",
        "rollout_is_max",
        "rollout_is_eff_sample_size",
        "nonfinite_count",
    }
)
_STEP_PREFIXES = ("log_prob_abs_diff/t_", "rollout_rs_step_kl", "reward/", "actor/", "engine/", "perf/", "picture/")
_STEP_COUNTS = {"token_count": "step_count", "sequence_count": "picture_count"}

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
"""Metric with a healthy range → its label in a sentence."""


BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 30
"""Maximum number of points in a sparkline."""


def label(name: str) -> str:
    """Return the label of a metric; by default, its name without underscores."""
    return LABELS.get(name, name.replace("_", " "))


def headlines(*, diffusion: bool) -> Mapping[str, str]:
    """Return the headline metrics for tokens, or for denoising steps, with their labels."""
    return STEP_HEADLINES if diffusion else HEADLINES


def shown_metrics(values: Mapping[str, float], *, diffusion: bool) -> dict[str, float]:
    """Return the metrics to show, by bare name.

    For denoising steps, return only meaningful metrics: rename counts to steps and pictures, and omit averages over
    tokens.
    """
    if not diffusion:
        return dict(values)
    named = {_STEP_COUNTS.get(name, name): value for name, value in values.items()}
    kept = (*_STEP_METRICS, *_STEP_COUNTS.values())
    return {name: value for name, value in named.items() if name in kept or name.startswith(_STEP_PREFIXES)}


def text_table(rows: Iterable[Sequence[str]], headings: Sequence[str] = (), *, left: int = 0, right: int = 2) -> Table:
    """Return rows of text as a terminal table without borders.

    Args:
        rows: cells of each row, with rich markup.
        headings: column headings; default: no header.
        left: spaces before each column; default 0.
        right: spaces after each column; default 2.
    """
    from rich.table import Table

    table = Table(*headings, box=None, show_header=bool(headings), padding=(0, right, 0, left), header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def format_number(value: float) -> str:
    """Format a number with about four significant digits: 1.0003, 0.25, 1.30e−05, 12,345.

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


def format_range(low: float, high: float) -> str:
    """Format both ends of a range with as many digits as its width needs.

    Example:
        >>> format_range(-0.0012345, 0.0812345)
        '−0.001 to 0.081'
    """
    width = high - low
    if not (math.isfinite(width) and width > 0):
        return f"{format_number(low)} to {format_number(high)}"
    digits = 1 - math.floor(math.log10(width / 2))
    return f"{format_number(round(low, digits))} to {format_number(round(high, digits))}"


def sparkline(values: Sequence[float], *, low: float, high: float) -> str:
    """Return a curve in block characters between two limits, thinned to `COLUMNS` points."""
    stride = max(1, -(-len(values) // COLUMNS))
    span = max(high - low, 1e-12)
    heights = [(value - low) / span * (len(BLOCKS) - 1) for value in values[::stride]]
    return "".join(BLOCKS[min(max(round(height), 0), len(BLOCKS) - 1)] for height in heights)
