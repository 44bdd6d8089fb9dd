"""Summaries of a correction: two lines, a short table, and whether one batch is within its limits.

Each number is compared with the healthy range of its metric (`rollcorr.core.metric_registry`):

    within limits    no number is beyond its limit
    unhealthy        at least one is
    not judged       no measurement: no response token, or no correction

"Within limits" is weaker than "healthy" in `rollcorr.health`: one batch cannot show whether both policies have the same
weights. `rollcorr.health` has rules over several numbers, judges a run by its steps, and suggests fixes.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from rollcorr.core.boundary import in_host_memory
from rollcorr.core.metric_registry import HEALTHY_RANGES

if TYPE_CHECKING:
    from rollcorr.config import RolloutCorrectionConfig
    from rollcorr.correction.result import Correction

FIRST = ("k3_kl", "rollout_is_mean", "rollout_is_eff_sample_size", "t_times_kl")
"""Key metrics; each is shown if the configuration collects it."""


class _Overview(NamedTuple):
    """The verdict, the kept tokens, the metrics to show, and which of them exceed their limits."""

    verdict: str
    kept: str
    shown: list[str]
    beyond: list[str]


def short_text(correction: Correction) -> str:
    """Return two lines: a description of the correction, and its numbers if they are in host memory."""
    shape = tuple(correction.loss_mask.shape)
    layout = "padded" if correction.cu_seqlens is None else "packed"
    whole = correction.batch_shape
    part = "" if whole is None or whole == shape else f", a part of {whole}"
    what = f"{correction.sequences} sequences, {layout} {shape}{part}, on {correction.loss_mask.device}"
    first = f"Correction({what}: {described(correction.config)})"

    statistics = correction.statistics
    if statistics is None:
        return f"{first}\n  every response token stays in the loss, and nothing was measured"
    if not in_host_memory(statistics.rows["sums"]):
        return f"{first}\n  its numbers are on {statistics.rows['sums'].device}: summary() reads them"
    metrics = correction.metrics(prefix="")
    overview = _select_metrics(metrics)
    numbers = [f"{name} {metrics[name]:.4g}" for name in overview.shown]
    return f"{first}\n  {overview.verdict}: {', '.join([*numbers, overview.kept])}"


def html_text(correction: Correction) -> str:
    """Return `short_text` as HTML, with the verdict in color."""
    first, _, second = html.escape(short_text(correction)).partition("\n  ")
    verdict, _, numbers = second.partition(": ")
    color = {"within limits": "#15803d", "unhealthy": "#c02626"}.get(verdict)
    if color is not None:
        second = f'<b style="color: {color}">{verdict}</b>: {numbers}'
    return f"<pre>{first}\n  {second}</pre>"


def summary_text(correction: Correction) -> str:
    """Return the verdict, the kept tokens, and the numbers with their healthy ranges, one per line."""
    metrics = correction.metrics(prefix="")
    overview = _select_metrics(metrics)
    lines = [f"{overview.verdict}: {overview.kept}"]
    for name in overview.shown:
        limits = HEALTHY_RANGES.get(name)
        ideal = "" if limits is None else f"ideal {limits.ideal}"
        mark = "  <- beyond its limit" if name in overview.beyond else ""
        lines.append(f"  {name:34} {metrics[name]:10.4g}   {ideal}{mark}".rstrip())
    return "\n".join(lines)


def _select_metrics(metrics: Mapping[str, float]) -> _Overview:
    """Return the key metrics, then every other metric that exceeds its limit."""
    tokens = metrics.get("token_count", 0)
    if not tokens:
        return _Overview("not judged", "no response token", [], [])
    beyond = []
    for name, value in metrics.items():
        limits = HEALTHY_RANGES.get(name)
        if limits is not None and limits.breached(value) is not None:
            beyond.append(name)

    shown = dict.fromkeys([*(name for name in FIRST if name in metrics), *beyond])
    rejected = metrics.get("rollout_rs_masked_fraction", 0.0)
    kept = f"{round(tokens * (1 - rejected)):,} of {tokens:,.0f} tokens kept"
    return _Overview("unhealthy" if beyond else "within limits", kept, list(shown), beyond)


def described(config: RolloutCorrectionConfig | None) -> str:
    """Return a short description of a configuration's weights and rejection."""
    if config is None:
        return "no correction"
    parts = []
    if config.rollout_is is not None:
        threshold = config.rollout_is_threshold
        bound = {"truncate": f" up to {threshold}", "icepop": f" inside {threshold}", "none": ""}[config.is_mode]
        bound += "" if config.rollout_is_floor is None else f", at least {config.rollout_is_floor:g}"
        use = "" if config.weights_reach_loss else ", measured only"
        level = config.rollout_is if config.rollout_is != "horizon" else f"horizon {config.rollout_is_horizon}"
        level += " per turn" if config.rollout_is_horizon_per_turn else ""
        parts.append(f"{level} weights{bound}{use}")
    if config.rollout_rs is not None:
        parts.append(f"rejection by {config.rollout_rs} beyond {config.rollout_rs_threshold}")
    if config.rollout_token_veto_threshold is not None:
        parts.append(f"veto below {config.rollout_token_veto_threshold:g}")
    return "; ".join(parts) or "metrics only"
