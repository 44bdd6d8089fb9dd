"""The figures of the measured study, from its rows. They need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measured_rows import CLAMP, CUT, SAMPLINGS, Rows, clip_values, distance, law, select

from rollcorr.simulation.simulation_figures import BACKGROUND, FAINT, INK, to_png

COLORS = {"1.0": "#2563c9", "0.4": "#b45309", CUT: "#7c3aed"}
PRECISION, STALENESS, TOKENS = "#2563c9", "#b45309", "#8b949e"


def write_figures(grid: Rows, temperature: Rows, folder: Path) -> list[Path]:
    """Draw what there are rows for; the paths of the files."""
    drawn: dict[str, Callable[[], Figure | None]] = {
        "figure_2": lambda: draw_variance(grid),
        "growth": lambda: draw_growth(grid),
        "figure_3": lambda: draw_low_weights(grid),
        "figure_4": lambda: draw_false_positive(grid),
        "figure_5": lambda: draw_kl(grid),
        "temperature": lambda: draw_temperature(temperature),
        "clip": lambda: draw_clip(grid),
    }
    paths = []
    for name, draw in drawn.items():
        figure = draw()
        if figure is not None:
            path = folder / f"{name}.png"
            path.write_bytes(to_png(figure, dpi=100))
            paths.append(path)
    return paths


def draw_variance(grid: Rows) -> Figure | None:
    """Mean weight, χ², ESS and low weights against T × KL, for both knobs."""
    rows = [row for row in select(grid, sampling="1.0", mode="processed") if distance(row) > 1e-3]
    if not rows:
        return None
    figure, panels = _figure(13.2, 3.4, 4)
    for updates, color, marker in ((False, PRECISION, "o"), (True, STALENESS, "^")):
        chosen = [row for row in rows if (row["updates"] > 0) is updates]
        x = [distance(row) for row in chosen]
        label = "knob: staleness" if updates else "knob: precision"
        style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": 4, "color": color, "label": label}
        panels[0].plot(x, [row["mean_weight"] for row in chosen], **style)
        panels[1].plot(x, [max(row["chi2_seq"], 1e-3) for row in chosen], **style)
        panels[2].plot(x, [row["ess"] for row in chosen], **style)
        panels[3].plot(x, [row["low_weight"] for row in chosen], **style)
    token: dict[str, Any] = {"linestyle": "", "marker": ".", "color": TOKENS, "label": "Token-TIS"}
    panels[0].plot([distance(row) for row in rows], [row["token_mean_weight"] for row in rows], **token)
    panels[2].plot([distance(row) for row in rows], [row["token_ess"] for row in rows], **token)

    # Gaussian log-ratios of variance 2 T × KL: their effective sample size is exp(−variance).
    curve = [10 ** (step / 20) for step in range(-60, 40)]
    panels[2].plot(curve, [math.exp(-2 * value) for value in curve], color=FAINT, label="exp(−2 T × KL)")
    panels[1].set_yscale("log")
    titles = ("mean weight, truncated at 4", "χ²_seq of the sample", "effective sample size", "low-weight fraction")
    for axes, title in zip(panels, titles, strict=True):
        _finish(axes, "T × KL, nats", title, logarithmic=True)
        axes.axvline(CLAMP, color="#c02626", linewidth=0.8, linestyle=":")
    return figure


def draw_growth(grid: Rows) -> Figure | None:
    """log E[w²] against T, and the law T log(1 + χ̄²)."""
    found = [name for name in ("bf16", "int8", "int8, 5 bits") if select(grid, engine=name, sampling="1.0", updates=0)]
    if not found:
        return None
    figure, panels = _figure(3.8 * len(found), 3.4, len(found))
    for axes, name in zip(panels, found, strict=True):
        rows = select(grid, engine=name, sampling="1.0", updates=0, mode="processed")
        x = [row["T"] for row in rows]
        axes.errorbar(
            x,
            [row["log_second_moment"] for row in rows],
            yerr=[row["log_second_moment_error"] for row in rows],
            color=PRECISION,
            marker="o",
            markersize=4,
            label="measured",
        )
        axes.plot(x, [law(row) for row in rows], color=INK, linestyle="--", label="T log(1 + χ̄²)")
        axes.set_yscale("symlog", linthresh=0.01)
        _finish(axes, "response length T", f"log(1 + χ²_seq), {name}", logarithmic=True)
    return figure


def draw_low_weights(grid: Rows) -> Figure | None:
    """The low-weight fraction against length, a panel for each distance between the policies."""
    pairs = [("bf16", 0), ("int8", 0), ("int8, 5 bits", 0), ("bf16, 4 bits", 0), ("bf16", 8), ("bf16", 32)]
    pairs = [(name, updates) for name, updates in pairs if select(grid, engine=name, updates=updates)]
    if not pairs:
        return None
    figure, panels = _figure(2.7 * len(pairs), 3.2, len(pairs))
    for axes, (name, updates) in zip(panels, pairs, strict=True):
        for sampling in ("1.0", "0.4"):
            rows = select(grid, engine=name, updates=updates, sampling=sampling, mode="processed")
            axes.errorbar(
                [row["T"] for row in rows],
                [row["low_weight"] for row in rows],
                yerr=[row["low_weight_error"] for row in rows],
                color=COLORS[sampling],
                marker="o",
                markersize=3,
                label=SAMPLINGS[sampling],
            )
        axes.set_ylim(-0.03, 1.03)
        _finish(axes, "response length T", name + (f", {updates} updates" if updates else ""), logarithmic=True)
    return figure


def draw_false_positive(grid: Rows) -> Figure | None:
    """Low weights, ESS and saturated weights under cut sampling, by mode; the control is the same rollout, replayed."""
    rows = select(grid, engine="bf16", updates=0, sampling=CUT)
    if not rows:
        return None
    figure, panels = _figure(10.6, 3.4, 3)
    columns = {
        "low_weight": "low-weight fraction",
        "ess": "effective sample size of Seq-TIS",
        "saturated": "at the clamp, either side",
    }
    for axes, (column, title) in zip(panels, columns.items(), strict=True):
        for mode, color in (("raw", TOKENS), ("processed", "#c02626"), ("replayed", "#15803d")):
            chosen = select(rows, mode=mode)
            y = [
                row["saturated_low"] + row["saturated_high"] if column == "saturated" else row[column] for row in chosen
            ]
            axes.plot([row["T"] for row in chosen], y, color=color, marker="o", markersize=3, label=mode)
            caught = [(row["T"], value) for row, value in zip(chosen, y, strict=True) if row["false_positive"]]
            if caught and column == "ess":
                axes.plot(*zip(*caught, strict=True), "x", color=INK, markersize=9, label="the health rule fires")
        axes.set_ylim(-0.03, 1.05)
        _finish(axes, "response length T", title, logarithmic=True)
    return figure


def draw_kl(grid: Rows) -> Figure | None:
    """KL of each sampling and mode, and the length that it implies."""
    longest = max(row["T"] for row in grid)
    rows = select(grid, engine="bf16", updates=0, T=longest)
    if not rows:
        return None
    figure, panels = _figure(8.6, 3.4, 1)
    axes = panels[0]
    labels = [f"{row['mode']}\n{row['sampling']}" for row in rows]
    axes.bar(labels, [row["k3"] for row in rows], color=[COLORS[row["sampling"]] for row in rows])
    axes.plot(labels, [abs(row["kl"]) for row in rows], "_", color=INK, markersize=18, label="|mean of −log ρ|")
    axes.set_yscale("log")
    axes.set_ylabel("KL per token, nats")
    right = axes.secondary_yaxis("right", functions=(lambda kl: CLAMP / (kl + 1e-12), lambda t: CLAMP / (t + 1e-12)))
    right.set_ylabel("T_max = 20 / KL")
    axes.set_title("bars: k3, an estimate of KL(μ‖π)", fontsize=9, color=INK)
    axes.legend(fontsize=7, frameon=False)
    axes.tick_params(labelsize=7)
    return figure


def draw_temperature(rows: Rows) -> Figure | None:
    """KL against temperature, whole, in the head and in the tail, for each knob."""
    knobs = list(dict.fromkeys(row["knob"] for row in rows))
    if not knobs:
        return None
    figure, panels = _figure(3.8 * len(knobs), 3.4, len(knobs))
    for axes, knob in zip(panels, knobs, strict=True):
        chosen = select(rows, knob=knob)
        x = [row["temperature"] for row in chosen]
        for column, color, label in (
            ("kl", INK, "all"),
            ("kl_head", PRECISION, "head"),
            ("kl_tail", STALENESS, "tail"),
        ):
            axes.plot(
                x, [max(row[column], 1e-12) for row in chosen], color=color, marker="o", markersize=3, label=label
            )
        axes.axvline(1.0, color=FAINT, linewidth=0.8)
        axes.set_yscale("log")
        _finish(axes, "temperature of both sides", f"KL(μ‖π) per token, {knob}", logarithmic=True)
    return figure


def draw_clip(grid: Rows, clips: Sequence[float] = (2, 4, 16, 256, 65536, 4.0e8)) -> Figure | None:
    """Weights alike at the lower bound, and the share that the largest twentieth has, against the ceiling."""
    rows = [row for row in select(grid, mode="processed", T=512) if row["clip_ess"] and distance(row) > 0.5]
    if not rows:
        return None
    figure, panels = _figure(8.6, 3.4, 2)
    for row in rows:
        shade = {"color": COLORS[row["sampling"]], "marker": "o", "markersize": 3, "linewidth": 0.8, "alpha": 0.8}
        panels[0].plot(clips, clip_values(row, "at_lower"), **shade)
        panels[1].plot(clips, clip_values(row, "ess"), **shade)
    for sampling, color in COLORS.items():
        panels[1].plot([], [], color=color, label=SAMPLINGS[sampling])
    for axes, title in zip(panels, ("at the lower bound 1/C", "effective sample size"), strict=True):
        axes.set_ylim(-0.03, 1.05)
        _finish(axes, "two-sided clip [1/C, C]: C", title, logarithmic=True)
    return figure


def _figure(width: float, height: float, panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=BACKGROUND)
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _finish(axes: Axes, label: str, title: str, *, logarithmic: bool) -> None:
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(label, fontsize=8)
    axes.set_title(title, fontsize=9, color=INK)
    axes.tick_params(labelsize=7)
    axes.grid(color=FAINT, linewidth=0.4)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)
