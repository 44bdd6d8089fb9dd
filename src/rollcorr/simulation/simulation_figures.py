"""Draw the figures of the built-in study from its rows. Requires matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rollcorr.simulation.studies import APART, REGIMES, ResultRow

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter
except ImportError as error:
    raise ImportError(
        "the tables are written; figures need matplotlib: pip install 'rollcorr[report]', and repeat the command"
    ) from error

Rows = Sequence[ResultRow]

BACKGROUND, INK, FAINT = "#ffffff", "#1f2328", "#d5d9df"
"""Colors of a figure."""

SHOWN = {
    "none": "none",
    "decoupled_token_is": "Token-TIS",
    "decoupled_seq_is": "Seq-TIS",
    "sequence_untruncated": "Seq-IS, untruncated",
    "decoupled_seq_is_rs": "Seq-MIS",
    "decoupled_k3_rs_token_tis": "K3-RS-Token-TIS",
    "bypass_ppo_clip": "bypass PPO",
}
"""Estimators that are drawn as curves."""
_STYLE = {
    "figure.facecolor": BACKGROUND,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelsize": 8,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
    "xtick.color": INK,
    "xtick.labelsize": 7,
    "ytick.color": INK,
    "ytick.labelsize": 7,
}
COLORS = ("#1f2328", "#2563c9", "#b45309", "#f0a04b", "#7c3aed", "#15803d", "#c02626")


def write_figures(rows: Mapping[str, Rows], folder: Path) -> list[Path]:
    """Draw the figures of all available studies as PNG files in a folder, and return their paths."""
    drawn: dict[str, Callable[[Rows], Figure]] = {
        "regimes": draw_regimes,
        "length": lambda found: draw_sweep(found, "T", "length T, tokens"),
        "kl": lambda found: draw_sweep(found, "kl", "KL per token, nats"),
        "batch_size": draw_batch_sizes,
        "threshold": draw_thresholds,
        "orders": draw_orders,
        "growth": draw_growth,
    }
    paths = []
    with rc_context(_STYLE):
        for name, draw in drawn.items():
            study = "length" if name == "batch_size" else name
            if rows.get(study):
                paths.append(folder / f"{name}.png")
                paths[-1].write_bytes(to_png(draw(rows[study]), dpi=110))
    return paths


def draw_regimes(rows: Rows) -> Figure:
    """Draw the direction error of every estimator, for every kind, a panel per regime; best on top."""
    regimes = [regime for regime in REGIMES if any(row["regime"] == regime for row in rows)]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    batch_size = max(row["batch_size"] for row in rows)
    cells = {(r["estimator"], r["regime"], r["kind"]): r["direction"] for r in rows if r["batch_size"] == batch_size}

    # Exclude the kinds of `APART` from the order: raw log-probs make all estimators equal; broken sequences are a bug.
    directions: dict[str, list[float]] = {}
    for (name, _, kind), direction in cells.items():
        if kind not in APART:
            directions.setdefault(name, []).append(direction)
    names = sorted(directions, key=lambda name: fmean(directions[name]))

    figure, panels = _create_figure(3.2 + 2.0 * len(regimes), 1.6 + 0.22 * len(names), len(regimes))
    for axes, regime in zip(panels, regimes, strict=True):
        values = [[cells[name, regime, kind] for kind in kinds] for name in names]
        axes.imshow(values, vmin=0.0, vmax=1.0, cmap="viridis_r", aspect="auto")
        axes.set_title(f"T × KL = {regime:g}")
        axes.set_xticks(range(len(kinds)), kinds, rotation=90)
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [])
        axes.tick_params(length=0)
        axes.grid(visible=False)
    figure.colorbar(panels[0].images[0], ax=panels, label="direction error: 0 exact, 1 noise or nothing", shrink=0.5)
    return figure


def draw_sweep(rows: Rows, column: str, label: str) -> Figure:
    """Draw bias, deviation, direction error and ESS of the main estimators against one column."""
    found = [row for row in rows if row["kind"] == rows[0]["kind"] and row["batch_size"] == 256]
    titles = {
        "bias": "bias / |∇J|",
        "deviation": "deviation / |∇J|",
        "direction": "direction error",
        "ess": "effective sample size",
    }
    return _draw_curves(11.4, [(title, name, found) for name, title in titles.items()], column, label)


def draw_batch_sizes(rows: Rows) -> Figure:
    """Draw the root MSE against the batch size, at a short, a medium and a long length."""
    found = [row | {"root_mse": math.sqrt(row["mse"])} for row in rows if row["kind"] == rows[0]["kind"]]
    lengths = sorted({row["T"] for row in rows})
    chosen = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    panels = [(f"√MSE / |∇J| at T = {T}", "root_mse", [row for row in found if row["T"] == T]) for T in chosen]
    return _draw_curves(10.4, panels, "batch_size", "batch size, sequences")


def _draw_curves(width: float, panels: Sequence[tuple[str, str, Rows]], x: str, label: str) -> Figure:
    """Draw a curve for each estimator of `SHOWN` against the column `x`; a panel is a title, the column y, and rows."""
    figure, row_of_axes = _create_figure(width, 3.4, len(panels))
    for axes, (title, y, rows) in zip(row_of_axes, panels, strict=True):
        for color, (estimator, shown) in zip(COLORS, SHOWN.items(), strict=True):
            points = sorted((row[x], row[y]) for row in rows if row["estimator"] == estimator)
            axes.plot(*zip(*points, strict=True), color=color, marker="o", label=shown)
        axes.set_xscale("log")
        if y == "root_mse":
            axes.set_yscale("log")
        elif y in ("bias", "deviation"):
            axes.set_yscale("symlog", linthresh=0.01)
        _set_labels(axes, title, label)
        if x == "T":
            lengths = sorted({int(row["T"]) for row in rows})
            axes.set_xticks(lengths, [str(length) for length in lengths])
    _add_legend(figure, row_of_axes[0])
    return figure


def draw_thresholds(rows: Rows) -> Figure:
    """Draw the direction error against the threshold, a panel per family; the matched random rejection is dashed."""
    families = _group_rows([row for row in rows if row["batch_size"] == 1024], "family")
    figure, panels = _create_figure(13.0, 2.1, len(families), columns=6)
    for axes, (family, members) in zip(panels, families.items(), strict=True):
        for color, (kind, found) in zip(COLORS[1:], _group_rows(members, "kind").items(), strict=False):
            x = [row["threshold"] for row in found]
            axes.plot(x, [row["direction"] for row in found], color=color, label=kind)
            if found[0]["unit"]:
                axes.plot(x, [row["random_direction"] for row in found], color=color, linewidth=1.0, linestyle="--")
        axes.set_xscale("log")
        axes.set_ylim(0.0, 1.02)
        _set_labels(axes, family, "")
    _add_legend(figure, panels[0])
    return figure


def draw_orders(rows: Rows) -> Figure:
    """Draw the points of each fitted order, with its slope and the published one."""
    checks = _group_rows([row | {"check": f"{row['estimator']}: {row['quantity']}"} for row in rows], "check")
    figure, panels = _create_figure(11.4, 2.6, len(checks), columns=3)
    for axes, (title, points) in zip(panels, checks.items(), strict=True):
        x, y = [row["x"] for row in points], [row["y"] for row in points]
        slope, published = points[0]["slope"], points[0]["published"]
        axes.loglog(x, y, "o", color=COLORS[1], markersize=4, label=f"measured, slope {slope:.2f}")
        axes.loglog(
            x, [y[0] * (v / x[0]) ** published for v in x], "--", color=COLORS[6], label=f"published, {published:g}"
        )
        axes.legend()
        _set_labels(axes, title, "")
    return figure


def draw_growth(rows: Rows) -> Figure:
    """Draw χ² of sequences: exact, from (1 + χ̄²)^T, and as estimated by a batch of 1,024."""
    pairs = _group_rows(rows, "pair")
    figure, panels = _create_figure(10.4, 3.2, len(pairs))
    for axes, (name, found) in zip(panels, pairs.items(), strict=True):
        lengths = [row["T"] for row in found]
        for color, column, label in (
            (COLORS[0], "chi2_seq_exact", "exact"),
            (COLORS[1], "chi2_seq_law", "(1 + χ̄²)^T − 1"),
            (COLORS[6], "chi2_seq_batch_of_1024", "as a batch of 1,024 measures it"),
        ):
            axes.loglog(lengths, [row[column] for row in found], color=color, marker="o", label=label)
        axes.legend()
        _set_labels(axes, f"χ² of sequences: {name}", "length T, tokens")
    return figure


def _create_figure(
    width: float, row_height: float, count: int, *, columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels in rows of `columns`; in one row by default."""
    columns = columns or count
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width, row_height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[count:]:
        unused.set_axis_off()
    return figure, panels[:count]


def _group_rows(rows: Rows, column: str) -> dict[str, list[ResultRow]]:
    """Group rows by the value of a column, in order."""
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return groups


def _set_labels(axes: Axes, title: str, label: str) -> None:
    # Between powers of ten, labels of minor ticks would overlap.
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    if axes.get_xscale() == "log":
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        low, high = axes.get_xlim()
        if high / low < 10:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
            axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_title(title)
    axes.set_xlabel(label)


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def to_png(figure: Figure, *, dpi: int = 144) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=figure.get_facecolor(), metadata={"Software": None})
    return buffer.getvalue()
