"""The charts of a page: panels of mismatch metrics over the steps, with guide lines, and the reward.

Tokens have six panels. Denoising steps have their own, one of which is over the timesteps of the schedule.

The guide lines are the registry's healthy ranges. Nothing here draws: the page's script does, from packed arrays.
"""

from __future__ import annotations

import base64
import math
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rollcorr.diagnostics.health.diffusion_rules import BY_TIMESTEP
from rollcorr.diagnostics.health.evidence import RECENT_STEPS, Metrics, bare_metrics
from rollcorr.diagnostics.health.health_check import healthy_range
from rollcorr.diagnostics.numbers import format_number

Array = np.ndarray[Any, np.dtype[np.float64]]
Point = tuple[float, float]
Points = Sequence[Point] | Array

MOST_POINTS = 4000
"""A longer series keeps the smallest and the largest value of each bin, so that no spike is lost."""


@dataclass(frozen=True)
class Guide:
    """A dashed line at a value: the ideal, or where a warning begins."""

    value: float
    kind: Literal["ideal", "warn"]
    label: str
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart.

    Attributes:
        name: identifies the chart in a page.
        title: heading, with the unit.
        curves: metric → label; those that a series lacks are left out.
        bounds: values that the y axis must show, for metrics with a natural range.
        symlog: logarithmic on both sides of 0, for metrics that span orders of magnitude.
        log: logarithmic where all values are above 0.
        absent: what to say when no curve has a value.
        across: what the x axis shows.
        guides: dashed lines, beside those of the registry.
        see: what to look for, in a sentence.
    """

    name: str
    title: str
    curves: Mapping[str, str]
    absent: str
    bounds: tuple[float, ...] = ()
    symlog: bool = False
    log: bool = False
    across: Literal["step", "timestep"] = "step"
    guides: tuple[Guide, ...] = ()
    see: str = ""


PANELS: tuple[Panel, ...] = (
    Panel(
        name="mean_weight",
        title="Mean importance weight",
        curves={"rollout_is_mean": "mean weight"},
        absent="no importance weights: rollout_is is not set",
    ),
    Panel(
        name="effective_sample_size",
        title="Effective sample size, share of the batch",
        curves={"rollout_is_eff_sample_size": "effective sample size"},
        absent="no importance weights: rollout_is is not set",
        bounds=(0.0, 1.0),
    ),
    Panel(
        name="rejected",
        title="Vetoed and rejected share",
        curves={
            "rollout_is_veto_fraction": "vetoed sequences",
            "rollout_rs_masked_fraction": "rejected tokens",
            "rollout_rs_seq_masked_fraction": "touched sequences",
        },
        absent="nothing can be rejected: no criterion and no veto is set",
        bounds=(0.0,),
    ),
    Panel(
        name="kl",
        title="KL(rollout ‖ train) per token, nats",
        curves={"kl": "KL (k1)", "k3_kl": "KL (k3)"},
        absent="not measured",
        bounds=(0.0,),
        symlog=True,
    ),
    Panel(
        name="ppl_ratio",
        title="Perplexity ratio, train / rollout",
        curves={"ppl_ratio": "ratio"},
        absent="not measured",
        bounds=(0.9, 1.1),
    ),
    Panel(
        name="chi2",
        title="χ² divergence",
        curves={"chi2_token": "per token", "chi2_seq": "per sequence"},
        absent="not measured",
        bounds=(0.0,),
        symlog=True,
    ),
)
"""The six panels of a report on tokens."""

FIRST, LAST = "by_timestep/first", "by_timestep/last"
"""The series that `over_timesteps` makes."""

STEP_PANELS: tuple[Panel, ...] = (
    Panel(
        name="exact_kl",
        title="Exact KL of a denoising step, nats",
        curves={"exact_kl_mean": "mean", "exact_kl_max": "largest"},
        absent="the means of both policies were not recorded",
        bounds=(0.0,),
        symlog=True,
    ),
    Panel(
        name="joint_kl",
        title="KL of a denoising step from its joint log-ratio J, nats",
        curves={"kl_joint": "mean of −J", "k3_kl_joint": "k3 of J"},
        absent="not measured",
        bounds=(0.0,),
        symlog=True,
    ),
    Panel(
        name="by_timestep",
        title="|Δ log p| by timestep, nats per dimension",
        curves={LAST: f"last {RECENT_STEPS} steps", FIRST: f"first {RECENT_STEPS} steps"},
        absent="the timesteps were not recorded",
        bounds=(0.0,),
        across="timestep",
    ),
    Panel(
        name="rejected",
        title="Rejected share of the denoising steps",
        curves={"rejected_ratio": "rejected"},
        absent="not measured",
        bounds=(0.0, 0.1),
    ),
    Panel(
        name="zeroed",
        title="Share of gradients that the clip zeroed",
        curves={
            "actor/zeroed_fraction_positive": "advantage above 0",
            "actor/zeroed_fraction_negative": "advantage below 0",
        },
        absent="not a training run: no gradient was taken",
        bounds=(0.0,),
    ),
    Panel(
        name="mean_weight",
        title="Importance weights",
        curves={"rollout_is_mean": "mean weight", "rollout_is_eff_sample_size": "effective sample size, share"},
        absent="no importance weights: rollout_is is not set",
        bounds=(0.0, 1.0),
    ),
)
"""The panels of a report on denoising steps."""

ACCURACY = Panel(
    name="accuracy",
    title="What the pictures show: share that is as the prompt says",
    curves={"picture/color_accuracy": "color", "picture/shape_accuracy": "shape"},
    absent="not measured",
    bounds=(0.0, 1.0),
)
"""The panel of runs whose reward recognizes what was drawn."""

LAGS = Panel(
    name="lags",
    title="KL (k3) by the age of the weights, nats",
    curves={"k3_kl_lag0": "engine, at lag 0", "k3_kl_staleness": "added by old weights"},
    absent="not measured",
    bounds=(0.0,),
    symlog=True,
)
"""The panel of series with versions of the weights."""

REWARD = Panel(
    name="reward",
    title="Reward",
    curves={"reward/mean": "mean reward", "reward/accuracy": "accuracy"},
    absent="no rewards were logged",
)


STALENESS = Panel(
    name="staleness",
    title="Updates that the sampler is behind",
    curves={"engine/staleness": "staleness"},
    absent="not logged",
    bounds=(0.0,),
    see="A line that only rises belongs to a sampler that gets no new weights.",
)


def panels_of(series: Mapping[str, Points], *, diffusion: bool) -> tuple[Panel, ...]:
    """The panels of a report on tokens, or on denoising steps; of old weights and accuracies, only if there are any."""
    known = (STALENESS, STALENESS.curves.keys()), (LAGS, {"k3_kl_per_version"}), (ACCURACY, ACCURACY.curves.keys())
    measured = tuple(panel for panel, names in known if names & series.keys())
    stale = measured[:1] if STALENESS in measured else ()
    return (*stale, *(STEP_PANELS if diffusion else PANELS), *measured[len(stale) :], REWARD)


COMPARED: tuple[Panel, ...] = (
    Panel(
        name="reward",
        title="Mean reward of a step",
        curves={"reward/mean": "reward"},
        absent="not logged",
        see="The sampler earns it. Where the sampler lags behind, it says little about the policy that is trained.",
    ),
    Panel(
        name="k3",
        title="KL (k3) between rollout and train, nats per token",
        curves={"k3_kl": "KL (k3)"},
        absent="not measured",
        log=True,
        see="How far sampler and trainer are apart (logarithmic). Equal weights keep it at the level of rounding.",
    ),
    Panel(
        name="effective_sample_size",
        title="Effective sample size, share of the batch",
        curves={"rollout_is_eff_sample_size": "effective sample size"},
        absent="no run has importance weights",
        bounds=(0.0, 1.0),
        see="Near 1 all responses count alike; near 0 a few decide the update.",
    ),
    Panel(
        name="mean_weight",
        title="Mean importance weight",
        curves={"rollout_is_mean": "mean weight"},
        absent="no run has importance weights",
        see="The ideal is 1. Truncation alone takes it a little below.",
    ),
    Panel(
        name="rejected",
        title="Rejected share of the tokens",
        curves={"rollout_rs_masked_fraction": "rejected tokens"},
        absent="no run rejects",
        bounds=(0.0,),
    ),
    STALENESS,
    Panel(
        name="grad_norm",
        title="Norm of the gradient before it is clipped",
        curves={"actor/grad_norm": "norm"},
        absent="not logged",
        log=True,
    ),
    Panel(
        name="entropy",
        title="Entropy of a token in the trainer, nats",
        curves={"actor/entropy": "entropy"},
        absent="not logged",
        see="A steep rise often comes with a collapse.",
    ),
)
"""The panels of a comparison: one metric each, a curve for each run."""


def single_panel(name: str) -> Panel:
    """Return the panel of one metric."""
    return Panel(name=name, title=name, curves={name: name}, absent="not measured")


def over_timesteps(series: Mapping[str, Points]) -> dict[str, list[Point]]:
    """The breakdown by timestep as two series over the timesteps: means of the first steps, and of the last ones."""
    found: dict[str, list[Point]] = {}
    for name, points in series.items():
        values = [value for _, value in points if math.isfinite(value)]
        if not name.startswith(BY_TIMESTEP) or not values:
            continue
        timestep = float(name.removeprefix(BY_TIMESTEP))
        found.setdefault(LAST, []).append((timestep, float(np.mean(values[-RECENT_STEPS:]))))
        if len(values) >= 2 * RECENT_STEPS:
            found.setdefault(FIRST, []).append((timestep, float(np.mean(values[:RECENT_STEPS]))))
    return {name: sorted(points) for name, points in found.items()}


def guides_of(names: Iterable[str], *, labels: Mapping[str, str]) -> list[Guide]:
    """The registry's guide lines of some metrics: every ideal of the first that has one, every warning of all."""
    guides: list[Guide] = []
    ranges = {name: found for name in names if (found := healthy_range(name)) is not None}
    for name, limits in ranges.items():
        suffix = f", {labels[name].split()[0]}" if len(ranges) > 1 else ""
        if not guides:
            ideals = {limits.ideal_low, limits.ideal_high} - {None, limits.warn_below, limits.warn_above}
            guides += [Guide(value, "ideal", f"ideal {limits.ideal}{suffix}") for value in ideals if value is not None]
        if limits.warn_below is not None:
            guides.append(Guide(limits.warn_below, "warn", f"warn < {limits.warn_below:g}{suffix}"))
        if limits.warn_above is not None:
            guides.append(Guide(limits.warn_above, "warn", f"warn > {limits.warn_above:g}{suffix}"))
            if limits.absolute:
                guides.append(
                    Guide(-limits.warn_above, "warn", f"warn < −{limits.warn_above:g}{suffix}", optional=True)
                )
    return guides


def series_by_name(series: Sequence[Metrics]) -> dict[str, Array]:
    """Arrays of (step, value) by bare metric name, of the steps that measured a token; the reward of every step."""
    found: dict[str, array[float]] = {}
    for index, metrics in enumerate(series, start=1):
        step, bare = int(metrics.get("step", index)), bare_metrics(metrics)
        measured = bare.get("token_count", 1.0) > 0
        for name, value in bare.items():
            if measured or name.startswith("reward/"):
                found.setdefault(name, array("d")).extend((step, value))
    return {name: np.asarray(points).reshape(-1, 2) for name, points in found.items()}


def chart_of(panel: Panel, curves: Mapping[str, Points], *, guides: Sequence[Guide]) -> dict[str, Any]:
    """Return a chart as the page's script reads it.

    Args:
        panel: what is drawn.
        curves: label → (x, y) points.
        guides: dashed lines.
    """
    packed = []
    for label, points in curves.items():
        shown = thinned(np.asarray(points, dtype=np.float64).reshape(-1, 2))
        packed.append({"label": label, "x": pack(shown[:, 0], "f8"), "y": pack(shown[:, 1], "f4")})
    return {
        "name": panel.name,
        "title": panel.title,
        "see": panel.see,
        "absent": panel.absent,
        "across": panel.across,
        "bounds": panel.bounds,
        "log": panel.log or panel.symlog,
        "guides": [asdict(guide) for guide in guides],
        "curves": packed,
        "caption": caption(curves, across=panel.across),
        "optional": False,
    }


def caption(curves: Mapping[str, Points], *, across: str = "step") -> str:
    """Return the latest value of each curve and its range; across timesteps, the latest value at each."""
    if across == "timestep":
        by_timestep = next(iter(curves.values()), ())
        return ", ".join(f"{format_number(value)} at {time:g}" for time, value in reversed(by_timestep))
    parts = []
    for label, points in curves.items():
        values = [value for _, value in points if math.isfinite(value)]
        if values:
            span = f"{format_number(min(values))} to {format_number(max(values))}"
            parts.append(f"{label} {format_number(values[-1])}" + (f" ({span})" if min(values) < max(values) else ""))
    return "; ".join(parts)


def thinned(points: Array) -> Array:
    """Return at most about `MOST_POINTS` points: the smallest and the largest value of each bin, in order."""
    if len(points) <= MOST_POINTS:
        return points
    kept: list[int] = []
    for bin_ in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        values = np.nan_to_num(points[bin_, 1])
        kept += sorted({int(bin_[values.argmin()]), int(bin_[values.argmax()])})
    return points[kept]


def pack(values: Any, kind: Literal["f2", "f4", "f8", "i4", "u1"]) -> str:  # noqa: ANN401 - anything of numpy
    """Return numbers as text: little-endian, the bytes of equal weight together, deflated, base64.

    Bytes of equal weight resemble one another, so they deflate to about two thirds of the mixed ones.
    """
    numbers = np.ascontiguousarray(values, dtype=f"<{kind}")
    planes = numbers.view(np.uint8).reshape(-1, numbers.itemsize).T
    return f"{kind}:{base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode('ascii')}"
