"""The figures of a report: panels of mismatch metrics over the steps, with guide lines, and the reward.

Tokens have six panels. Denoising steps have their own, one of which is over the timesteps of the schedule.

The guide lines are the registry's healthy ranges. Figures are built with matplotlib's objects alone (no pyplot, no
global state), so they are safe in threads and notebooks.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollcorr.diagnostics.health.diffusion_rules import BY_TIMESTEP
from rollcorr.diagnostics.health.evidence import RECENT_STEPS
from rollcorr.diagnostics.health.health_check import healthy_range

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, SymmetricalLogLocator
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'rollcorr[report]'") from error

Array = np.ndarray[Any, np.dtype[np.float64]]
Point = tuple[float, float]

MARKED = 30
"""A series up to this long is drawn point by point; a longer one gets a rolling mean."""
LEGEND_COLUMNS = 3
"""Curves in one row of a legend."""
DASHES = ("-", "--", ":")
"""Line styles, for more curves than there are colors."""
MOST_POINTS = 400
"""A series longer than this is drawn in this many bins: their means, over the range of each."""


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colors of a figure."""

    background: str
    ink: str
    faint: str
    curves: tuple[str, ...]
    ideal: str
    warn: str


LIGHT = Theme(
    background="#ffffff",
    ink="#1f2328",
    faint="#d5d9df",
    curves=("#2563c9", "#b45309", "#7c3aed", "#0f766e", "#be185d", "#4d7c0f"),
    ideal="#15803d",
    warn="#c02626",
)
DARK = Theme(
    background="#171b21",
    ink="#d7dce2",
    faint="#39414c",
    curves=("#6ea8fe", "#f0a04b", "#b794f6", "#2dd4bf", "#f472b6", "#a3e635"),
    ideal="#4ade80",
    warn="#f87171",
)


@dataclass(frozen=True)
class Guide:
    """A dashed line at a value: the ideal, or where a warning begins."""

    value: float
    kind: Literal["ideal", "warn"]
    label: str
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One figure.

    Attributes:
        name: file name without the ending.
        title: heading, with the unit.
        curves: metric → label; those that a series lacks are left out.
        bounds: values that the y axis must show, for metrics with a natural range.
        symlog: logarithmic on both sides of 0, for metrics that span orders of magnitude.
        log: logarithmic where all values are above 0.
        absent: what to say when no curve has a value.
        width: of the figure, inches.
        across: what the x axis shows.
        guides: dashed lines, beside those of the registry.
        see: what to look for, in a sentence.
        smooth: whether a long series gets a rolling mean; not for one that jumps by design.
    """

    name: str
    title: str
    curves: Mapping[str, str]
    absent: str
    bounds: tuple[float, ...] = ()
    symlog: bool = False
    log: bool = False
    width: float = 5.6
    across: Literal["step", "timestep"] = "step"
    guides: tuple[Guide, ...] = ()
    see: str = ""
    smooth: bool = True


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
    width=11.4,
)
"""The panel of runs whose reward recognizes what was drawn."""

LAGS = Panel(
    name="lags",
    title="KL (k3) by the age of the weights, nats",
    curves={"k3_kl_lag0": "engine, at lag 0", "k3_kl_staleness": "added by old weights"},
    absent="not measured",
    bounds=(0.0,),
    symlog=True,
    width=11.4,
)
"""The panel of series with versions of the weights."""

REWARD = Panel(
    name="reward",
    title="Reward",
    curves={"reward/mean": "mean reward", "reward/accuracy": "accuracy"},
    absent="no rewards were logged",
    width=11.4,
)


def panels_of(series: Mapping[str, Sequence[Point]], *, diffusion: bool) -> tuple[Panel, ...]:
    """The panels of a report on tokens, or on denoising steps; of lags and accuracies, only if they were measured."""
    measured = tuple(panel for panel in (LAGS, ACCURACY) if panel.curves.keys() & series.keys())
    return (*(STEP_PANELS if diffusion else PANELS), *measured, REWARD)


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
    Panel(
        name="staleness",
        title="Updates that the sampler is behind",
        curves={"engine/staleness": "staleness"},
        absent="not logged",
        bounds=(0.0,),
        smooth=False,
        see="A line that only rises belongs to a sampler that gets no new weights.",
    ),
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


def over_timesteps(series: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
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


def draw(panel: Panel, series: Mapping[str, Sequence[Point]], theme: Theme = LIGHT) -> Figure:
    """Draw one panel from (step, value) series by bare metric name; metrics that are not there are left out."""
    curves = _shown({name: series.get(name, ()) for name in panel.curves})
    guides = [*guides_of(curves, labels=panel.curves), *panel.guides]
    return _figure(panel, {panel.curves[name]: points for name, points in curves.items()}, guides, theme)


def draw_runs(panel: Panel, runs: Mapping[str, Sequence[Point]], theme: Theme = LIGHT) -> Figure:
    """Draw the one metric of a panel for several runs, as (step, value) series by name of the run.

    A run keeps its color and its dashes in every panel, also where another run lacks the metric.
    """
    guides = guides_of(panel.curves, labels=panel.curves) if _shown(runs) else []
    return _figure(panel, {name: _finite(points) for name, points in runs.items()}, guides, theme)


def _shown(curves: Mapping[str, Sequence[Point]]) -> dict[str, Array]:
    finite = {name: _finite(points) for name, points in curves.items()}
    return {name: points for name, points in finite.items() if len(points)}


def _figure(panel: Panel, curves: Mapping[str, Array], guides: Sequence[Guide], theme: Theme) -> Figure:
    """A figure with curves by their labels; a curve without points takes its color and is not drawn."""
    figure = Figure(figsize=(panel.width, 3.1), layout="constrained", facecolor=theme.background)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=theme.background)
    drawn = {label: points for label, points in curves.items() if len(points)}

    # A legend stands above the axes, so the title moves up to make room for it.
    legend_rows = math.ceil(len(drawn) / LEGEND_COLUMNS) if len(curves) > 1 else 0
    pad = 8 + 14 * legend_rows
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=theme.ink, pad=pad)
    if not drawn:
        axes.set_axis_off()
        axes.text(0.5, 0.5, panel.absent, ha="center", va="center", color=theme.ink, transform=axes.transAxes)
        return figure

    for number, (label, points) in enumerate(curves.items()):
        if label in drawn:
            color = theme.curves[number % len(theme.curves)]
            dashes = DASHES[number // len(theme.curves) % len(DASHES)]
            _draw_curve(axes, points, label=label, color=color, dashes=dashes, smooth=panel.smooth)
    _set_scale(axes, panel, np.concatenate([points[:, 1] for points in drawn.values()]), guides)
    _draw_guides(axes, guides, theme)
    _style(axes, theme, legend=legend_rows > 0, across=panel.across)
    return figure


def to_png(figure: Figure, *, dpi: int = 144) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=figure.get_facecolor(), metadata={"Software": None})
    return buffer.getvalue()


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


def _finite(points: Sequence[Point]) -> Array:
    array = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    return array[np.isfinite(array).all(axis=1)]


def _draw_curve(axes: Axes, points: Array, *, label: str, color: str, dashes: str, smooth: bool) -> None:
    """A line with markers when short, a rolling mean over the raw line when longer, binned when very long."""
    if len(points) <= MARKED:
        axes.plot(*points.T, color=color, linestyle=dashes, linewidth=1.8, marker="o", markersize=3.5, label=label)
        return
    if len(points) <= MOST_POINTS:
        if not smooth:
            axes.plot(*points.T, color=color, linestyle=dashes, linewidth=1.4, alpha=0.8, label=label)
            return
        axes.plot(*points.T, color=color, linewidth=0.8, alpha=0.35)
        means = rolling_mean(points[:, 1], max(3, len(points) // 20))
        axes.plot(points[:, 0], means, color=color, linestyle=dashes, label=label)
        return

    bins = np.array_split(points, MOST_POINTS)
    steps, means = np.array([part.mean(axis=0) for part in bins]).T
    low, high = np.array([(part[:, 1].min(), part[:, 1].max()) for part in bins]).T
    axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(steps, rolling_mean(means, MOST_POINTS // 40), color=color, linestyle=dashes, label=label)


def rolling_mean(values: Array, window: int) -> Array:
    """The mean over the values around each one; at the ends, over those that exist."""
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


def _set_scale(axes: Axes, panel: Panel, values: Array, guides: Sequence[Guide]) -> None:
    shown = np.concatenate([values, panel.bounds, [guide.value for guide in guides if not guide.optional]])
    low, high = float(shown.min()), float(shown.max())

    # Where values lie far beyond every guide line, a linear axis would flatten all the others.
    far = float(np.abs(values).max()) > 50 * max((abs(guide.value) for guide in guides), default=math.inf)
    if panel.log and float(values.min()) > 0:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.6, 1.6 * high)
    elif panel.symlog or far:
        sizes = np.abs(values[values != 0])
        typical = float(np.median(sizes)) if len(sizes) else 1e-3
        linear = 10.0 ** math.ceil(math.log10(min(max(typical, 1e-8), 0.1)))
        axes.set_yscale("symlog", linthresh=linear, linscale=1.0)
        locator = SymmetricalLogLocator(base=10, linthresh=linear)
        locator.set_params(numticks=7)
        axes.yaxis.set_major_locator(locator)
        axes.yaxis.minorticks_off()
        axes.set_ylim(1.6 * low - 0.15 * linear if low <= 0 else low / 1.6, 2.5 * high)
    else:
        padding = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - padding, high + padding)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))

    # Steps are whole numbers, also where there is only one of them.
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    left, right = axes.get_xlim()
    if right - left < 1:
        axes.set_xlim(round((left + right) / 2) - 1, round((left + right) / 2) + 1)


def _draw_guides(axes: Axes, guides: Sequence[Guide], theme: Theme) -> None:
    low, high = axes.get_ylim()
    for guide in guides:
        if not low <= guide.value <= high:
            continue
        color = theme.ideal if guide.kind == "ideal" else theme.warn
        axes.axhline(guide.value, color=color, linestyle=(0, (5, 3)), linewidth=1.1, zorder=1.5)
        axes.annotate(
            guide.label,
            xy=(1.0, guide.value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=7.5,
            color=color,
        )


def _style(axes: Axes, theme: Theme, *, legend: bool, across: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.faint)
    axes.tick_params(colors=theme.ink, labelsize=8, length=3)
    axes.yaxis.offsetText.set(color=theme.ink, fontsize=8)
    axes.grid(axis="y", color=theme.faint, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(across, fontsize=8, color=theme.ink)
    if legend:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 0.98),
            fontsize=7.5,
            frameon=False,
            labelcolor=theme.ink,
            ncols=LEGEND_COLUMNS,
        )
