"""A correction at a glance: two lines, a short table, and whether one batch is within its limits.

Each number is held against the healthy range of its metric (`rollcorr.core.metric_registry`):

    within limits    no number is beyond its limit
    unhealthy        at least one is
    not judged       nothing was measured: no response token, or no correction at all

"Within limits" is less than the "healthy" of `rollcorr.health`: one batch does not tell whether both policies have the
same weights. `rollcorr.health` has rules over several numbers, judges a run by its steps, and gives fixes.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from rollcorr.core.boundary import in_host_memory
from rollcorr.core.metric_registry import metric

if TYPE_CHECKING:
    from rollcorr.config import RolloutCorrectionConfig
    from rollcorr.core.health_ranges import HealthyRange
    from rollcorr.correction.result import Correction

FIRST = ("k3_kl", "rollout_is_mean", "rollout_is_eff_sample_size", "t_times_kl")
"""What to look at first; those that the configuration collects are shown."""

Verdict = Literal["within limits", "unhealthy", "not judged"]


class Shown(NamedTuple):
    """A number of the overview."""

    name: str
    value: float
    unhealthy: bool
    ideal: str


def verdict(metrics: Mapping[str, float]) -> Verdict:
    """The verdict on one batch, from its metrics by bare name."""
    if not metrics.get("token_count"):
        return "not judged"
    return "unhealthy" if any(_is_unhealthy(name, value) for name, value in metrics.items()) else "within limits"


def short_text(correction: Correction) -> str:
    """What a correction is, and its numbers where they can be read without a wait: two lines."""
    first = f"Correction({_shape(correction)}: {described(correction.config)})"
    statistics = correction.statistics
    if statistics is None:
        return f"{first}\n  every response token stays in the loss, and nothing was measured"
    if not in_host_memory(statistics.rows["sums"]):
        return f"{first}\n  its numbers are on {statistics.rows['sums'].device}: summary() reads them"
    metrics = correction.metrics(prefix="")
    numbers = ", ".join(f"{number.name} {number.value:.4g}" for number in _shown(metrics))
    return f"{first}\n  {verdict(metrics)}: {numbers}, {_kept(metrics)}"


def summary_text(correction: Correction) -> str:
    """The verdict, how much is kept, and the numbers with their healthy ranges, one on each line."""
    metrics = correction.metrics(prefix="")
    lines = [f"{verdict(metrics)}: {_kept(metrics)}"]
    for number in _shown(metrics):
        mark = "  <- beyond its limit" if number.unhealthy else ""
        lines.append(f"  {number.name:34} {number.value:10.4g}   {number.ideal}{mark}".rstrip())
    return "\n".join(lines)


def summary_table(correction: Correction) -> str:
    """The summary as an HTML table."""
    metrics = correction.metrics(prefix="")
    rows = ""
    for number in _shown(metrics):
        style = ' style="font-weight: bold"' if number.unhealthy else ""
        cells = (number.name, f"{number.value:.4g}", number.ideal)
        rows += f"<tr{style}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
    title = html.escape(f"{described(correction.config)}. {verdict(metrics)}: {_kept(metrics)}")
    return f"<table><caption>{title}</caption><tr><th>metric</th><th>value</th><th>healthy</th></tr>{rows}</table>"


def _shown(metrics: Mapping[str, float]) -> list[Shown]:
    """The first numbers to look at, then every other one that is beyond its limit."""
    if not metrics.get("token_count"):
        return []
    beyond = [name for name, value in metrics.items() if _is_unhealthy(name, value)]
    names = dict.fromkeys([*(name for name in FIRST if name in metrics), *beyond])
    return [Shown(name, metrics[name], name in beyond, _ideal(name)) for name in names]


def _is_unhealthy(name: str, value: float) -> bool:
    # At six digits: a float32 weight truncated at 2 may read 2.0000002.
    limits = _range(name)
    return limits is not None and limits.breached(float(f"{value:.6g}")) is not None


def _ideal(name: str) -> str:
    limits = _range(name)
    return "" if limits is None else f"ideal {limits.ideal}"


def _range(name: str) -> HealthyRange | None:
    try:
        return metric(name).healthy
    except KeyError:
        return None


def _kept(metrics: Mapping[str, float]) -> str:
    """How much stays in the loss."""
    tokens = metrics.get("token_count", 0)
    if not tokens:
        return "no response token"
    rejected = metrics.get("rollout_rs_masked_fraction", 0.0)
    return f"{round(tokens * (1 - rejected)):,} of {tokens:,.0f} tokens kept"


def _shape(correction: Correction) -> str:
    shape = tuple(correction.loss_mask.shape)
    layout = "padded" if correction.cu_seqlens is None else "packed"
    whole = correction.batch_shape
    part = "" if whole is None or whole == shape else f", a part of {whole}"
    return f"{correction.sequences} sequences, {layout} {shape}{part}, on {correction.loss_mask.device}"


def described(config: RolloutCorrectionConfig | None) -> str:
    """Return the weights and the rejection of a configuration, in a few words."""
    if config is None:
        return "no correction"
    parts = []
    if config.rollout_is is not None:
        threshold = config.rollout_is_threshold
        bound = {"truncate": f" up to {threshold}", "icepop": f" inside {threshold}", "none": ""}[config.is_mode]
        bound += "" if config.rollout_is_floor is None else f", at least {config.rollout_is_floor:g}"
        use = "" if config.weights_reach_loss else ", measured only"
        parts.append(f"{config.rollout_is} weights{bound}{use}")
    if config.rollout_rs is not None:
        parts.append(f"rejection by {config.rollout_rs} beyond {config.rollout_rs_threshold}")
    if config.rollout_token_veto_threshold is not None:
        parts.append(f"veto below {config.rollout_token_veto_threshold:g}")
    return "; ".join(parts) or "metrics only"
