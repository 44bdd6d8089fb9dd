"""The page and the figures of the trained study, from the files of its cells: `trained.py --page` writes them.

Cells may be missing; the page then says which. What they say of the document is judged in trained_claims.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from intervals import Interval, interval

HERE = Path(__file__).resolve().parent
FRAME = HERE / "trained_frame.md"
PAGE = HERE / "trained.md"
FIGURES = HERE / "trained"

COLUMN_TITLES = {
    "clean": "clean",
    "stale_quantized": "stale and quantized",
    "stale": "stale",
    "quantized": "4 bit",
    "truncated": "temperature 0.7, top-p 0.8, top-k 20",
}
CORRECTION_TITLES = {
    "none": "no correction",
    "token_tis": "Token-TIS 2.0",
    "token_tis_20": "Token-TIS 20",
    "seq_tis": "Seq-TIS 4.0",
    "horizon": "horizon 0.9",
    "geo_rs": "Geo-RS",
    "geo_rs_token_tis": "Geo-RS + Token-TIS",
    "seq_mis": "Seq-MIS",
    "prefix": "prefix (CTPO)",
    "min_prefix": "least of the prefix (MinPRO)",
    "ess_cap": "ceiling from the ESS (P3O)",
    "replay": "replayed kept sets",
}
COLORS = {
    "none": "#444444",
    "token_tis": "#1f77b4",
    "token_tis_20": "#17becf",
    "seq_tis": "#d62728",
    "horizon": "#8c564b",
    "geo_rs": "#bcbd22",
    "geo_rs_token_tis": "#2ca02c",
    "seq_mis": "#ff7f0e",
    "prefix": "#e377c2",
    "min_prefix": "#7f7f7f",
    "ess_cap": "#98df8a",
    "replay": "#9467bd",
}
LAST = 10
"""Steps at the end of a training over which a metric is averaged."""

SMOOTH = 5
"""Steps over which a curve is averaged."""

Cells = list[dict[str, Any]]


def write_page(found: Cells, names: Sequence[str], facts: Mapping[str, str]) -> None:
    """Write trained.md and its figures.

    Args:
        found: the cells that are done.
        names: all cells of the study.
        facts: more parts of the page, by their name in trained_frame.md.
    """
    if found:
        _curves(found, "reward", FIGURES / "reward.png")
        _curves(found, "held_out", FIGURES / "held_out.png")
        _curves(found, "grad_norm", FIGURES / "grad_norm.png", logarithmic=True)
    missing = [name for name in names if name not in {cell["cell"] for cell in found}]
    parts = {
        **facts,
        "done": f"{len(found)} of {len(names)}",
        "missing": ", ".join(f"`{name}`" for name in missing) or "none",
        "summary": _summary(found),
        "starts": start_notes(found),
        "results": _results(found),
        "mismatch": _mismatch(found),
        "warnings": _warnings(found),
        "alarm": f"{ALARM:g}",
        "smooth": str(SMOOTH),
        "times": _times(found),
    }
    frame = FRAME.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"<<(\w+)>>", lambda place: parts[place[1]], frame), encoding="utf-8")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def select(found: Sequence[dict[str, Any]], column: str, correction: str) -> Cells:
    """The seeds of one training."""
    return [cell for cell in found if (cell["column"], cell["correction"]) == (column, correction)]


def accuracy(found: Cells, *, at: int = -1) -> Interval | None:
    """Return the held-out accuracy over seeds, of the last checkpoint or another."""
    return interval([cell["held_out"][at]["accuracy"] for cell in found]) if found else None


def at_the_end(found: Cells, metric: str) -> Interval | None:
    """Return a metric's mean over the last steps, over seeds; None where it is not measured."""
    values = [mean(finite(cell["metrics"][metric][-LAST:])) for cell in found if metric in cell["metrics"]]
    return interval(values) if values else None


def overall(found: Cells, metric: str) -> Interval | None:
    """Return a metric's mean over all steps, over seeds; None where it is not measured."""
    values = [mean(finite(cell["metrics"][metric])) for cell in found if metric in cell["metrics"]]
    return interval(values) if values else None


def gap(a: Cells, b: Cells) -> Interval | None:
    """Return final accuracy of `a` minus that of `b` over pairs: cells of one seed that start from the same policy."""
    others = {(cell["seed"], start(cell)): cell["held_out"][-1]["accuracy"] for cell in b}
    pairs = [(cell, others.get((cell["seed"], start(cell)))) for cell in a]
    gaps = [cell["held_out"][-1]["accuracy"] - other for cell, other in pairs if other is not None]
    return interval(gaps) if gaps else None


def start(cell: Mapping[str, Any]) -> float:
    """Return the accuracy before training: equal in all cells of a seed, if they share the warm-up policy."""
    return float(cell["held_out"][0]["accuracy"])


def start_notes(found: Cells) -> str:
    """Return a sentence for each seed whose cells start from several policies."""
    starts = {seed: sorted({start(cell) for cell in found if cell["seed"] == seed}) for seed in range(8)}
    notes = [
        f"Cells of seed {seed} start at {' and at '.join(f'{value:.3f}' for value in values)}: they come from "
        "different versions of the program. Only cells with one start are paired."
        for seed, values in starts.items()
        if len(values) > 1
    ]
    return "\n".join(notes)


def gain(cells: Cells) -> Interval | None:
    """Return final accuracy minus that of the warm-up policy, over seeds."""
    return gap(cells, [cell | {"held_out": cell["held_out"][:1]} for cell in cells])


def gap_text(value: Interval) -> str:
    """Return a difference with its sign, its interval and its number of seeds."""
    return f"{'+' if value.mean >= 0 else ''}{value} ({value.n} {'seed' if value.n == 1 else 'seeds'})"


def _summary(found: Cells) -> str:
    """What came out, in sentences."""
    lines = []
    for column in COLUMN_TITLES:
        none = select(found, column, "none")
        before, after = accuracy(none, at=0), accuracy(none)
        if before is None or after is None:
            continue
        lost = sum(map(is_lost, none))
        others = [
            f"{CORRECTION_TITLES[name]} at {accuracy(select(found, column, name))}"
            for name in CORRECTION_TITLES
            if name != "none" and select(found, column, name)
        ]
        line = f"- **{COLUMN_TITLES[column]}**: from {before}, no correction ends at {after}"
        line += f" ({lost} of {len(none)} seeds lost)"
        lines.append(line + (f"; {', '.join(others)}." if others else "."))
    return "\n".join(lines)


def _results(found: Cells) -> str:
    rows = []
    for column, correction in _trainings(found):
        seeds = select(found, column, correction)
        before, after, reward = accuracy(seeds, at=0), accuracy(seeds), at_the_end(seeds, "reward")
        gained = gain(seeds)
        assert gained is not None
        rows.append(
            (
                COLUMN_TITLES[column],
                CORRECTION_TITLES[correction],
                len(seeds),
                before,
                after,
                gap_text(gained).partition(" (")[0],
                reward,
                " · ".join(f"{cell['held_out'][-1]['accuracy']:.2f}" for cell in seeds),
            )
        )
    header = ("sampler", "correction", "seeds", "held-out before", "held-out after", "gain")
    return table((*header, f"reward, last {LAST} steps", "each seed"), rows)


def _mismatch(found: Cells) -> str:
    rows = []
    for column, correction in _trainings(found):
        seeds = select(found, column, correction)
        names = ("k3", "t_times_kl", "chi2_seq", "mean_weight", "ess", "low_weight", "rejected")
        cells = [overall(seeds, name) for name in names]
        shown = ["–" if value is None else f"{value.mean:.2g}" for value in cells]
        rows.append((COLUMN_TITLES[column], CORRECTION_TITLES[correction], *shown))
    header = ("k3 per token, nats", "T × KL, nats", "χ²_seq", "mean weight", "ESS", "low weights", "rejected")
    return table(("sampler", "correction", *header), rows)


ALARM = 2.0
"""A metric warns when its mean over `SMOOTH` steps is so many times its first such mean."""

LEVEL = 10.0
"""T × KL also warns at this level, nats: half of the clamp of 20."""


class Warner(NamedTuple):
    """A metric that may foretell a loss, and what it warns above: a level, or None for `ALARM` times its beginning."""

    metric: str
    name: str
    level: float | None = None


WARNERS = (
    Warner("t_times_kl", f"`rollout_corr/t_times_kl` above {LEVEL:g} nats", LEVEL),
    Warner("t_times_kl", "`rollout_corr/t_times_kl`"),
    Warner("k3", "`rollout_corr/k3_kl`"),
    Warner("chi2_token", "`rollout_corr/chi2_token`"),
    Warner("entropy", "`actor/entropy`"),
    Warner("grad_norm", "`actor/grad_norm`"),
)


def is_lost(cell: Mapping[str, Any]) -> bool:
    """Whether a training ended with less than half of the accuracy that it began with."""
    return bool(cell["held_out"][-1]["accuracy"] < cell["held_out"][0]["accuracy"] / 2)


def policy_lost_at(cell: Mapping[str, Any]) -> int | None:
    """The first checkpoint whose held-out accuracy is below half of the first one's."""
    limit = cell["held_out"][0]["accuracy"] / 2
    return next((point["step"] for point in cell["held_out"] if point["accuracy"] < limit), None)


def reward_lost_at(cell: Mapping[str, Any]) -> int | None:
    """The first step at which the reward, averaged over `SMOOTH` steps, is below half of its first such mean."""
    smooth = _smooth(cell["metrics"]["reward"])
    return _first(smooth, lambda value: value < smooth[SMOOTH - 1] / 2)


def warns_at(cell: Mapping[str, Any], warner: Warner) -> int | None:
    """The first step at which a metric warns."""
    smooth = _smooth(cell["metrics"][warner.metric])
    level = ALARM * smooth[SMOOTH - 1] if warner.level is None else warner.level
    return _first(smooth, lambda value: value > level)


def _first(smooth: Sequence[float], holds: Callable[[float], bool]) -> int | None:
    return next((step for step, value in enumerate(smooth, 1) if step >= SMOOTH and holds(value)), None)


def _smooth(values: Sequence[float | None]) -> list[float]:
    return [mean(finite(values[max(0, i - SMOOTH + 1) : i + 1])) for i in range(len(values))]


def _warnings(found: Cells) -> str:
    lost = [cell for cell in found if is_lost(cell)]
    if not lost:
        return "No training was lost."
    kept = [cell for cell in found if not is_lost(cell) and cell["column"] in {cell["column"] for cell in lost}]
    rows: list[tuple[object, ...]] = [
        ("held-out accuracy at half, first checkpoint", *map(policy_lost_at, lost), ""),
        ("reward at half", *map(reward_lost_at, lost), ""),
    ]
    for warner in WARNERS:
        false = sum(warns_at(cell, warner) is not None for cell in kept)
        rows.append((warner.name, *(warns_at(cell, warner) for cell in lost), f"{false} of {len(kept)}"))
    shown = [["–" if value is None else value for value in row] for row in rows]
    header = ("step of", *(f"`{cell['cell']}`" for cell in lost), "warns where nothing was lost")
    return table(header, shown)


def _times(found: Cells) -> str:
    rows = []
    for column in COLUMN_TITLES:
        cells = [cell for cell in found if cell["column"] == column]
        if not cells:
            continue
        minutes = [cell["core_seconds"] / 60 for cell in cells]
        rows.append(
            (
                COLUMN_TITLES[column],
                len(cells),
                _all(cells, "steps"),
                _all(cells, "responses"),
                f"{min(cell['tokens'] for cell in cells):,} … {max(cell['tokens'] for cell in cells):,}",
                f"{min(minutes):.1f} … {max(minutes):.1f}",
                _all(cells, "processor"),
                _all(cells, "torch"),
                _all(cells, "threads"),
            )
        )
    header = ("sampler", "cells", "steps", "responses", "tokens trained on", "core-minutes per cell")
    return table((*header, "processor", "torch", "threads"), rows)


def _trainings(found: Cells) -> list[tuple[str, str]]:
    return [(column, name) for column in COLUMN_TITLES for name in CORRECTION_TITLES if select(found, column, name)]


def _all(found: Cells, name: str) -> str:
    """The values that cells have, without repetition."""
    return ", ".join(dict.fromkeys(str(cell[name]) for cell in found))


def finite(values: Sequence[float | None]) -> list[float]:
    """The values that are there."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Sequence[float]) -> float:
    """Their mean; NaN without values."""
    return sum(values) / len(values) if values else math.nan


def _curves(found: Cells, what: str, path: Path, *, logarithmic: bool = False) -> None:
    """A panel for each column; a thin line for each seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [column for column in COLUMN_TITLES if any(cell["column"] == column for cell in found)]
    figure, panels = pyplot.subplots(1, len(columns), figsize=(4.2 * len(columns), 3.4), sharey=True, squeeze=False)
    for panel, column in zip(panels[0], columns, strict=True):
        for correction, color in COLORS.items():
            lines = [_line(cell, what) for cell in select(found, column, correction)]
            for x, y in lines:
                panel.plot(x, y, color=color, linewidth=0.6, alpha=0.5)
            if lines:
                length = min(len(x) for x, _ in lines)
                means = [mean([y[i] for _, y in lines]) for i in range(length)]
                panel.plot(lines[0][0][:length], means, color=color, linewidth=2, label=CORRECTION_TITLES[correction])
        panel.set_title(COLUMN_TITLES[column], fontsize=10)
        panel.set_xlabel("training step")
        if logarithmic:
            panel.set_yscale("log")
        panel.legend(fontsize=7)
    panels[0][0].set_ylabel(Y_LABELS[what])
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


Y_LABELS = {
    "reward": "reward, mean of 5 steps",
    "held_out": "held-out accuracy at temperature 1",
    "grad_norm": "norm of the gradient, mean of 5 steps",
}


def _line(cell: dict[str, Any], what: str) -> tuple[list[float], list[float]]:
    if what == "held_out":
        return [point["step"] for point in cell["held_out"]], [point["accuracy"] for point in cell["held_out"]]
    smooth = _smooth(cell["metrics"][what])
    return list(range(1, len(smooth) + 1)), smooth
